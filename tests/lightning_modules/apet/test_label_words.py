"""Language models as classifiers by label words, and every way to tune them."""

import lightning as L
import pytest
import torch
import transformers

from datamodules import GLUEData
from lightning_modules.apet import LabelWords
from lightning_modules.apet.module import LabelWordTuning
from lightning_modules.apet.prompt import add_prompt

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


@pytest.mark.parametrize("soft_tokens", [0, 3])
@pytest.mark.parametrize("kind", SIZES)
def test_the_logits_are_the_label_words_behind_the_prompt(kind, soft_tokens):
    """And the output layer sees no position at which no text ends."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=40, **SIZES[kind])
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(config).eval()
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
