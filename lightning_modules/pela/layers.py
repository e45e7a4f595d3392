"""Low-rank layers, and the choice of the layers of a model that can be replaced by them.

A low-rank layer is a plain `nn.Sequential` of two `nn.Linear`, called u and v,

    y = v(u(x)) = V · (U · x) + b,    U (r × d_in),  V (d_out × r)

so that hooks, pruning, adapters and pickling work on it as on any other module.
"""

import inspect
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SKIP = (
    # heads of timm and transformers, whose outputs are classes or tokens
    *("head", "head_dist", "classifier", "score", "lm_head", "cls", "qa_outputs"),
    # kept dense by the released code: patch embedding and Swin's patch merging
    *("patch_embed", "downsample", "norm"),
    # small networks that compute position biases (Swin V2, ViT-relpos)
    *("cpb_mlp", "continuous_position_bias_mlp", "rel_pos"),
)
MIN_OUTPUTS = 10  # layers with fewer outputs stay dense, as in the released code

Linear = nn.Linear | Conv1D
# these read the weights of their layers, but `call_layers` makes them call the layers
TorchEncoders = nn.TransformerEncoderLayer | nn.TransformerEncoder


def low_rank_layer(u: nn.Linear, v: nn.Linear) -> nn.Sequential:
    """A low-rank layer of u, d_in → r without bias, and v, r → d_out."""
    return nn.Sequential(OrderedDict(u=u, v=v))


def low_rank_layers(model: nn.Module) -> dict[str, nn.Sequential]:
    """The low-rank layers of the model by name, including those with an adapter on u or v."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Sequential) and list(module._modules) == ["u", "v"]
    }


def plan_of(model: nn.Module) -> dict[str, int]:
    """The rank of every low-rank layer of the model, by name.

    Raises:
        ValueError: if the model has no low-rank layer.
    """
    layers = low_rank_layers(model)
    plan: dict[str, int] = {n: layer.u.out_features for n, layer in layers.items()}  # type: ignore
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no low-rank layer: call factorize(model) first"
        )
    return plan


def sizes(layer: Linear) -> tuple[int, int]:
    """(d_in, d_out) of a dense layer."""
    outputs, inputs = dense_weight(layer).shape
    return inputs, outputs


def dense_weight(layer: Linear) -> Tensor:
    """The weight (d_out, d_in), which transformers' Conv1D keeps transposed."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def factors_of(name: str, layer: nn.Sequential) -> tuple[nn.Linear, nn.Linear]:
    """u and v of a low-rank layer, after checking that both are plain linear layers.

    Raises:
        ValueError: if one of them is anything else, for example has an adapter.
    """
    for part in ("u", "v"):
        factor = layer.get_submodule(part)
        # FSDP2 replaces the class by a subclass with the same forward
        if not isinstance(factor, nn.Linear) or type(factor).forward is not nn.Linear.forward:
            raise ValueError(
                f"{name}.{part} is a {type(factor).__name__} and not a plain nn.Linear: merge or "
                "remove what was added to it first"
            )
    return layer.u, layer.v  # type: ignore[return-value]


def find_layers(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, Linear]:
    """The layers to factorise, by name: every nn.Linear and Conv1D that is not skipped.

    Layers with fewer than 10 outputs are skipped as well, as in the released code, and so is the
    output projection inside nn.MultiheadAttention, which torch never calls.

    Args:
        model: a dense model.
        skip: patterns in addition to the defaults `SKIP`, with wildcards. A pattern matches
            complete parts of a dotted name: "attn.proj" matches "blocks.3.attn.proj", and "head"
            matches "head.fc" but not "overhead". To factorise a layer that the defaults skip, name
            it in a plan.

    Raises:
        ValueError: if the model is low-rank already, a pattern matches no module, a layer is of
            another type (nested, with an adapter, quantised), carries hooks, is not called because
            its parent reads its weight, or shares its weight, or nothing is left to factorise.
    """
    if isinstance(skip, str):
        raise ValueError(f"skip is the string {skip!r}: expected a list of patterns, [{skip!r}]")
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if pattern not in SKIP and not any(_fits(name, pattern) for name in names):
            raise ValueError(
                f"skip pattern {pattern!r} matches no module of {type(model).__name__}: its "
                f"linear layers are {linear_names(model)}"
            )
    patterns = (*SKIP, *skip)
    chosen = [
        name
        for name, module in model.named_modules()
        if name
        and _is_linear(module)
        and not any(_fits(name, pattern) for pattern in patterns)
        and dense_weight(module).shape[0] >= MIN_OUTPUTS
    ]
    layers = checked_layers(model, chosen)
    if not layers:
        raise ValueError(
            f"nothing to factorise in {type(model).__name__}: no nn.Linear with at least "
            f"{MIN_OUTPUTS} outputs is left by skip {list(patterns)}"
        )
    return layers


def checked_layers(model: nn.Module, names: Iterable[str]) -> dict[str, Linear]:
    """The named linear layers of the model, after checking that each can be replaced.

    Raises:
        ValueError: if one cannot, for the reasons given at `find_layers`.
    """
    if low_rank_layers(model):
        raise ValueError(f"{type(model).__name__} is low-rank already: merge(model) first")
    modules = dict(model.named_modules())
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    layers: dict[str, Linear] = {}
    for name in names:
        layer = modules[name]
        if (reason := _obstacle(name, layer, modules)) is not None:
            raise ValueError(f"{name} {reason}, or add {name!r} to skip")
        assert isinstance(layer, Linear)
        if uses[id(layer.weight)] > 1:
            raise ValueError(
                f"{name}.weight is shared with another module: add {name!r} to skip, or untie them"
            )
        layers[name] = layer
    return layers


def linear_names(model: nn.Module) -> str:
    """The names of the first few linear layers of a model, for error messages."""
    names = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "") if names else "none"


def call_layers(model: nn.Module) -> None:
    """Make torch's own Transformer layers call their linear layers, in place.

    In eval mode nn.TransformerEncoderLayer would pass the layers' weights to a fused operator.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, or peft's wrapper around one."""
    # the output projection inside nn.MultiheadAttention, which is never called
    uncalled = type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear
    return (isinstance(module, Linear) and not uncalled) or _is_peft_layer(module)


def _is_peft_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.") and hasattr(module, "base_layer")


def _obstacle(name: str, layer: nn.Module, modules: Mapping[str, nn.Module]) -> str | None:
    """The reason why a linear layer cannot be replaced, with the remedy; None if it can."""
    kind = type(layer)
    if kind not in (nn.Linear, Conv1D):
        return (
            f"is a {kind.__name__}, which factorize does not know: merge or extract the model first"
        )
    if layer._forward_hooks or layer._forward_pre_hooks or layer._modules:
        return (
            "carries hooks or modules (an adapter, or torch's pruning) that replacing it would "
            "drop: remove them first"
        )
    parts = name.split(".")
    for end in range(len(parts)):
        ancestor = modules[".".join(parts[:end])]
        if _is_peft_layer(ancestor):
            return f"is inside a {type(ancestor).__name__} of peft: merge the adapter first"
        if not isinstance(ancestor, TorchEncoders) and parts[-1] in _weights_read(type(ancestor)):  # type: ignore[arg-type]
            return (
                f"is not called by {type(ancestor).__name__}, which reads its weight: add "
                f"{parts[-1]!r} to skip"
            )
    return None


@cache
def _weights_read(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the children whose `weight` the class's forward or a method it calls reads."""
    names: set[str] = set()
    todo, done = ["forward"], set()
    while todo:
        method = todo.pop()
        function = getattr(kind, method, None)
        if method in done or (hasattr(nn.Module, method) and method != "forward"):
            continue
        done.add(method)
        try:
            source = inspect.getsource(inspect.unwrap(function))  # type: ignore[arg-type]
        except (OSError, TypeError):  # no function, or one without source code
            continue
        names |= set(re.findall(r"\.(\w+)\.weight\b", source))
        todo += re.findall(r"self\.(\w+)\(", source)
    return frozenset(names)


def _fits(name: str, pattern: str) -> bool:
    """Whether the pattern matches consecutive complete parts of the dotted name."""
    parts, wanted = name.split("."), pattern.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(parts[i:], wanted, strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )
