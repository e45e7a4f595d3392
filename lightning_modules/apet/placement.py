"""Draws random positions for exactly as many trainable parameters as a budget allows.

APET (arXiv 2306.02320), Section 5.1 and Appendix C: tunable weights may be anywhere in a model, in
any structure, down to single elements of existing weights; a budget fixes their number. A
`Placement` holds the positions, `draw` draws them at random, and `bitfit` and `prompt` express
these methods in the same form. LoRA is `concat` of rank r at a few layers, and Adapter is `plug`.

The draw divides the budget evenly among the operations:

    add      elements of the model's parameters, uniformly without replacement
    concat   rank-one terms of random linear layers: one column of W_3 and one row of W_4
    plug     hidden neurons of adapters at random linear layers: one column of W_5 (with its bias)
             and one row of W_6

For each term or neuron a linear layer is drawn uniformly. The last one is truncated to meet the
budget: the part that starts at zero (W_4, W_6) becomes trainable first, so that every parameter has
a gradient. The released code (OpenDelta) instead takes full tensors greedily, misses the budget by
up to 15 %, and its positions hardly vary.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_modules.layouts import inside, is_layer_norm, shape_of, uncalled_layers
from lightning_modules.optim import head_parameters

Operation = Literal["add", "concat", "plug"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass
class Placement:
    """The positions of trainable parameters in a model.

    Attributes:
        add: name of a parameter → flat indices (n,) of its trainable elements, ascending, or None
            for all.
        bias: names of linear layers and norms without a bias that get one, starting at zero (T5's
            BitFit).
        concat: name of a linear layer → numbers of trainable elements of W_3 and W_4, which are
            filled term by term.
        plug: name of a linear layer → numbers of trainable elements of W_5, b_5, W_6 and b_6, which
            are filled neuron by neuron.
        prompt: number of soft tokens before the input.
        scale: α of concat.
    """

    add: dict[str, Tensor | None] = field(default_factory=dict)
    bias: tuple[str, ...] = ()
    concat: dict[str, tuple[int, int]] = field(default_factory=dict)
    plug: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    prompt: int = 0
    scale: float = 1.0

    def digest(self) -> str:
        """SHA-256 of the content; equal on every machine for equal positions."""
        positions = hashlib.sha256()
        for name, index in self.add.items():
            positions.update(f"{name} ".encode())
            if index is not None:
                positions.update(index.numpy().astype("<i8").tobytes())
        rest = [self.bias, self.concat, self.plug, self.prompt, self.scale]
        positions.update(json.dumps(rest).encode())
        return positions.hexdigest()


def linear_layers(model: nn.Module, heads: Sequence[str] = ()) -> dict[str, Any]:
    """The linear layers at which parameters can be inserted, by name.

    Args:
        model: any module.
        heads: names of modules to leave out.
    """
    output = _output_layer(model)
    uncalled = uncalled_layers(model)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and module is not output
        and not inside(name, heads)
        and name not in uncalled
    }


def body_parameters(model: nn.Module, heads: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """The parameters outside the heads, by name, each once even where modules share it."""
    trained = head_parameters(model, heads)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter not in trained and parameter.is_floating_point()
    }


def check_seed(seed: int) -> None:
    """Refuse a seed that numpy's RandomState does not take.

    Raises:
        ValueError: if it is no whole number from 0 to 2³² − 1.
    """
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed!r} is no whole number from 0 to 2**32 - 1: give one")


def draw(
    model: nn.Module,
    budget: int,
    seed: int,
    operations: Sequence[Operation] = OPERATIONS,
    heads: Sequence[str] = (),
) -> Placement:
    """A random placement of exactly `budget` parameters.

    The same seed gives the same placement on every machine: numpy guarantees that RandomState does
    not change between versions.

    Args:
        model: any module, which may be on the meta device.
        budget: number of trainable parameters.
        seed: of the draw.
        operations: kinds of parameters, see the module's description.
        heads: names of modules that are trained in full in addition; they do not count.

    Raises:
        ValueError: for a budget or a seed that is no whole number in its range, an unknown
            operation, or "concat" or "plug" on a model without linear layers.
    """
    check_seed(seed)
    parameters = body_parameters(model, heads)
    total = sum(parameter.numel() for parameter in parameters.values())
    if type(budget) is not int or not 1 <= budget <= total:
        raise ValueError(
            f"budget {budget!r} is out of range: {type(model).__name__} has {total:,} parameters "
            "outside its heads; give a whole number from 1 to that"
        )
    unknown = [operation for operation in operations if operation not in OPERATIONS]
    if unknown or not operations or len(set(operations)) < len(operations):
        raise ValueError(
            f"operations {list(operations)} are not usable: expected one or more of "
            f"{', '.join(OPERATIONS)}, each once"
        )
    linear = linear_layers(model, heads)
    if not linear and set(operations) - {"add"}:
        raise ValueError(
            f"{type(model).__name__} calls no linear layer, so "
            f"{', '.join(o for o in operations if o != 'add')} cannot be inserted: use "
            "operations=['add']"
        )
    random = np.random.RandomState(seed)
    share, rest = divmod(budget, len(operations))
    placement = Placement()
    for position, operation in enumerate(operations):
        count = share + (position < rest)
        if operation == "add":
            placement.add = _draw_elements(random, parameters, count)
        elif operation == "concat":
            placement.concat = _draw_terms(random, linear, count)
        else:
            placement.plug = _draw_neurons(random, linear, count)
    return placement


def _draw_elements(
    random: np.random.RandomState, parameters: Mapping[str, Tensor], count: int
) -> dict[str, Tensor | None]:
    """`Placement.add` for `count` distinct elements of the parameters."""
    sizes = np.array([parameter.numel() for parameter in parameters.values()])
    total = int(sizes.sum())
    if 2 * count > total:  # drawing the frozen elements is faster
        trainable = np.ones(total, dtype=bool)
        trainable[_distinct(random, total, total - count)] = False
        chosen = np.flatnonzero(trainable)
    else:
        chosen = np.sort(_distinct(random, total, count))
    ends = np.cumsum(sizes)
    places = np.searchsorted(chosen, np.concatenate([[0], ends]))
    return {
        name: torch.from_numpy(chosen[start:stop] - (end - size)).long()
        for name, size, end, start, stop in zip(
            parameters, sizes, ends, places[:-1], places[1:], strict=True
        )
        if stop > start
    }


def _distinct(random: np.random.RandomState, total: int, count: int) -> np.ndarray:
    """`count` different numbers below `total`, every set of them equally likely."""
    chosen = np.empty(0, dtype=np.int64)
    while len(chosen) < count:
        more = random.randint(0, total, count - len(chosen), dtype=np.int64)
        _, first = np.unique(np.concatenate([chosen, more]), return_index=True)
        chosen = np.concatenate([chosen, more])[np.sort(first)]
    return chosen


def _draw_terms(
    random: np.random.RandomState, linear: Mapping[str, Any], count: int
) -> dict[str, tuple[int, int]]:
    """`Placement.concat` for `count` parameters in rank-one terms of random layers."""
    names = list(linear)
    drawn: dict[str, tuple[int, int]] = {}
    while count:
        name = names[random.randint(len(names))]
        outputs, inputs = shape_of(linear[name])
        up = min(count, outputs)
        down = min(count - up, inputs)
        count -= up + down
        before = drawn.get(name, (0, 0))
        drawn[name] = (before[0] + down, before[1] + up)
    return {name: drawn[name] for name in names if name in drawn}


def _draw_neurons(
    random: np.random.RandomState, linear: Mapping[str, Any], count: int
) -> dict[str, tuple[int, int, int, int]]:
    """`Placement.plug` for `count` parameters in hidden neurons at random layers."""
    names = list(linear)
    drawn: dict[str, tuple[int, int, int, int]] = {}
    while count:
        name = names[random.randint(len(names))]
        width, _ = shape_of(linear[name])
        up = min(count, width)
        down = min(count - up, width)
        bias = min(count - up - down, 1)
        count -= up + down + bias
        before = drawn.get(name, (0, 0, 0, 0))
        drawn[name] = (before[0] + down, before[1] + bias, before[2] + up, 0)
    return {name: drawn[name] for name in names if name in drawn}


def bitfit(model: nn.Module, heads: Sequence[str] = (), layers: Sequence[str] = ()) -> Placement:
    """BitFit (Ben Zaken et al., 2022) as ADD: every bias, or new ones if the model has none (T5).

    Args:
        model: the model.
        heads: names of modules to leave out.
        layers: ends of the names of the linear layers and norms that get a new bias; all linear
            layers but the output layer when empty.

    Raises:
        ValueError: if the model has neither biases nor linear layers, or no layer of such a name.
    """
    biases: dict[str, Tensor | None] = {
        name: None for name in body_parameters(model, heads) if name.endswith("bias")
    }
    if biases:
        return Placement(add=biases)
    found = _ending_in(model, layers) if layers else linear_layers(model, heads)
    missing = tuple(name for name in found if not inside(name, heads))
    if not missing:
        raise ValueError(f"{type(model).__name__} has neither biases nor linear layers for BitFit")
    return Placement(bias=missing)


def prompt(tokens: int = 100) -> Placement:
    """Prompt tuning (Lester et al., 2021) as CONCAT at the input: soft tokens before the text."""
    return Placement(prompt=tokens)


def _ending_in(model: nn.Module, ends: Sequence[str]) -> tuple[str, ...]:
    """The names of the linear layers and norms that are, or end in, one of `ends`."""
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear or is_layer_norm(type(module))
    ]
    for end in ends:
        if not any(f".{name}".endswith(f".{end}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ValueError(
                f"no linear layer or norm of {type(model).__name__} ends in {end}: expected some "
                f"of {known or 'none'}"
            )
    return tuple(name for name in names if any(f".{name}".endswith(f".{end}") for end in ends))


def _output_layer(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None
