"""Layer outputs by forward hooks: what feature distillation compares.

Student and teacher stay the models they are; nothing is forked or wrapped.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

LAYER = re.compile(r"(^|\.)(blocks|layers?|h|stages)\.\d+$")


def feature_layers(model: nn.Module, which: str = "blocks") -> list[str]:
    """Names of the modules whose outputs are the features.

    Args:
        model: a timm or transformers model.
        which: "blocks", every Transformer block (the released DeiT recipes: 12 or 24); "stages",
            the stages of a hierarchical model such as Swin.

    Raises:
        ValueError: if which is neither, or the model has no such modules.
    """
    if which not in ("blocks", "stages"):
        raise ValueError(
            f"unknown features {which!r}: expected 'blocks', 'stages', 'pooled' or module names"
        )
    layers = [name for name, _ in model.named_modules() if LAYER.search(name)]
    # A stage holds blocks; what holds none is a block.
    stages = {name for name in layers if any(other.startswith(f"{name}.") for other in layers)}
    found = [name for name in layers if (name in stages) == (which == "stages")]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no {which} that are found by name: give the names of the "
            "modules whose outputs are the features"
        )
    return found


class Features:
    """Keeps the outputs of some layers of a model as it runs.

        with Features(student) as s, Features(teacher) as t:
            logits = student(images)
            with torch.no_grad():
                teacher(images)
            loss = feature_distillation(s.take(), t.take())

    The hooks also leave with `close()`. They do not act on deep copies of the model.

    Args:
        model: a timm or transformers model, or any other with names given.
        layers: "blocks" or "stages", see `feature_layers`; "pooled", what the classifier of a
            timm model is given (the released Swin recipe); or the names of modules.

    Raises:
        ValueError: if the model has no such layers.
    """

    def __init__(self, model: nn.Module, layers: str | Sequence[str] = "blocks"):
        pooled = layers == "pooled"
        targets: dict[str, nn.Module]
        if pooled:
            targets = {"pooled": _classifier(model)}
        else:
            modules = dict(model.named_modules())
            names = feature_layers(model, layers) if isinstance(layers, str) else list(layers)
            for name in names:
                if name not in modules:
                    near = [n for n in modules if n.split(".")[-1] == name.split(".")[-1]]
                    raise ValueError(
                        f"{type(model).__name__} has no module {name!r} to take features from; "
                        f"similar: {', '.join(near[:4]) or ', '.join(list(modules)[1:5])}"
                    )
            targets = {name: modules[name] for name in names}
        self.names = tuple(targets)
        self.kept: dict[str, Tensor] = {}
        self.handles = [_keep(module, name, self.kept, pooled) for name, module in targets.items()]

    def take(self) -> list[Tensor]:
        """The outputs of the last forward pass, in the order of `names`; they are then let go.

        Raises:
            ValueError: if a layer has not run since the last call.
        """
        missing = [name for name in self.names if name not in self.kept]
        if missing:
            raise ValueError(
                f"no feature from {', '.join(missing[:4])}: run the model before take(), once for "
                "each call"
            )
        taken = [self.kept[name] for name in self.names]
        self.kept.clear()
        return taken

    def close(self) -> None:
        """Remove the hooks and let the features go."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.kept.clear()

    def __enter__(self) -> "Features":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _keep(
    module: nn.Module, name: str, kept: dict[str, Tensor], pooled: bool
) -> torch.utils.hooks.RemovableHandle:
    def before(hooked: nn.Module, inputs: Any) -> None:
        if hooked is module:
            kept[name] = inputs[0]

    def after(hooked: nn.Module, inputs: Any, output: Any) -> None:
        if hooked is module:
            kept[name] = output if torch.is_tensor(output) else output[0]

    if pooled:
        return module.register_forward_pre_hook(before)
    return module.register_forward_hook(after)


def _classifier(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_classifier", None)
    if get is None or not isinstance(get(), nn.Module):
        raise ValueError(
            f"{type(model).__name__} has no get_classifier() as timm's models have, so its pooled "
            "feature is not known: give the name of the module that returns it"
        )
    return get()
