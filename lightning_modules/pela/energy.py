"""Ranks from the singular values, under one budget of parameters for the whole model.

Beyond the paper, which gives every layer the same ratio. One more rank of layer k costs
d_in + d_out parameters and adds σ²/Σσ² to the share of the layer's energy that is kept; the ranks
are those whose gain for each parameter is largest.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_modules.pela.factorize import SKIP, find_layers, plan_uniform, singular_values


def plan_energy(
    model: nn.Module,
    ratio: float = 2.0,
    skip: Sequence[str] = SKIP,
    moments: Mapping[str, Tensor] | None = None,
) -> dict[str, int]:
    """A plan with at most as many parameters as the uniform one, that keeps more energy.

    Every layer keeps at least rank 1 and at most the rank at which it would have as many
    parameters as the dense layer.

    Args:
        model: a dense model with its weights.
        ratio: κ of the uniform plan that sets the budget; at least 1.
        skip: as for `factorize`.
        moments: as for `factorize`: the energy is then that of the layers' outputs.

    Returns:
        Ranks by layer name, for `factorize(model, ranks=…)`. The kept energy, summed over layers,
        is never less than the uniform plan's.

    Raises:
        ValueError: as `plan_uniform`; if ratio is below 1, the model is on the meta device, a
            weight is zero or not finite, or moments lack a layer.
    """
    if 0 < ratio < 1:
        raise ValueError(
            f"ratio is {ratio}: expected at least 1, below it low rank costs more than dense"
        )
    uniform = plan_uniform(model, ratio, skip)
    layers = find_layers(model, skip)
    shares: dict[str, Tensor] = {}
    for name, layer in layers.items():
        if layer.weight.is_meta:
            raise ValueError(f"{name} is on the meta device: energy ranks need the weights")
        if moments is not None and name not in moments:
            raise ValueError(f"moments lack {name}: calibrate with the same skip and model")
        if not torch.isfinite(layer.weight).all():
            raise ValueError(f"{name}.weight has NaN or infinite values: load sound weights")
        moment = None if moments is None else moments[name]
        energy = singular_values(layer.weight, moment).double() ** 2
        if energy.sum() == 0:
            raise ValueError(f"{name}.weight is zero: it has no energy, add {name!r} to skip")
        shares[name] = (energy / energy.sum()).cpu()
    costs = {name: layer.in_features + layer.out_features for name, layer in layers.items()}
    caps = {n: layer.in_features * layer.out_features // costs[n] for n, layer in layers.items()}
    ranks = _spend(shares, costs, caps, budget=sum(uniform[n] * costs[n] for n in uniform))

    def kept(plan: Mapping[str, int]) -> float:
        return sum(float(shares[name][:rank].sum()) for name, rank in plan.items())

    return ranks if kept(ranks) >= kept(uniform) else uniform


def _spend(
    shares: Mapping[str, Tensor], costs: Mapping[str, int], caps: Mapping[str, int], budget: int
) -> dict[str, int]:
    """Give ranks to layers, best gain for each parameter first, while the budget lasts."""
    ranks = dict.fromkeys(shares, 1)
    budget -= sum(costs.values())
    gains = [
        (gain / costs[name], name)
        for name, share in shares.items()
        for gain in share[1 : caps[name]].tolist()
    ]
    full: set[str] = set()
    for _, name in sorted(gains, key=lambda gain: -gain[0]):
        if name in full or costs[name] > budget:
            full.add(name)
            continue
        ranks[name] += 1
        budget -= costs[name]
    return ranks
