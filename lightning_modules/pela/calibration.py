"""Second moments of the layers' inputs, for factors that fit the data as well as the weight.

Beyond the paper. For inputs x of a layer, C = E[x xᵀ], the mean over all tokens seen; what
`factorize(moments=…)` does with it stands there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_modules.pela.factorize import SKIP, find_layers


class Calibration:
    """Collects C for every layer that would be factorised, while the model runs on some inputs.

        with Calibration(model) as calibration:
            for images in batches:
                model(images)
        factorize(model, moments=calibration.moments())

    It holds one (d_in, d_in) matrix for each layer, in float64: what LayerNorm gives has a
    direction without variance, and a float32 sum of products is then often not positive definite.

    Args:
        model: a dense model.
        skip: as for `factorize`.

    Raises:
        ValueError: as `find_layers` does.
    """

    def __init__(self, model: nn.Module, skip: Sequence[str] = SKIP):
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
            moments[name] = self.sums[name] / tokens
            if not torch.isfinite(moments[name]).all():
                raise ValueError(f"{name} has seen NaN or infinite inputs: calibrate on sound data")
        return moments

    def _hook(self, name: str):
        def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().flatten(0, -2).double()
            with torch.autocast(x.device.type, enabled=False):
                product = x.T @ x
            self.sums[name] = self.sums[name] + product if name in self.sums else product
            self.tokens[name] += len(x)

        return add
