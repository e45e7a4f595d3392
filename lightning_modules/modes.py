"""A context manager for eval mode, and a cast to at least float32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into eval mode, and restore the mode of each of their modules afterwards.

    Calling `model.train()` instead would also switch modules that have to stay in eval mode, such
    as frozen teachers and batch norms.
    """
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own type where that is more precise."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
