"""Inputs that are computed again: the same gradients, in less memory."""

import contextlib

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from benchmarks.vera_step import Case, peak_bytes, training_step
from lightning_modules.apet import insert, layer
from lightning_modules.apet.recompute import origin

SIZES = {
    "bert": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "vocab_size": 50, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "llama": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 50,
    },
    "gpt2": {
        "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def gradients(kind, operations):
    """Of all that trains, after steps that moved it away from zero."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **SIZES[kind]))
    insert(model, 3000, 0, operations)
    model.double()
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.normal_(std=0.1)
    ids = torch.arange(2, 26).view(2, 12) % 50
    model(input_ids=ids).last_hidden_state.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in trained if p.grad is not None])  # BERT's pooler


class Plain:
    """The formula of TunedProduct, as torch differentiates it."""

    @staticmethod
    def apply(x, weight, bias, w3, w4, w5, b5, w6, values, index, starts, columns, scale, conv1d):
        if values is not None:
            weight = weight.flatten().index_add(0, index, values).view(weight.shape)
        y = F.linear(x, weight.T if conv1d else weight, bias)
        return y + scale * (x @ w3.T) @ w4 + F.gelu(F.linear(y, w5, b5)) @ w6


@pytest.mark.parametrize("operations", [["add"], ["concat"], ["plug"], ["add", "concat", "plug"]])
@pytest.mark.parametrize("kind", SIZES)
def test_gradients_are_those_of_inputs_that_are_kept(monkeypatch, kind, operations):
    again = gradients(kind, operations)
    monkeypatch.setattr(layer, "recompute_instead_of_saving", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(layer, "TunedProduct", Plain)
    kept = gradients(kind, operations)
    assert again.abs().sum() > 0
    torch.testing.assert_close(again, kept, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("operation", ["concat", "plug"])
def test_statistics_of_another_type(operation):
    """In bfloat16, CUDA's layer norm keeps them in float32, as the CPU's does for such weights."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("bert", **SIZES["bert"]))
    insert(model, 3000, 0, [operation]).bfloat16()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    model(input_ids=torch.arange(24).view(2, 12)).last_hidden_state.sum().backward()
    assert any(p.grad is not None for p in model.parameters())


def test_it_takes_less_memory(monkeypatch):
    case, device = Case(4, 64, layers=2, hidden=128), torch.device("cpu")

    def peak(operations):
        model = insert(case.build(), 20_000, 0, operations)
        return peak_bytes(training_step(model, case, device), device)[0]

    again = [peak([operation]) for operation in ("concat", "plug")]
    monkeypatch.setattr(layer, "recompute_instead_of_saving", lambda x: contextlib.nullcontext())
    kept = [peak([operation]) for operation in ("concat", "plug")]
    assert all(a < 0.9 * k for a, k in zip(again, kept, strict=True)), (again, kept)


def test_what_others_keep_is_left_to_them():
    x = torch.nn.functional.gelu(torch.ones(2, 3, requires_grad=True) * 2)
    assert torch.equal(origin(x)(), x.detach())
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        assert origin(x) is None  # activation checkpointing comes so
    assert origin(torch.ones(3)) is None and origin(x + 1) is None
    weight, y = torch.ones(3), torch.ones(3, requires_grad=True)
    assert origin(weight * y) is None  # of a frozen factor autograd keeps one
