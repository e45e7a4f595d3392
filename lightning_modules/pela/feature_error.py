"""Ranks by what each layer does to the model's last feature, under one budget of parameters.

FLAR-SVD (Thoma et al., CVPR Workshops 2025), for image classifiers. With layer l alone at rank r,
the error of the feature f that the head is given is

    e_l(r) = E[(f − f_{l,r})²] / E[f_{l,r}²]

Every layer gets the least rank at which e_l(r) is at most a threshold, the same for all layers. The
factors stand by falling singular value, so one decomposition serves all ranks, and the rank is
found by bisection, in multiples of 8. Here the threshold is the least that keeps to the budget of
the uniform plan; the released code scales the ranks to it instead. The paper's rejection of ranks
that are not faster on the hardware is left out: it needs a latency model of that hardware.
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

HALVINGS = 20  # of the threshold's logarithm
LEAST, MOST = 1e-9, 1e3  # thresholds between which it is sought


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
        model: a dense timm model; it is left as it was. Layers of nn.Linear.
        images: (B, 3, H, W), on which the error is measured: a pass for each layer and rank.
        ratio: κ of the uniform plan that sets the budget.
        skip: as for `factorize`.
        moments: as for `factorize`; the paper's factors are whitened.
        multiple: of which ranks are.

    Returns:
        Ranks by layer name, for `factorize(model, ranks=…)`; the uniform plan where even the least
        ranks of the layers would cost more.

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

    def least(name: str, threshold: float) -> int:
        low, high = 1, max(1, caps[name] // multiple)
        while low < high:
            middle = (low + high) // 2
            if error(name, middle * multiple) <= threshold:
                high = middle
            else:
                low = middle + 1
        return min(high * multiple, caps[name])

    low, high = math.log(LEAST), math.log(MOST)
    best = uniform
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        plan = {name: least(name, math.exp(middle)) for name in layers}
        if sum(rank * costs[name] for name, rank in plan.items()) <= budget:
            best, high = plan, middle
        else:
            low = middle
    return best
