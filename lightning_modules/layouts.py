"""Finds a model's feed-forward networks and attention layers, and how their weights are laid out.

Works for any model made of classes in layout_table.py (timm, transformers, torchvision, torch).
MatFormer's nesting, VeRA's slices of fused projections and APET use it. To add a layer of your own,
write one line:

    LAYOUTS["my.module.Ffn"] = FeedForwardLayout(("up",), "down")
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, arange, cat, nn

from lightning_modules.layout_table import (
    LAYOUTS,
    LOOKS_LIKE,
    NEITHER,
    AttentionLayout,
    FeedForwardLayout,
    Layout,
    class_path,
)


@dataclass(frozen=True)
class Cut:
    """Which outputs or inputs of a child layer belong to each unit.

    A unit is a hidden neuron, a head, or a group of heads that share a key/value head.

    Attributes:
        path: of the child, relative to the layer's module.
        dim: 0 for its outputs (rows of nn.Linear's weight), 1 for its inputs (columns).
        parts: (first index, indices per unit) of every contiguous range, which is divided evenly
            among the units, in order. Indices outside all parts belong to no unit.
        units: number of units.
    """

    path: str
    dim: int
    parts: tuple[tuple[int, int], ...]
    units: int

    def indices(self, units: Tensor) -> Tensor:
        """Indices of the given units (n,), part by part: (n · indices per unit over all parts,)."""
        return cat(
            [
                (start + units[:, None] * size + arange(size, device=units.device)).flatten()
                for start, size in self.parts
            ]
        )


@dataclass(frozen=True)
class Layer:
    """A layer of a model whose units can be dropped or reordered.

    Attributes:
        name: path of the module in the model, such as "blocks.3.mlp".
        module: the module itself.
        units: number of hidden neurons, heads, or groups of heads that share a key/value head.
        cuts: where the units lie in each of the module's children.
    """

    name: str
    module: nn.Module
    units: int
    cuts: tuple[Cut, ...]

    @property
    def reducing(self) -> Cut:
        """The cut of the layer that reads the units: the down or output projection."""
        return next(cut for cut in self.cuts if cut.dim == 1)

    def attributes(self, units: int) -> dict[str, int]:
        """Values of the module's attributes that depend on the number of units in use."""
        raise NotImplementedError

    def config(self, units: int) -> dict[str, Any] | None:
        """Entries of transformers' configuration for that many units; None where it has none."""
        raise NotImplementedError


@dataclass(frozen=True)
class FeedForward(Layer):
    """A feed-forward network; its units are the hidden neurons."""

    layout: FeedForwardLayout

    def attributes(self, units: int) -> dict[str, int]:
        return dict.fromkeys(self.layout.attributes, units)

    def config(self, units: int) -> dict[str, Any] | None:
        key = self.layout.config
        if key is None or not key.endswith("ratio"):
            return None if key is None else {key: units}
        ratio = units / width(self.module.get_submodule(self.layout.reducing), 0)
        return {key: int(ratio)} if ratio.is_integer() else None  # Dinov2Config takes no fraction


@dataclass(frozen=True)
class Attention(Layer):
    """An attention layer.

    Its units are groups: one key/value head with the query heads that use it. Where all query
    heads share one key/value head (multi-query attention), the units are the query heads.

    Attributes:
        heads: query heads.
        key_value_heads: key/value heads; as many as `heads` without grouping.
        head_dim: features of a head.
    """

    layout: AttentionLayout
    heads: int
    key_value_heads: int
    head_dim: int

    def rows(self, letter: str) -> tuple[str, list[range]]:
        """The path of the child that computes "q", "k" or "v", and the ranges of its outputs."""
        return getattr(self.layout, letter), _letter_rows(
            self.layout, letter, self.heads, self.key_value_heads, self.head_dim
        )

    def attributes(self, units: int) -> dict[str, int]:
        sizes = self._sizes(units)
        return {name: sizes[meaning] for name, meaning in self.layout.attributes.items()}

    def config(self, units: int) -> dict[str, Any] | None:
        if self.layout.config is None:
            return None
        sizes = self._sizes(units)
        return {name: sizes[meaning] for name, meaning in self.layout.config.items()}

    def _sizes(self, units: int) -> dict[str, int]:
        heads = units * self.heads // self.units
        kv_heads = units if self.units == self.key_value_heads else self.key_value_heads
        return {
            "heads": heads,
            "width": heads * self.head_dim,
            "key_value_heads": kv_heads,
            "key_value_width": kv_heads * self.head_dim,
            "groups": heads // kv_heads,
            "head_dim": self.head_dim,
        }


def feed_forwards(model: nn.Module) -> list[FeedForward]:
    """All feed-forward networks of a model, in the order of `named_modules`.

    Raises:
        ValueError: if there is none, or one whose layout is not in the table.
    """
    return [
        _feed_forward(name, module, layout)
        for name, module, layout in _locate(model, FeedForwardLayout, "feed-forward network")
    ]


def attentions(model: nn.Module) -> list[Attention]:
    """All attention layers of a model, in the order of `named_modules`.

    Raises:
        ValueError: if there is none, or one whose layout is not in the table.
    """
    return [
        _attention(name, module, layout)
        for name, module, layout in _locate(model, AttentionLayout, "attention layer")
    ]


def fused_slice(model: nn.Module, layer_name: str, letter: str) -> list[range]:
    """The outputs (rows of nn.Linear's weight) of a projection that are "q", "k" or "v".

    Args:
        model: holds the layer.
        layer_name: dotted name of the projection, such as "transformer.h.0.attn.c_attn".
        letter: "q", "k" or "v".

    Raises:
        ValueError: if the layer is in no attention of a known layout, or computes another letter.
    """
    modules = dict(model.named_modules())
    parts = layer_name.split(".")
    for depth in range(len(parts), -1, -1):
        name = ".".join(parts[:depth])
        layout = layout_of(modules[name]) if name in modules else None  # else it is a parameter
        if isinstance(layout, AttentionLayout):
            child, rows = _attention(name, modules[name], layout).rows(letter)
            if child == ".".join(parts[depth:]):
                return rows
            raise ValueError(f"{layer_name} does not compute {letter!r}: {child} does")
    owner = modules[".".join(parts[:-1])]
    raise ValueError(
        f"how q, k and v lie in {layer_name} is not known: {class_path(type(owner))} is no "
        "attention in lightning_modules/layout_table.py; add it: "
        f"LAYOUTS[{class_path(type(owner))!r}] = AttentionLayout(…)"
    )


def layout_of(module: nn.Module) -> Layout | None:
    """The layout of a module's class; None for a class that is not in the table."""
    entry = LAYOUTS.get(class_path(type(module)))
    return entry(module) if callable(entry) else entry


def width(layer: Any, dim: int) -> int:
    """Number of outputs (dim 0) or inputs (dim 1) of a linear layer, or features of a norm.

    Raises:
        ValueError: for anything else.
    """
    if hasattr(layer, "in_features"):
        return layer.in_features if dim else layer.out_features
    if hasattr(layer, "nf"):  # transformers' Conv1D
        return layer.nx if dim else layer.nf
    if type(layer) is nn.Sequential and len(layer):  # a low-rank layer
        return width(layer[0 if dim else -1], dim)
    if hasattr(layer, "normalized_shape"):
        return layer.normalized_shape[-1]
    raise ValueError(f"a {type(layer).__name__} is neither a linear layer nor a norm")


def shape_of(layer: Any) -> tuple[int, int]:
    """The numbers of outputs and inputs of a linear layer.

    Raises:
        ValueError: for anything else.
    """
    return width(layer, 0), width(layer, 1)


def is_layer_norm(kind: type) -> bool:
    """Whether a class is a LayerNorm or an RMSNorm, for which each library has its own."""
    return issubclass(kind, nn.LayerNorm) or kind.__name__.lower().endswith(
        ("layernorm", "rmsnorm")
    )


def inside(name: str, modules: Sequence[str]) -> bool:
    """Whether a module or parameter name is one of the modules or lies inside one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _locate(model: nn.Module, kind: type, what: str) -> Iterator[tuple[str, nn.Module, Any]]:
    """Name, module and layout of every module with a layout of this kind.

    A module whose class name looks like this kind but has no layout is refused, unless it is part
    of one that has a layout, or contains one.
    """
    modules = dict(model.named_modules())
    excluded = tuple(
        f"{name}."
        for name, module in modules.items()
        if class_path(type(module)) in NEITHER
        or (class_path(type(modules[name.rpartition(".")[0]])), name.rpartition(".")[2]) in NEITHER
    )
    modules = {n: m for n, m in modules.items() if not f"{n}.".startswith(excluded)}
    located = [
        (n, m, layout) for n, m in modules.items() if isinstance(layout := layout_of(m), kind)
    ]
    prefixes = tuple(f"{name}." for name, *_ in located)
    for name, module in modules.items():
        looks_like_one = (
            LOOKS_LIKE[kind].search(type(module).__name__)
            and next(module.parameters(), None) is not None
        )
        contains_one = not name or any(other.startswith(f"{name}.") for other in prefixes)
        if looks_like_one and not contains_one and not f"{name}.".startswith(prefixes):
            path = class_path(type(module))
            raise ValueError(
                f"{name} is a {path}, a {what} that is not in lightning_modules/layout_table.py; "
                f"add it: LAYOUTS[{path!r}] = {kind.__name__}(…)"
            )
    if not located:
        classes = sorted({class_path(type(m)) for m in modules.values() if any(m.children())})
        raise ValueError(
            f"{type(model).__name__} has no {what} that is in lightning_modules/layout_table.py; "
            f"it is made of {', '.join(classes)}; add its class: LAYOUTS[…] = {kind.__name__}(…)"
        )
    yield from located


def _feed_forward(name: str, module: nn.Module, layout: FeedForwardLayout) -> FeedForward:
    units = _width(name, module, layout.reducing, 1)
    expanding = []
    for path in layout.expanding:
        outputs = _width(name, module, path, 0)
        if outputs != units * layout.halves:
            raise ValueError(
                f"{name}.{path} has {outputs} outputs, expected {units * layout.halves}: "
                f"{layout.reducing} reads {units}"
            )
        parts = tuple((half * units, 1) for half in range(layout.halves))
        expanding.append(Cut(_linear_path(module, path, 0), 0, parts, units))
    if layout.norm and not isinstance(module.get_submodule(layout.norm), nn.Identity):
        expanding.append(Cut(layout.norm, 0, ((0, 1),), units))
    reducing = Cut(_linear_path(module, layout.reducing, 1), 1, ((0, 1),), units)
    return FeedForward(name, module, units, (*expanding, reducing), layout)


def _attention(name: str, module: nn.Module, layout: AttentionLayout) -> Attention:
    size: int = attrgetter(layout.head_dim)(module)
    heads = _width(name, module, layout.o, 1) // size
    fused_with_k = [letter for letter in "qkv" if getattr(layout, letter) == layout.k]
    child_of_k = getattr(module, layout.k, None)  # torch's MultiheadAttention has a parameter there
    if isinstance(child_of_k, Tensor):
        outputs = child_of_k.shape[0]
    else:
        outputs = _width(name, module, layout.k, 0)
    kv_heads = (outputs - heads * size * ("q" in fused_with_k)) // (
        size * sum(x in "kv" for x in fused_with_k)
    )
    units = kv_heads if kv_heads > 1 else heads
    query_heads = heads // units  # of one unit
    cuts: list[Cut] = []
    if layout.fixed:
        return Attention(name, module, units, (), layout, heads, kv_heads, size)
    parts: tuple[tuple[int, int], ...]
    for child in dict.fromkeys((layout.q, layout.k, layout.v)):
        letters = [letter for letter in layout.order if getattr(layout, letter) == child]
        if layout.pieces == "groups" and len(letters) > 1:
            unit_size = (query_heads + len(letters) - 1) * size
            parts = ((0, unit_size),) if kv_heads == units else ()
        else:
            rows = {x: _letter_rows(layout, x, heads, kv_heads, size) for x in letters}
            by_unit = [x for x in letters if x == "q" or kv_heads == units]
            parts = tuple(
                (rows[x][0].start, size * (query_heads if x == "q" else 1)) for x in by_unit
            )
        if parts:
            cuts.append(Cut(_linear_path(module, child, 0), 0, parts, units))
    for child in layout.by_head:
        if not isinstance(getattr(module, child, None), nn.Identity | None):
            cuts.append(Cut(child, 0, ((0, query_heads * size),), units))
    cuts.append(Cut(_linear_path(module, layout.o, 1), 1, ((0, query_heads * size),), units))
    return Attention(name, module, units, tuple(cuts), layout, heads, kv_heads, size)


def _letter_rows(
    layout: AttentionLayout, letter: str, heads: int, kv_heads: int, size: int
) -> list[range]:
    """The ranges of outputs that are "q", "k" or "v"; the arguments are those of `Attention`."""
    child = getattr(layout, letter)
    letters = [x for x in layout.order if getattr(layout, x) == child]
    count = kv_heads if layout.pieces == "groups" else int(layout.pieces)
    share = {x: (heads if x == "q" else kv_heads) * size // count for x in letters}
    before = sum(share[x] for x in letters[: letters.index(letter)])
    starts = [piece * sum(share.values()) + before for piece in range(count)]
    if len(letters) == 1:
        return [range(share[letter] * count)]
    return [range(start, start + share[letter]) for start in starts]


def _linear_path(module: nn.Module, path: str, dim: int) -> str:
    """The path of a linear layer; in a low-rank nn.Sequential(u, v), of v (dim 0) or u (dim 1)."""
    child = module.get_submodule(path)
    if type(child) is not nn.Sequential:
        return path
    return f"{path}.{list(child._modules)[0 if dim else -1]}"


def _width(name: str, module: nn.Module, path: str, dim: int) -> int:
    try:
        return width(module.get_submodule(path), dim)
    except ValueError as error:
        raise ValueError(f"{name}.{path}: {error}") from error


# classes whose forward passes read a linear layer's weight without calling the layer, which would
# silently leave out what is added to the layer
READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# classes of timm that so read the weight of their child "qkv" alone, to add a bias of their own
READ_QKV = (
    "timm.models.beit.Attention",
    "timm.models.eva.EvaAttention",
    "timm.models.swin_transformer_v2.WindowAttention",
)


def uncalled_layers(model: nn.Module) -> set[str]:
    """Names of the linear layers whose weights the modules around them read without calling them.

    What is added to such a layer has no effect, or none in evaluation.
    """
    readers = []
    for name, module in model.named_modules():
        if isinstance(module, READ_WEIGHTS):
            readers.append(name)
        elif class_path(type(module)) in READ_QKV and _reads_qkv(module):
            readers.append(f"{name}.qkv" if name else "qkv")
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    return {name for name in linear if "" in readers or inside(name, readers)}


def _reads_qkv(attention: Any) -> bool:
    return attention.q_bias is not None and not attention.qkv_bias_separate
