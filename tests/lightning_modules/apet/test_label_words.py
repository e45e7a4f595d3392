"""Language models as classifiers by label words, and every way to tune them."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.adapter import SaveAdapter
from datamodules import GLUEData
from lightning_modules.apet import LabelWords
from lightning_modules.apet.module import LabelWordTuning
from lightning_modules.apet.prompt import add_prompt
from lightning_modules.vera import LanguageTuning, load_adapter

SIZES = {
    "llama": {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "t5": {
        "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "decoder_start_token_id": 0, "dropout_rate": 0.0,
    },
}  # fmt: skip
TARGETS = {"llama": ["q_proj", "v_proj"], "bloom": ["query_key_value"], "t5": ["q", "v"]}


def random_model(kind, **settings):
    """A tiny language model of 40 tokens."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=40, **SIZES[kind], **settings)
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    return auto.from_config(config).eval()


@pytest.mark.parametrize("soft_tokens", [0, 3])
@pytest.mark.parametrize("kind", SIZES)
def test_the_logits_are_the_label_words_behind_the_prompt(kind, soft_tokens):
    """And the output layer sees no position at which no text ends."""
    model = random_model(kind)
    config = model.config
    if soft_tokens:
        add_prompt(model, soft_tokens, seed=1)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
    seen = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, given, out: seen.append(given[0].shape[1]))
    logits = LabelWords(model, [3, 4])(ids, mask)
    handle.remove()
    assert seen == [1 if config.is_encoder_decoder else 2]
    for row, length in enumerate((4, 2, 2)):
        alone = ids[row : row + 1, :length]
        more = {"decoder_input_ids": torch.tensor([[0]])} if config.is_encoder_decoder else {}
        expected = model(input_ids=alone, **more).logits[0, -1, [3, 4]]
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ends", [1, [7, 1], None])
@pytest.mark.parametrize("kind", SIZES)
def test_a_decoder_answers_in_place_of_an_appended_end_token(kind, ends):
    """It learned that nothing follows the end token; T5's encoder reads it, as in pre-training."""
    model = random_model(kind, eos_token_id=ends)
    # an end token inside a text is not an appended one, and one of the padding is of no text
    ids = torch.tensor([[5, 1, 6, 8, 1], [9, 10, 1, 1, 1], [11, 12, 13, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]])
    logits = LabelWords(model, [3, 4])(ids, mask)
    seq2seq = model.config.is_encoder_decoder
    for row, length in enumerate((5, 3, 3) if seq2seq or ends is None else (4, 2, 3)):
        more = {"decoder_input_ids": torch.tensor([[0]])} if seq2seq else {}
        expected = model(input_ids=ids[row : row + 1, :length], **more).logits[0, -1, [3, 4]]
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)


def test_several_end_tokens_that_the_model_does_not_know_are_recognised():
    """A chat tokenizer's, where the configuration has another one."""
    model = random_model("llama", eos_token_id=1)
    ids = torch.tensor([[5, 7, 6, 8, 9, 7], [10, 11, 9, 7, 0, 0]])
    mask = (ids > 0).long()
    logits = LabelWords(model, [3, 4], ends=[9, 7])(ids, mask)
    for row, length in enumerate((4, 2)):
        expected = model(input_ids=ids[row : row + 1, :length]).logits[0, -1, [3, 4]]
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)


BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def test_bart_reads_what_its_targets_begin_with():
    """It was pre-trained to write `<s>` first: the word comes after that."""
    torch.manual_seed(0)
    config = transformers.BartConfig(vocab_size=40, **BART)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids = torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0]])
    mask = (ids > 0).long()
    logits = LabelWords(model, [3, 4], begins=[1])(ids, mask)
    for row, length in enumerate((4, 3)):
        start = torch.tensor([[2, 1]])
        output = model(input_ids=ids[row : row + 1, :length], decoder_input_ids=start)
        expected = output.logits[0, -1, [3, 4]]
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_decoder_that_starts_with_no_token_is_said():
    config = transformers.BartConfig(vocab_size=40, **{**BART, "decoder_start_token_id": None})
    with pytest.raises(ValueError, match="has no decoder_start_token_id"):
        LabelWords(transformers.BartForConditionalGeneration(config), [3, 4])


@pytest.mark.parametrize(("kind", "end"), [("llama", 5), ("bart", 2)])
def test_special_tokens_come_from_the_data_and_from_checkpoints(kind, end, tmp_path):
    data = GLUEData("SST-2", source="generated", label_words=["dull", "funny"], limit=8)
    sizes = {**SIZES, "bart": BART}[kind]
    model_args = {"vocab_size": 2000, **sizes, "eos_token_id": end}
    module = LabelWordTuning(
        num_classes=2, architecture=kind, model_args=model_args, method="head", heads=["lm_head"]
    )
    trainer = L.Trainer(
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
        num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = LabelWordTuning.load_from_checkpoint(tmp_path / "last.ckpt")
    for words in (module.model, loaded.model):
        assert words.begins.tolist() == [1]  # the tokenizer's <s> and </s>
        assert words.ends.tolist() == sorted({2, end})


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("method", ["apet", "prompt", "bitfit", "lora", "adapter_h"])
def test_every_way_to_tune_lowers_the_loss(kind, method, tmp_path):
    data = GLUEData(
        "SST-2",
        source="generated",
        label_words=["dull", "funny"],
        limit=32,
        eval_limit=32,
        batch_size=32,
    )
    module = LabelWordTuning(
        num_classes=2, architecture=kind, model_args={"vocab_size": 2000, **SIZES[kind]},
        method=method, rank=4, targets=TARGETS[kind], lr=3e-2, warmup=0.0, schedule="constant",
        method_args={"budget": 200} if method == "apet" else None,
    )  # fmt: skip
    trainer = L.Trainer(
        max_steps=12, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
        num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    torch.manual_seed(0)
    losses = []
    step = module.training_step
    module.training_step = lambda *batch: losses.append(step(*batch)) or losses[-1]
    trainer.fit(module, data)
    assert sum(losses[-3:]) / 3 < losses[0]
    assert module.hparams.label_tokens == data.label_tokens


def test_data_without_label_words_is_said():
    module = LabelWordTuning(num_classes=2, architecture="llama")
    with pytest.raises(ValueError, match="needs a word for each class"):
        module.build()


def llama(module=LabelWordTuning, **arguments):
    """A tiny Llama, as a classifier or as a language model, built by its LightningModule."""
    sizes = {"vocab_size": 2000, **SIZES["llama"]}
    if module is LabelWordTuning:
        arguments |= {"num_classes": 2, "label_tokens": [3, 4]}
    built = module(architecture="llama", model_args=sizes, rank=2, **arguments)
    built.configure_model()
    return built


def test_heads_are_the_language_model_s():
    module = llama(heads=["lm_head"], lr=1e-2, head_lr=1e-5)
    lines = []
    module.trainer = SimpleNamespace(
        estimated_stepping_batches=100, fit_loop=SimpleNamespace(_combined_loader=None),
        global_step=0, logger=SimpleNamespace(log_metrics=lambda sizes, _: lines.append(sizes)),
        loggers=[None],
    )  # fmt: skip
    module.trainer.loggers = [module.trainer.logger]
    groups = module.configure_optimizers()["optimizer"].param_groups
    rates = {id(p): group["initial_lr"] for group in groups for p in group["params"]}
    head = module.model.model.lm_head.weight
    assert rates.pop(id(head)) == 1e-5 and set(rates.values()) == {1e-2}
    module.on_train_start()
    vectors = sum(p.numel() for n, p in module.named_parameters() if ".vera_" in n)
    assert lines == [{"tuned": vectors, "heads": head.numel()}]
    with pytest.raises(ValueError, match="'model.lm_head' is no module of LlamaForCausalLM"):
        llama(heads=["model.lm_head"])


def test_it_starts_from_a_language_model_and_from_its_own_checkpoint(tmp_path):
    torch.manual_seed(0)
    classifier, language = llama(method="full"), llama(LanguageTuning, method="full")
    names = classifier.state_dict().keys()
    assert {f"model.{name}" for name in language.state_dict()} == names  # as they always were
    torch.save({"state_dict": classifier.state_dict()}, tmp_path / "words.ckpt")
    torch.save({"state_dict": language.state_dict()}, tmp_path / "language.ckpt")
    language.model.save_pretrained(tmp_path / "folder")
    for source, file in ((classifier, "words.ckpt"), (language, "language.ckpt")):
        started = llama(init_from=str(tmp_path / file), method="full")
        for given, loaded in zip(source.parameters(), started.parameters(), strict=True):
            assert torch.equal(given, loaded)
    started = llama(init_from=str(tmp_path / "folder"), method="full")
    assert torch.equal(started.model.model.lm_head.weight, language.model.lm_head.weight)


@pytest.mark.parametrize("adapter_only", [True, False])
def test_the_adapter_of_the_best_checkpoint_is_saved(tmp_path, adapter_only):
    torch.manual_seed(0)
    base = llama(LanguageTuning, method="full").model.eval()
    base.save_pretrained(tmp_path / "base")
    start = {"init_from": str(tmp_path / "base"), "adapter_only": adapter_only}
    module = llama(**start, lr=0.3, warmup=0.0)
    data = GLUEData(
        "SST-2", source="generated", label_words=["dull", "funny"], limit=32, eval_limit=32,
        batch_size=8,
    )  # fmt: skip
    best = ModelCheckpoint(tmp_path, "best", monitor="val/loss")
    trainer = L.Trainer(
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", default_root_dir=tmp_path, callbacks=[best, SaveAdapter()],
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, data)
    saved = LabelWordTuning.load_from_checkpoint(tmp_path / "best.ckpt", **start).eval().model
    last = module.state_dict()
    assert any(not torch.equal(v, last[f"model.{n}"]) for n, v in saved.state_dict().items())
    load_adapter(base, tmp_path / "adapter")
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        logits = base(input_ids=ids).logits[:, -1, module.hparams.label_tokens]
        torch.testing.assert_close(logits, saved(ids, torch.ones_like(ids)))


def test_a_prompt_takes_positions():
    module = llama(method="prompt")
    longest = module.model.config.max_position_embeddings - 2
    ids = torch.ones(1, longest + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=f"after a prompt of 2 .*max_length to {longest} or less"):
        module.predict_step({"input_ids": ids, "attention_mask": ids}, 0)
