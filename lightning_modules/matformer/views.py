"""Smaller decoders that share the weights of a larger one, which stays unchanged.

A view consists of shallow copies of the modules between the root and each module that differs;
every other module is shared with the model. So draft and verifier can alternate without setting a
granularity before each pass.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.matformer.nest import update_depth
from lightning_modules.matformer.nesting import Skip, granularity, nesting_of

# on a CPU, FewRowsLinear was measured to be faster than nn.Linear within these limits
MOST_ROWS = 8  # of the input
LEAST_WEIGHTS = 100_000  # of the layer


def at_set_granularity(model: Any) -> Any:
    """A view of a nested model at the granularity that is set; any other model as it is."""
    nesting = getattr(model, "nesting", None)
    if nesting is None:
        return model
    return submodel(model, [layer.granularity for layer in nesting.layers])


def submodel(model: nn.Module, chosen: Sequence[int]) -> Any:
    """A view of a nested model's submodel, made of ordinary layers.

    Blocks that a smaller depth skips are left out; the others keep their layer index in the cache.

    Args:
        model: a nested model; its granularity is restored.
        chosen: one granularity index for each nested layer.
    """
    tree = _PartialCopy(model)
    layers = nesting_of(model).layers
    with granularity(model, chosen):
        for layer in layers:
            for attribute in layer.originals:  # the copies keep the values of this granularity
                tree.copy_of(_join(layer.name, attribute.rpartition(".")[0]))
            for path, child in layer.slices().items():
                tree.put(_join(layer.name, path), child.plain(None))
        for stack in (layer for layer in layers if layer.axis == "depth"):
            kept = stack.kept[stack.granularity]
            for index in kept:
                tree.copy_of(f"{stack.name}.{index}")
            tree.keep(stack.name, kept)
            decoder: Any = tree.copy_of(stack.name.rpartition(".")[0])
            if hasattr(decoder, "config"):  # whose layer_types name a block by its place
                decoder.config = copy.deepcopy(decoder.config)
                update_depth(decoder.config, len(stack.module), kept)  # type: ignore[arg-type]
    del tree.root.nesting
    return tree.root


def first_layers(model: Any, count: int) -> Any:
    """A view of a decoder with only its first `count` layers before the final norm and output.

    Its keys and values are those of the model's first layers.

    Raises:
        ValueError: if there are fewer layers, or the model is no decoder of transformers.
    """
    base: Any = getattr(model, "base_model", None)
    lists = {} if base is None else dict(base.named_children())
    lists = {n: m for n, m in lists.items() if isinstance(m, nn.ModuleList) and len(m) > 1}
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has not exactly one list of layers: draft_layers needs a "
            "decoder of transformers"
        )
    ((name, layers),) = lists.items()
    if not 1 <= count <= len(layers):
        raise ValueError(f"draft_layers is {count}, expected 1 to the model's {len(layers)}")
    tree = _PartialCopy(model)
    tree.keep(_join(model.base_model_prefix, name), range(count))
    return tree.root


def first_tokens(model: Any, count: int) -> Any:
    """A view of a decoder whose output layer has only the first `count` tokens.

    Tokenizers number frequent tokens first: byte pairs in the order of their merges, unigrams in
    the order of their probabilities.

    Raises:
        ValueError: if there are fewer tokens, or the output layer is not linear.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"the output layer of {type(model).__name__} is a {type(head).__name__}, expected "
            "nn.Linear: leave draft_vocabulary out"
        )
    if not 1 <= count <= head.out_features:
        raise ValueError(
            f"draft_vocabulary is {count}, expected 1 to the model's {head.out_features} tokens"
        )
    short = copy.copy(head)
    short._parameters = {
        name: None if values is None else nn.Parameter(values[:count], requires_grad=False)
        for name, values in head._parameters.items()
    }
    short.out_features = count
    tree = _PartialCopy(model)
    tree.put(next(name for name, module in model.named_modules() if module is head), short)
    return tree.root


def for_few_rows(model: Any) -> Any:
    """A view of a decoder whose large linear layers on a CPU are `FewRowsLinear`."""
    tree = _PartialCopy(model)
    for name, layer in model.named_modules():
        large = type(layer) is nn.Linear and layer.weight.numel() >= LEAST_WEIGHTS
        if large and layer.weight.is_cpu:
            faster = copy.copy(layer)
            faster.__class__ = FewRowsLinear
            tree.put(name, faster)
    return tree.root


class FewRowsLinear(nn.Linear):
    """A linear layer that computes (W · xᵀ)ᵀ where x has few rows; a single row is doubled.

    For x · Wᵀ, torch calls routines (MKL's sgemm and sgemv) that read W from memory more slowly.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > MOST_ROWS:
            return super().forward(x)
        flat = x.reshape(rows, -1)
        if rows == 1:
            flat = torch.cat([flat, flat])
        y = torch.mm(self.weight, flat.t()).t()[:rows]
        if self.bias is not None:
            y = y + self.bias
        return y.contiguous().view(*x.shape[:-1], -1)


class _PartialCopy:
    """A shallow copy of a model, in which single modules can be copied or replaced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies = {"": _shallow_copy(model)}

    @property
    def root(self) -> Any:
        return self.copies[""]

    def copy_of(self, name: str) -> nn.Module:
        """The shallow copy of the module with this path, made on first use."""
        if name not in self.copies:
            self.copies[name] = _shallow_copy(self.model.get_submodule(name))
            self.put(name, self.copies[name])
        return self.copies[name]

    def put(self, name: str, module: nn.Module) -> None:
        """Put another module in place of the one with this path."""
        parent, _, last = name.rpartition(".")
        self.copy_of(parent)._modules[last] = module

    def keep(self, name: str, kept: Sequence[int]) -> None:
        """Drop all but some entries of the list of modules with this path."""
        entries = self.copy_of(name)._modules
        for index, child in enumerate(list(entries)):
            if index not in kept:
                del entries[child]


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A copy that shares its children and tensors, but can have other children put in."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)  # copy.copy shares it
    if isinstance(vars(module).get("forward"), Skip):
        del copied.forward  # it would call the original's
    return copied


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
