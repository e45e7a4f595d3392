"""Records layer outputs by forward hooks, for feature distillation.

Student and teacher are neither subclassed nor wrapped.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

LAYER = re.compile(r"(^|\.)(blocks|layers?|h|stages)\.\d+$")


def feature_layers(model: nn.Module, which: str = "blocks") -> list[str]:
    """Names of a model's blocks or stages, whose outputs are the features.

    Args:
        model: a timm or transformers model.
        which: "blocks", every Transformer block (the released DeiT recipes: 12 or 24); "stages",
            the stages of a hierarchical model such as Swin.

    Raises:
        ValueError: if `which` is neither, or the model has no such modules.
    """
    if which not in ("blocks", "stages"):
        raise ValueError(
            f"unknown features {which!r}: expected 'blocks', 'stages', 'pooled' or module names"
        )
    layers = [name for name, _ in model.named_modules() if LAYER.search(name)]
    # a matching module that contains others is a stage, and one that contains none is a block
    stages = {name for name in layers if any(other.startswith(f"{name}.") for other in layers)}
    chosen = [name for name in layers if (name in stages) == (which == "stages")]
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no {which} with a known name: give the names of the "
            "modules whose outputs are the features"
        )
    return chosen


class Features:
    """Records the outputs of some layers of a model while it runs.

        with Features(student) as s, Features(teacher) as t:
            logits = student(images)
            with torch.no_grad():
                teacher(images)
            loss = feature_distillation(s.take(), t.take())

    Every call is recorded: a layer that a forward pass runs twice (a text encoder on two texts)
    gives two features. Recomputation by gradient checkpointing during a backward pass is not
    recorded, and deep copies of the model do not record. `close()` removes the hooks, as leaving
    the `with` block does.

    Args:
        model: a timm or transformers model; any other if `layers` are names.
        layers: "blocks" or "stages", see `feature_layers`; "pooled", the input of a timm model's
            classifier (the released Swin recipe); or the names of modules.

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
        self.kept: dict[str, list[Tensor]] = {name: [] for name in targets}
        self.handles = [_keep(targets[name], self.kept[name], pooled) for name in targets]

    def take(self) -> list[Tensor]:
        """Return and clear the outputs recorded so far, in the order of `names`, then of the calls.

        Raises:
            ValueError: if a layer has not run since the last call.
        """
        missing = [name for name in self.names if not self.kept[name]]
        if missing:
            raise ValueError(
                f"no feature from {', '.join(missing[:4])}: run the model before take(), once for "
                "each call"
            )
        taken = [feature for name in self.names for feature in self.kept[name]]
        self._clear()
        return taken

    def close(self) -> None:
        """Remove the hooks and forget the features."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._clear()

    def _clear(self) -> None:
        for features in self.kept.values():
            features.clear()

    def __enter__(self) -> "Features":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _keep(module: nn.Module, kept: list[Tensor], pooled: bool) -> torch.utils.hooks.RemovableHandle:
    def keep(hooked: nn.Module, value: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if hooked is module and not in_backward:
            kept.append(value if torch.is_tensor(value) else value[0])

    if pooled:
        return module.register_forward_pre_hook(lambda hooked, inputs: keep(hooked, inputs))
    return module.register_forward_hook(lambda hooked, _, output: keep(hooked, output))


def _classifier(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_classifier", None)
    if get is None or not isinstance(get(), nn.Module):
        raise ValueError(
            f"{type(model).__name__} has no get_classifier() as timm's models have, so its pooled "
            "feature is not known: give the name of the module that returns it"
        )
    return get()
