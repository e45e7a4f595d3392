"""What is saved is what is loaded, strictly."""

import json

import pytest
import timm
import torch
from transformers import BertConfig, BertForMaskedLM

from lightning_modules.pela import factorize, plan_of
from lightning_modules.pela.checkpoint import load, save
from lightning_modules.weights import read_state_dict

NAME = "vit_tiny_patch16_224"
ARGUMENTS = {
    "num_classes": 12,
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
}


def vit():
    torch.manual_seed(0)
    return timm.create_model(NAME, **ARGUMENTS).eval()


@pytest.fixture
def saved(tmp_path):
    return save(factorize(vit(), 2), tmp_path / "low" / "rank", NAME, ARGUMENTS)


def test_round_trip(saved):
    model = factorize(vit(), 2)
    torch.manual_seed(5)
    again = load(saved).eval()
    x = torch.randn(2, 3, 16, 16)
    assert plan_of(again) == plan_of(model)
    assert torch.equal(again(x), model(x))
    assert sorted(path.name for path in saved.iterdir()) == ["model.safetensors", "plan.json"]
    assert read_state_dict(saved).keys() == model.state_dict().keys()


def test_pretrained_is_not_asked_for_again(saved, monkeypatch):
    plan = json.loads((saved / "plan.json").read_text())
    plan["model_args"]["pretrained"] = True  # the hub is out of reach: asking it would fail
    (saved / "plan.json").write_text(json.dumps(plan))
    load(saved)


def test_a_transformers_model_with_tied_weights(tmp_path):
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
    )
    model = factorize(BertForMaskedLM(config).eval())
    folder = save(model, tmp_path)
    with pytest.raises(ValueError, match="names no timm architecture: give load the dense model"):
        load(folder)
    again = load(folder, BertForMaskedLM(config)).eval()
    tokens = torch.arange(6)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight


def test_a_dense_model_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="no low-rank layer"):
        save(vit(), tmp_path / "dense", NAME, ARGUMENTS)
    assert not (tmp_path / "dense").exists()


def test_missing_files(saved):
    with pytest.raises(FileNotFoundError, match=r"no plan.json in .*parent"):
        load(saved / "parent")
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors in"):
        load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "has format 99, expected 1"),
        ({"ranks": {"blocks.7.attn.qkv": 3}}, "the plan does not fit VisionTransformer"),
        ({"ranks": {"blocks.0.attn.qkv": 3}}, "the weights in .* do not fit its plan"),
    ],
)
def test_a_plan_that_does_not_fit(saved, change, message):
    plan = json.loads((saved / "plan.json").read_text())
    (saved / "plan.json").write_text(json.dumps({**plan, **change}))
    with pytest.raises(ValueError, match=message):
        load(saved)


def test_a_plan_that_is_broken(saved):
    (saved / "plan.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="lacks architecture, model_args, ranks"):
        load(saved)
    (saved / "plan.json").write_text("{")
    with pytest.raises(ValueError, match="is not readable JSON"):
        load(saved)
