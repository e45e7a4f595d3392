"""MatLM: the paper's counts, its losses, what it validates, and runs that can be resumed."""

import cpu_torchvision  # noqa: F401

import copy
import json
import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from callbacks.frozen_teacher import FrozenTeacher
from callbacks.granularity import GranularitySampling
from datamodules.corpus import BYTES, CorpusData
from datamodules.tokens import train_tokenizer
from lightning_modules.backbones import build_text
from lightning_modules.counting import count_non_embedding
from lightning_modules.matformer import consistency
from lightning_modules.matformer.matlm_module import MatLM
from lightning_modules.matformer.nest import extract, nest, set_granularity
from recipes.matformer.language import plain

FRACTIONS = {"ffn": [1 / 8, 1 / 4, 1 / 2, 1]}
SMALL = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": BYTES, "use_bias": False,
    "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip


def module(**settings) -> MatLM:
    torch.manual_seed(0)
    made = MatLM(**{"model_args": SMALL, "fractions": FRACTIONS, "lr": 1e-2, **settings})
    made.configure_model()
    return made


def tokens(rows: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(BYTES, (rows, 12), generator=torch.manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    rows = [json.dumps({"text": f"text {i}: " + "ab" * (i % 9)}) for i in range(60)]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def corpus(texts: str, **settings) -> CorpusData:
    cache = str(Path(texts).parent / "cache")
    return CorpusData("files", texts, length=16, batch_size=4, cache=cache, **settings)


def trainer(folder: Path, steps: int, *callbacks, **settings) -> L.Trainer:
    save = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    return L.Trainer(
        max_epochs=-1, max_steps=steps, logger=False, accelerator="cpu", num_sanity_val_steps=0,
        limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[save, *callbacks], **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("d", "totals"),
    [
        (256, (78_118_912, 73_924_608, 71_827_456, 70_778_880)),
        (512, (181_403_648, 164_626_432, 156_237_824, 152_043_520)),
        (768, (309_854_208, 272_105_472, 253_231_104, 243_793_920)),
        (1024, (463_470_592, 396_361_728, 362_807_296, 346_030_080)),
        (1536, (846_200_832, 695_205_888, 619_708_416, 581_959_680)),
    ],
)
def test_parameters_of_table_4(d, totals):
    args = {
        "hidden_size": d, "intermediate_size": 4 * d, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 256_000,
        "use_bias": False, "max_position_embeddings": 1024,
    }  # fmt: skip
    with torch.device("meta"):
        model = nest(build_text("starcoder2", "causal", args), FRACTIONS)
    for granularity, k, total in zip((3, 2, 1, 0), (1, 2, 4, 8), totals, strict=True):
        small = extract(model, granularity)
        assert count_non_embedding(small) == 16 * (4 * d * d + 8 * d * d // k)
        assert count_non_embedding(small) + 256_000 * d == total
        assert small.get_output_embeddings().weight is small.get_input_embeddings().weight


def test_loss_is_transformers_own():
    plain, batch = module(fractions=None), tokens()
    expected = plain.model(**batch).loss
    assert torch.allclose(plain.loss(batch["input_ids"], batch["labels"]), expected)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("joint", ["mean", "sum"])
def test_joint_loss_is_that_of_all_granularities(joint, split):
    lm, batch = module(joint=joint, split_batch=split), tokens()
    ids, labels = batch["input_ids"], batch["labels"]
    losses = []
    for index in range(4):
        set_granularity(lm.model, index)
        rows = slice(index, index + 1) if split else slice(None)
        losses.append(lm.model(ids[rows], labels=labels[rows]).loss)
    expected = torch.stack(losses).sum() / (4 if joint == "mean" else 1)
    assert torch.allclose(lm.training_loss(ids, labels), expected)


def test_the_loss_of_bfloat16_is_computed_in_float32():
    batch = tokens()
    for share in (0.0, 0.5):
        lm = module(distill=share)
        lm.teacher = lm.model
        lm.bfloat16()
        assert lm.loss(batch["input_ids"], batch["labels"]).dtype == torch.float32


def test_joint_training_has_no_idle_tail(tmp_path, texts):
    lm = module(joint="mean")
    before = lm.model.model.layers[0].mlp.c_fc.weight.detach().clone()
    trainer(tmp_path, 1).fit(lm, corpus(texts))
    assert (before != lm.model.model.layers[0].mlp.c_fc.weight).any(1).all()


def test_a_schedule_takes_its_arguments():
    lm = module(schedule="cosine_with_min_lr", schedule_args={"min_lr_rate": 0.1})
    lm._trainer = SimpleNamespace(estimated_stepping_batches=8, fit_loop=SimpleNamespace())
    [factor] = lm.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[:1]
    assert factor(8) == pytest.approx(0.1)


def test_distillation_is_its_formula():
    lm, batch = module(distill=0.3), tokens()
    ids, labels = batch["input_ids"], batch["labels"][:, 1:]
    teacher = copy.deepcopy(lm.model)
    for model in (lm.model, teacher):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    object.__setattr__(lm, "teacher", teacher)
    set_granularity(lm.model, "S")
    counts = labels != -100
    logits, targets = (net(ids).logits[:, :-1][counts] for net in (lm.model, teacher))
    p = targets.softmax(-1)
    divergence = (p * (p.log() - logits.log_softmax(-1))).sum(-1).mean()
    expected = 0.7 * F.cross_entropy(logits, labels[counts]) + 0.3 * divergence
    torch.testing.assert_close(lm.loss(ids, batch["labels"]), expected)


def test_distillation_pulls_towards_the_teacher(tmp_path, texts):
    build_text("starcoder2", "causal", SMALL).save_pretrained(tmp_path / "dense")
    lm = module(architecture=str(tmp_path / "dense"), model_args=None, pretrained=True, distill=0.3)
    batch = tokens()
    with pytest.raises(ValueError, match="MatLM has no teacher: add callbacks"):
        lm.training_step(batch, 0)
    with pytest.raises(ValueError, match="'starcoder2' is a model type .* model.teacher_from"):
        module(distill=0.3).build_teacher()
    set_granularity(lm.model, "S")
    lm.teacher = lm.build_teacher()
    ids, targets = batch["input_ids"], batch["labels"][:, 1:].flatten()
    q = lm.model(ids).logits[:, :-1].flatten(0, 1).log_softmax(-1)[targets != -100]
    p = lm.teacher(ids).logits[:, :-1].flatten(0, 1).log_softmax(-1)[targets != -100]
    divergence = (p.exp() * (p - q)).sum(-1).mean()
    loss = 0.7 * F.nll_loss(q, targets[targets != -100]) + 0.3 * divergence
    assert torch.allclose(lm.loss(ids, batch["labels"]), loss)
    assert divergence > 1e-6


def test_a_run_with_a_teacher_keeps_it_out_of_the_checkpoint(tmp_path, texts):
    build_text("starcoder2", "causal", SMALL).save_pretrained(tmp_path / "dense")
    lm = module(architecture=str(tmp_path / "dense"), model_args=None, pretrained=True, distill=1.0)
    callbacks = FrozenTeacher(), GranularitySampling(seed=0)
    trainer(tmp_path, 2, *callbacks).fit(lm, corpus(texts))
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert not any("teacher" in name for name in state["state_dict"])
    # it is whole without the folder that it began with
    shutil.rmtree(tmp_path / "dense")
    again = MatLM.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    ids = tokens()["input_ids"]
    set_granularity(lm.model, "XL")
    assert torch.equal(again(ids), lm(ids))
    again.granularity = "S"
    set_granularity(lm.model, "S")
    assert torch.equal(again(ids), lm(ids)) and again.granularity == [0, 0]


DECODERS = {  # what each does to its logits behind the output embedding
    "starcoder2": {"use_bias": False},
    "gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 8},
}


@pytest.mark.parametrize(("name", "extra"), DECODERS.items())
def test_a_long_row_s_logits_are_made_in_pieces(name, extra, monkeypatch):
    """A row of 1,024 tokens over 256,000 words is a gigabyte, and scores need several copies."""
    torch.manual_seed(0)
    args = {**SMALL, "initializer_range": 0.5, "pad_token_id": 0, **extra}
    one = build_text(name, "causal", args).eval()
    other, batch, made, read, scores = copy.deepcopy(one), tokens(), [], [], []
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + 0.2 * torch.randn_like(weight))
    models = {"one": plain(one), "other": plain(other)}
    for model in (one, other):
        model.get_output_embeddings().register_forward_hook(lambda *call: made.append(call[-1]))
        model.register_forward_hook(lambda *call: made.append(call[-1].logits))
        model.get_input_embeddings().register_forward_hook(lambda *call: read.append(call[1][0]))
    for scored in (2**26, 50 * BYTES, 5 * BYTES):
        made.clear(), read.clear()
        monkeypatch.setattr(consistency, "SCORED", scored)
        metrics = consistency.SubmodelMetrics(list(models))
        with torch.no_grad():
            consistency.score_tokens(metrics, models, batch, BYTES)
        assert max(logits.numel() for logits in made) <= scored
        # hidden states are computed once, and of one token for each further piece
        pieces = 3 if scored == 5 * BYTES else 1
        assert sum(ids.numel() for ids in read) == 2 * 4 * (12 + pieces - 1)
        scores.append(metrics.compute())
    whole, reference = consistency.SubmodelMetrics(list(models)), None
    for label, model in (("one", one), ("other", other)):
        logits = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        reference = logits if reference is None else reference
        whole.update(label, logits, batch["labels"][:, 1:].flatten(), reference)
    for label, expected in whole.compute().items():
        for found in scores:
            for metric in ("accuracy", "agreement"):
                assert found[label][metric] == expected[metric]
            torch.testing.assert_close(found[label], expected)
    assert 0 < expected["agreement"] < 1 and expected["kl"] > 0


@pytest.mark.parametrize("scored", [2**26, 1])
def test_validation_is_token_by_token_over_the_whole_text(texts, tmp_path, scored, monkeypatch):
    monkeypatch.setattr(consistency, "SCORED", scored)
    lm = module(eval_granularities=[[0, 3]])
    data = corpus(texts)
    logged = L.Trainer(
        logger=False, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False
    ).validate(lm, data, verbose=False)[0]
    stream = data.stream("val")
    ids = stream.read(0, len(stream))
    for label, chosen in {"XL": 3, "L": 2, "M": 1, "S": 0, "S*1+XL*1": [0, 3]}.items():
        set_granularity(lm.model, chosen)
        losses = []
        for start in range(0, len(ids) - 1, 15):
            window = ids[start : start + 16]
            logits = lm.model(window[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, window[1:], reduction="none"))
        assert sum(map(len, losses)) == len(ids) - 1
        loss = torch.cat(losses).mean().item()
        assert logged[f"val/loss_{label}"] == pytest.approx(loss, rel=1e-5)
        assert logged[f"val/perplexity_{label}"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert logged["val/loss"] == logged["val/loss_XL"]
    assert logged["val/agreement_XL"] == 1 and logged["val/kl_XL"] == pytest.approx(0, abs=1e-6)
    assert logged["val/kl_S"] > 0


@pytest.mark.parametrize("settings", [{}, {"joint": "mean", "split_batch": True}])
def test_resumed_equals_uninterrupted(tmp_path, texts, settings):
    def run(steps: int, folder: str, resume: str | None = None) -> MatLM:
        lm = module(**settings, schedule="constant")  # which does not ask where the run ends
        callbacks = [] if settings else [GranularitySampling(seed=3)]
        with torch.no_grad():
            for parameter in lm.parameters():  # what the checkpoint has to replace
                parameter.add_(1.0 if resume else 0.0)
        fit = trainer(tmp_path / folder, steps, *callbacks)
        fit.fit(lm, corpus(texts, seed=1), ckpt_path=resume, weights_only=True)
        return lm

    through = run(12, "a")
    run(5, "b")
    resumed = run(12, "b", str(tmp_path / "b" / "last.ckpt"))
    for name, value in through.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_embeddings_norms_and_biases_do_not_decay(tmp_path, texts):
    lm = module(weight_decay=0.1)
    fit = trainer(tmp_path, 1)
    fit.fit(lm, corpus(texts))
    groups = fit.optimizers[0].param_groups
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    linear = {id(m.weight) for m in lm.model.model.modules() if isinstance(m, nn.Linear)}
    assert decayed == linear


@pytest.mark.parametrize("fractions", [FRACTIONS, {"heads": [0.5, 1]}, {"depth": [0.5, 1]}])
def test_a_submodel_leaves_as_a_plain_transformers_model(tmp_path, fractions):
    lm = module(fractions=fractions)
    ids = tokens()["input_ids"]
    set_granularity(lm.model, 0)
    expected = lm(ids)
    extract(lm.model, 0).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(loaded(ids).logits, expected, atol=1e-6)
    assert sum(p.numel() for p in loaded.parameters()) < sum(
        p.numel() for p in lm.model.parameters()
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"split_batch": True}, "split_batch needs joint"),
        ({"joint": "mean", "fractions": None}, "joint: mean needs fractions"),
        ({"distill": 1.5}, "distill is 1.5, expected a share"),
        ({"eval_granularities": [[0]]}, "has 1 entries: this model has 2 nested layers"),
        ({"pretrained": True}, "'starcoder2' is a model type and has no weights"),
    ],
)
def test_bad_settings_are_said_in_a_sentence(settings, said):
    with pytest.raises(ValueError, match=said):
        module(**settings)


def test_a_tokenizer_that_is_too_small_is_said(tmp_path, texts):
    lm = MatLM(model_args={**SMALL, "vocab_size": 300}, fractions=FRACTIONS)
    with pytest.warns(UserWarning, match="has 259 entries and the model embeds 300"):
        trainer(tmp_path, 1).fit(lm, corpus(texts))


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path, texts):
    lm = MatLM(model_args={**SMALL, "vocab_size": 100}, fractions=FRACTIONS)
    with pytest.raises(ValueError, match="has 259 tokens and the model embeds 100"):
        trainer(tmp_path, 1).fit(lm, corpus(texts))


def test_another_model_s_checkpoint_is_refused(tmp_path, texts):
    trainer(tmp_path, 1).fit(module(), corpus(texts))
    other = MatLM(model_args={**SMALL, "hidden_size": 32}, fractions=FRACTIONS)
    with pytest.raises(ValueError, match="another model: its model_args"):
        trainer(tmp_path / "b", 2).fit(
            other, corpus(texts), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True
        )


@pytest.fixture
def other(tmp_path, texts) -> str:
    """A folder with a tokenizer of as many tokens as the data's, in another order."""
    made = train_tokenizer([], BYTES)
    rules = json.loads(made.backend_tokenizer.to_str())
    vocabulary = rules["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)), eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(tmp_path / "other")
    return str(tmp_path / "other")


def test_a_checkpoint_is_not_scored_or_continued_with_another_tokenizer(tmp_path, texts, other):
    trainer(tmp_path, 1).fit(module(), corpus(texts))
    file = str(tmp_path / "last.ckpt")
    for start in (L.Trainer.validate, L.Trainer.test, L.Trainer.fit):
        arguments = {"ckpt_path": file, "weights_only": True}
        start(trainer(tmp_path, 1), module(), corpus(texts), **arguments)
        with pytest.raises(ValueError, match="the checkpoint has another tokenizer, of 259"):
            start(trainer(tmp_path, 1), module(), corpus(texts, tokenizer=other), **arguments)


def test_a_pretrained_decoder_trains_on_its_own_tokens(tmp_path, texts, other):
    build_text("starcoder2", "causal", SMALL).save_pretrained(tmp_path / "dense")
    lm = partial(MatLM, str(tmp_path / "dense"), pretrained=True, fractions=FRACTIONS)
    trainer(tmp_path, 1).fit(lm(), corpus(texts, tokenizer=other))  # a folder without a tokenizer
    train_tokenizer([], BYTES).save_pretrained(tmp_path / "dense")
    trainer(tmp_path, 1).fit(lm(), corpus(texts))
    trainer(tmp_path, 1).fit(lm(), corpus(texts, tokenizer=str(tmp_path / "dense")))
    with pytest.raises(ValueError, match="dense has another tokenizer, of 259 .* to .*dense"):
        trainer(tmp_path, 1).fit(lm(), corpus(texts, tokenizer=other))


def test_lightning_s_prediction_is_refused_with_a_hint(texts, tmp_path):
    with pytest.raises(ValueError, match="predict --ckpt_path CKPT FILE` without -c, or .*gener"):
        trainer(tmp_path, 1).predict(module(), corpus(texts))


def test_blocks_that_are_longer_than_the_model_s_positions_are_refused(tmp_path, texts):
    short = MatLM(model_args={**SMALL, "max_position_embeddings": 15}, fractions=FRACTIONS)
    with pytest.raises(ValueError, match="data.length is 16 and the model has 15 positions"):
        trainer(tmp_path, 1).fit(short, corpus(texts))
