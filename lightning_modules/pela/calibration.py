"""Statistics of the layers' inputs, with which the factors fit the data instead of the weight.

Beyond the paper. Each kind gives a matrix C for every layer, with which `factorize(moments=…)`
decomposes W · L, C = L · Lᵀ (see there):

    whitened   C = E[x xᵀ], the mean over all tokens seen (SVD-LLM, arXiv 2403.07378)
    asvd       C = diag(E|x|), so that L = diag(E|x|)^½ (ASVD, arXiv 2312.05821, α = ½; without its
               search for ranks)
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_modules.backbones import call, to_device
from lightning_modules.modes import evaluating
from lightning_modules.pela.layers import find_layers

Kind = Literal["whitened", "asvd"]


class Calibration:
    """Collects C for every layer that would be factorised, while the model runs on some inputs.

        with Calibration(model) as calibration:
            run(model, batches)
        factorize(model, moments=calibration.moments())

    It holds one matrix (d_in, d_in), or one vector for asvd, for each layer. They are in float64,
    because the outputs of LayerNorm have a direction without variance, in which a sum of products
    in float32 is often not positive definite.

    Args:
        model: a dense model.
        skip: as for `factorize`.
        kind: "whitened" or "asvd".

    Raises:
        ValueError: as `find_layers` does, or for another kind.
    """

    def __init__(self, model: nn.Module, skip: Sequence[str] = (), kind: Kind = "whitened"):
        if kind not in ("whitened", "asvd"):
            raise ValueError(f"unknown kind {kind!r} of calibration: expected 'whitened' or 'asvd'")
        self.kind = kind
        self.layers = find_layers(model, skip)
        self.sums: dict[str, Tensor] = {}
        self.tokens = dict.fromkeys(self.layers, 0)
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "Calibration":
        for name, layer in self.layers.items():
            self.handles.append(layer.register_forward_pre_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def moments(self) -> dict[str, Tensor]:
        """C (d_in, d_in) of every layer, by name.

        Raises:
            ValueError: if a layer has not run, or its inputs were not finite.
        """
        moments = {}
        for name, tokens in self.tokens.items():
            if tokens == 0:
                raise ValueError(
                    f"{name} has seen no input: run the model inside `with Calibration(model)`, "
                    f"or add {name!r} to skip"
                )
            mean = self.sums[name] / tokens
            if not torch.isfinite(mean).all():
                raise ValueError(f"{name} has seen NaN or infinite inputs: calibrate on sound data")
            moments[name] = mean if self.kind == "whitened" else mean.diag()
        return moments

    def _hook(self, name: str):
        def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().flatten(0, -2).double()
            with torch.autocast(x.device.type, enabled=False):
                total = x.T @ x if self.kind == "whitened" else x.abs().sum(0)
            self.sums[name] = self.sums[name] + total if name in self.sums else total
            self.tokens[name] += len(x)

        return add


@torch.no_grad()
def run(model: nn.Module, batches: Iterable[Any]) -> None:
    """Call the model in eval mode on every batch, and restore each module's mode.

    Args:
        model: any model; batches are moved to the device of its first parameter.
        batches: its inputs: tensors, tuples of arguments, or dictionaries of keyword arguments.
    """
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in batches:
            call(model, to_device(batch, device))
