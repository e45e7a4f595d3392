"""Counts a model's parameters, multiply-adds and the memory that a backward pass needs."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_non_embedding(model: Any) -> int:
    """Weights of a language model's linear layers, output layer left out.

    Norms and biases, less than a thousandth of all, are left out too, as in the model sizes that
    MatFormer (arXiv 2310.07707) lists.

    Args:
        model: a transformers model.
    """
    layers = (m for m in model.base_model.modules() if isinstance(m, nn.Linear | Conv1D))
    return sum(layer.weight.numel() for layer in layers)


def count_macs(model: nn.Module, input_shape: Sequence[int]) -> int:
    """Multiply-adds of one forward pass, the attention's matrix products included.

    A copy on the meta device is counted: it needs no memory, and the model stays where it is.

    Args:
        model: called with one float tensor.
        input_shape: shape of that tensor, such as (1, 3, 224, 224).
    """
    # frozen: some models (Deformable DETR) take another path where weights need gradients
    meta_copy = copy.deepcopy(model).to("meta").eval().requires_grad_(False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        meta_copy(torch.empty(*input_shape, device="meta"))
    return counter.get_total_flops() // 2


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of the tensors that autograd saves inside the context, by address.

    Tensors that share their storage count once, and the model's parameters do not count.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved
