"""Attention on a CPU in bfloat16: plain products if sequences are short, else the fused kernel."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from recipes.attention import plain_attention
from tests.recipes.test_cli import run


def fused():
    backend = torch.backends.cuda
    return backend.flash_sdp_enabled(), not backend.fp16_bf16_reduction_math_sdp_allowed()


def trainer(precision="bf16-mixed"):
    return L.Trainer(accelerator="cpu", precision=precision, logger=False, barebones=True)


class Seen(L.Callback):
    def __init__(self):
        self.fused = []

    def on_train_batch_start(self, *_):
        self.fused.append(fused())


@pytest.mark.parametrize(
    ("precision", "data", "expected"),
    [
        ("bf16-mixed", SimpleNamespace(max_length=512), (False, False)),
        ("bf16-mixed", SimpleNamespace(image_size=224, max_length=None), (False, False)),
        ("bf16-mixed", SimpleNamespace(length=1024), (True, True)),
        ("32-true", SimpleNamespace(max_length=512), (True, True)),
    ],
)
def test_it_is_plain_for_short_sequences_in_bfloat16_and_as_before_afterwards(
    precision, data, expected
):
    before = fused()
    assert before == (True, True)
    with pytest.raises(KeyError), plain_attention(trainer(precision), data):
        assert fused() == expected
        raise KeyError
    assert fused() == before


def test_another_accelerator_keeps_its_own():
    with plain_attention(SimpleNamespace(accelerator="gpu", precision="bf16-mixed"), None):
        assert fused() == (True, True)


def test_a_stage_trains_with_it(tmp_path):
    seen = Seen()
    run("fit", tmp_path, "--trainer.precision=bf16-mixed", callbacks=[seen])
    assert seen.fused == [(False, False)] * 2 and fused() == (True, True)


@pytest.mark.parametrize("causal", [False, True])
def test_results_agree_within_rounding(causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 26, 16)
    exact = scaled_dot_product_attention(q, k, v, is_causal=causal)
    with plain_attention(trainer(), None):
        rounded = scaled_dot_product_attention(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=causal
        )
    torch.testing.assert_close(rounded.float(), exact, atol=0.03, rtol=0.03)
