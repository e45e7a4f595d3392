"""Chooses ranks by the singular values, under one budget of parameters for all layers together.

Beyond the paper, which gives every layer the same ratio. Raising a layer's rank by one costs
d_in + d_out parameters and adds σ²/Σσ² to the share of the layer's energy that is kept. The ranks
are raised where the gain per parameter is largest, until the budget is spent.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightning_modules.pela.factorize import (
    plan_uniform,
    require_finite,
    require_moment,
    singular_values,
)
from lightning_modules.pela.layers import dense_weight, find_layers, sizes


def plan_energy(
    model: nn.Module,
    ratio: float = 2.0,
    skip: Sequence[str] = (),
    moments: Mapping[str, Tensor] | None = None,
    multiple: int = 1,
    shares: Mapping[str, Tensor] | None = None,
) -> dict[str, int]:
    """A plan with at most the uniform plan's parameters that keeps at least as much energy.

    Every layer keeps at least rank 1 and at most the rank at which it would have as many
    parameters as the dense layer.

    Args:
        model: a dense model with its weights.
        ratio: κ of the uniform plan that sets the budget; at least 1.
        skip: as for `factorize`.
        moments: as for `factorize`: the energy is then that of the layers' outputs.
        multiple: ranks are multiples of it where the budget allows.
        shares: the result of `energy_shares`, to reuse it for plans at several ratios.

    Returns:
        Ranks by layer name, for `factorize(model, ranks=…)`. The kept energy, summed over layers,
        is never less than the uniform plan's.

    Raises:
        ValueError: as `plan_uniform`; if ratio is below 1, the model is on the meta device, a
            weight is zero or not finite, or moments lack a layer.
    """
    if 0 < ratio < 1:
        raise ValueError(
            f"ratio is {ratio}: expected at least 1, below which low rank costs more than dense"
        )
    uniform = plan_uniform(model, ratio, skip, multiple)
    layers = find_layers(model, skip)
    if shares is None:
        shares = energy_shares(model, skip, moments)
    costs = {name: sum(sizes(layer)) for name, layer in layers.items()}
    caps = {n: math.prod(sizes(layer)) // costs[n] for n, layer in layers.items()}
    budget = sum(uniform[name] * costs[name] for name in uniform)
    start = {name: min(multiple, caps[name], uniform[name]) for name in uniform}
    ranks = _spend(shares, costs, caps, budget, multiple, start)

    def kept(plan: Mapping[str, int]) -> float:
        return sum(float(shares[name][:rank].sum()) for name, rank in plan.items())

    return ranks if kept(ranks) >= kept(uniform) else uniform


def energy_shares(
    model: nn.Module, skip: Sequence[str] = (), moments: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """σ²/Σσ² (min(d_in, d_out),) of every layer, decreasing, by name.

    The arguments are those of `plan_energy`.

    Raises:
        ValueError: if the model is on the meta device, a weight is zero or not finite, or moments
            lack a layer.
    """
    shares: dict[str, Tensor] = {}
    for name, layer in find_layers(model, skip).items():
        if layer.weight.is_meta:
            raise ValueError(f"{name} is on the meta device: energy ranks need the weights")
        require_moment(name, moments)
        require_finite(name, layer)
        moment = None if moments is None else moments[name]
        energy = singular_values(dense_weight(layer), moment).double() ** 2
        if energy.sum() == 0:
            raise ValueError(f"{name}.weight is zero: it has no energy, add {name!r} to skip")
        shares[name] = (energy / energy.sum()).cpu()
    return shares


def _spend(
    shares: Mapping[str, Tensor],
    costs: Mapping[str, int],
    caps: Mapping[str, int],
    budget: int,
    step: int,
    start: Mapping[str, int],
) -> dict[str, int]:
    """Raise ranks from `start` by `step` at a time, largest gain per parameter first."""
    ranks = dict(start)
    budget -= sum(ranks[name] * costs[name] for name in ranks)
    gains = [
        (float(share[rank : rank + step].sum()) / costs[name], name)
        for name, share in shares.items()
        for rank in range(start[name], caps[name] - step + 1, step)
    ]
    full: set[str] = set()
    for _, name in sorted(gains, key=lambda gain: -gain[0]):
        if name in full or costs[name] * step > budget:
            full.add(name)
            continue
        ranks[name] += step
        budget -= costs[name] * step
    return ranks
