"""Smaller decoders that share the weights of a larger one: nothing is copied, nothing is changed.

A view is made of shallow copies of the modules on the way to what differs; everything else is the
model's own. So draft and verifier can take turns without either being set anew for each pass.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.matformer.nesting import Skip, granularity, nesting_of

MOST_ROWS = 8  # to which FewRowsLinear is the quicker one
LEAST = 100_000  # weights of a layer for which it is


def as_set(model: Any) -> Any:
    """A nested model at the granularity that is set; any other model itself."""
    nesting = getattr(model, "nesting", None)
    if nesting is None:
        return model
    return submodel(model, [layer.granularity for layer in nesting.layers])


def submodel(model: nn.Module, chosen: Sequence[int]) -> Any:
    """A submodel of a nested model, made of ordinary layers.

    Blocks that a smaller depth skips are left out; those that stay keep their place in the cache.

    Args:
        model: nested; it stays as it is.
        chosen: one index for each nested layer.
    """
    tree = _Tree(model)
    layers = nesting_of(model).layers
    with granularity(model, chosen):
        for layer in layers:
            for attribute in layer.originals:  # a copy has the values that are set at present
                tree.own(_join(layer.name, attribute.rpartition(".")[0]))
            for path, child in layer.slices().items():
                tree.put(_join(layer.name, path), child.plain(None))
        for stack in (layer for layer in layers if layer.axis == "depth"):
            for index in stack.kept[stack.granularity]:
                tree.own(f"{stack.name}.{index}")
            tree.keep(stack.name, stack.kept[stack.granularity])
    del tree.root.nesting
    return tree.root


def first_layers(model: Any, count: int) -> Any:
    """The decoder that stops after its first layers and goes on with norm and output layer.

    Its keys and values are those of the model's first layers.

    Raises:
        ValueError: there are fewer layers, or it is not a decoder of transformers.
    """
    base: Any = getattr(model, "base_model", None)
    lists = {} if base is None else dict(base.named_children())
    lists = {n: m for n, m in lists.items() if isinstance(m, nn.ModuleList) and len(m) > 1}
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has no one list of layers to take the first of: expected a "
            "decoder of transformers"
        )
    ((name, layers),) = lists.items()
    if not 1 <= count <= len(layers):
        raise ValueError(f"draft_layers is {count}, expected 1 to the model's {len(layers)}")
    tree = _Tree(model)
    tree.keep(_join(model.base_model_prefix, name), range(count))
    return tree.root


def first_tokens(model: Any, count: int) -> Any:
    """The decoder whose output layer knows only the first tokens of the vocabulary.

    Tokenizers number frequent tokens first: byte pairs in the order of their merges, unigrams in
    that of their probabilities.

    Raises:
        ValueError: there are fewer tokens, or the output layer is no linear one.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"the output layer of {type(model).__name__} is a {type(head).__name__}, expected a "
            "linear one: leave draft_vocabulary out"
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
    tree = _Tree(model)
    tree.put(next(name for name, module in model.named_modules() if module is head), short)
    return tree.root


def for_few_rows(model: Any) -> Any:
    """The decoder with linear layers that are quick where a pass reads only a few tokens.

    On a CPU, where that depends on how the product is written; on other devices the model itself.
    """
    tree = _Tree(model)
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and layer.weight.is_cpu and layer.weight.numel() >= LEAST:
            quick = copy.copy(layer)
            quick.__class__ = FewRowsLinear
            tree.put(name, quick)
    return tree.root


class FewRowsLinear(nn.Linear):
    """A linear layer that computes (W · xᵀ)ᵀ for a few rows of x, and two rows where there is one.

    torch hands x · Wᵀ to a routine (MKL's sgemm, sgemv) that reads W from memory more slowly.
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


class _Tree:
    """A model's shallow copy, in which modules get shallow copies of their own when asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies = {"": _shallow(model)}

    @property
    def root(self) -> Any:
        return self.copies[""]

    def own(self, name: str) -> nn.Module:
        """The copy of the module with this path."""
        if name not in self.copies:
            self.copies[name] = _shallow(self.model.get_submodule(name))
            self.put(name, self.copies[name])
        return self.copies[name]

    def put(self, name: str, module: nn.Module) -> None:
        """Another module in place of the one with this path."""
        parent, _, last = name.rpartition(".")
        self.own(parent)._modules[last] = module

    def keep(self, name: str, kept: Sequence[int]) -> None:
        """Only some entries of a list of modules."""
        entries = self.own(name)._modules
        for index, child in enumerate(list(entries)):
            if index not in kept:
                del entries[child]


def _shallow(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)  # copy.copy shares it
    if isinstance(vars(module).get("forward"), Skip):
        del copied.forward  # it calls the original
    return copied


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
