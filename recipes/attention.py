"""Chooses how attention is computed while a stage trains on a CPU in bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch.nn.attention import SDPBackend, sdpa_kernel

SHORT = 512  # tokens


@contextmanager
def plain_attention(trainer: L.Trainer, data: Any) -> Iterator[None]:
    """Compute attention by matrix products and softmax where torch's fused kernel is slower.

    That is on a CPU in bf16-mixed, the more so the shorter the sequence (results/attention.md). The
    results agree within bfloat16's rounding. Of long sequences, the fused kernel saves memory: it
    does not keep the attention's N² weights.

    Args:
        trainer: its accelerator and precision decide.
        data: a DataModule; `max_length` or `length`, where it has them, are its longest sequence.
            Images count as short.
    """
    longest = max(getattr(data, name, None) or 0 for name in ("max_length", "length"))
    slow = isinstance(trainer.accelerator, CPUAccelerator) and trainer.precision == "bf16-mixed"
    if not slow or longest > SHORT:
        yield
        return
    # named after CUDA, but it is what keeps the CPU from computing in float32, too
    backend = torch.backends.cuda
    before = backend.fp16_bf16_reduction_math_sdp_allowed()
    backend.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        backend.allow_fp16_bf16_reduction_math_sdp(before)
