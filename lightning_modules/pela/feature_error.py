"""Chooses ranks by each layer's effect on the model's last feature, under a budget of parameters.

FLAR-SVD (Thoma et al., CVPR Workshops 2025), for image classifiers. With only layer l at rank r,
the error of the head's input feature f is

    e_l(r) = E[(f − f_{l,r})²] / E[f_{l,r}²]

Every layer gets the lowest rank at which e_l(r) is at most a threshold, which is the same for all
layers. Factors are ordered by decreasing singular value, so that one decomposition serves all
ranks, and the rank is found by bisection, in multiples of 8. Here the threshold is the lowest that
keeps to the budget of the uniform plan; the released code instead scales the ranks to the budget.
The paper also rejects ranks that are not faster on given hardware; that is left out, because it
needs a latency model of the hardware.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from lightning_modules.pela.factorize import factorize, plan_uniform
from lightning_modules.pela.features import Features
from lightning_modules.pela.layers import factors_of, find_layers, low_rank_layers, sizes

HALVINGS = 20  # steps of the bisection for the threshold, on its logarithm
LOWEST, HIGHEST = 1e-9, 1e3  # the range of thresholds to search


@torch.no_grad()
def plan_feature_error(
    model: nn.Module,
    images: Tensor,
    ratio: float = 2.0,
    skip: Sequence[str] = (),
    moments: Mapping[str, Tensor] | None = None,
    multiple: int = 8,
) -> dict[str, int]:
    """A plan with at most as many parameters as the uniform one.

    Args:
        model: a dense timm model with layers of nn.Linear; it stays unchanged.
        images: (B, 3, H, W), on which the error is measured, with a pass for each layer and rank
            that the bisection tries.
        ratio: κ of the uniform plan that sets the budget.
        skip: as for `factorize`.
        moments: as for `factorize`; the paper's factors are whitened.
        multiple: ranks are multiples of it, or a layer's largest useful rank.

    Returns:
        Ranks by layer name, for `factorize(model, ranks=…)`; the uniform plan where no threshold
        in the search range keeps to the budget.

    Raises:
        ValueError: as `plan_uniform`, or if the model has no classifier.
    """
    uniform = plan_uniform(model, ratio, skip)
    costs = {name: sum(sizes(layer)) for name, layer in find_layers(model, skip).items()}
    budget = sum(rank * costs[name] for name, rank in uniform.items())
    copied = copy.deepcopy(model).eval()
    layers = find_layers(copied, skip)
    caps = {n: math.prod(sizes(layer)) // costs[n] for n, layer in layers.items()}
    low_rank = low_rank_layers(factorize(copy.deepcopy(model), ranks=caps, moments=moments))
    images = images.to(next(copied.parameters()))

    def feature() -> Tensor:
        with Features(copied, "pooled") as features:
            copied(images)
            return features.take()[0].double()

    reference = feature()

    @cache
    def error(name: str, rank: int) -> float:
        weight, (u, v) = layers[name].weight, factors_of(name, low_rank[name])
        before = weight.clone()
        weight.copy_(v.weight[:, :rank] @ u.weight[:rank])
        changed = feature()
        weight.copy_(before)
        return float((changed - reference).square().mean() / changed.square().mean())

    def lowest_rank(name: str, threshold: float) -> int:
        low, high = 1, max(1, caps[name] // multiple)
        while low < high:
            middle = (low + high) // 2
            if error(name, middle * multiple) <= threshold:
                high = middle
            else:
                low = middle + 1
        return min(high * multiple, caps[name])

    low, high = math.log(LOWEST), math.log(HIGHEST)
    best = uniform
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        plan = {name: lowest_rank(name, math.exp(middle)) for name in layers}
        if sum(rank * costs[name] for name, rank in plan.items()) <= budget:
            best, high = plan, middle
        else:
            low = middle
    return best
