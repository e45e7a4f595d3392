"""Compresses any model by low rank in one call, with a choice of ranks and of factors."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_modules.pela.calibration import Calibration, run
from lightning_modules.pela.energy import energy_shares, plan_energy
from lightning_modules.pela.factorize import factorize, plan_uniform
from lightning_modules.pela.feature_error import plan_feature_error
from lightning_modules.pela.layers import factors_of, low_rank_layers

Ranks = Literal["uniform", "energy", "feature_error"]
Factors = Literal["svd", "whitened", "asvd"]
# most images, evenly spread over the batches, on which "feature_error" measures each layer and rank
PROBES = 64


def compress(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    ratio: float = 2.0,
    ranks: Ranks = "uniform",
    factors: Factors = "svd",
    skip: Sequence[str] = (),
    multiple: int = 1,
) -> nn.Module:
    """Replace every fully connected layer of a model by a low-rank layer, in place.

    Args:
        model: a dense model of timm, transformers or any other.
        batches: inputs, needed for "whitened", "asvd" and "feature_error": an iterable of tensors,
            tuples of arguments, or dictionaries of keyword arguments; of image tensors (B, 3, H, W)
            for "feature_error".
        ratio: κ; 2 halves the layers' parameters and multiply-adds.
        ranks: "uniform", κ for every layer (the paper); "energy", from the singular values (with
            "whitened" and "asvd" those of W · L) under the same budget of parameters (see
            `energy.py`); "feature_error", from each layer's effect on an image classifier's last
            feature, on at most 64 of the images (see `feature_error.py`).
        factors: "svd" (the paper); "whitened" or "asvd", which fit the data (see `calibration.py`).
        skip: layers to leave dense in addition to the defaults, see `find_layers`.
        multiple: ranks are rounded down to multiples of it, 8 for fast matrix products;
            "feature_error" takes 8 where 1 is given.

    Returns:
        The same model.

    Raises:
        ValueError: for an unknown choice, factors that need batches without any, or as `factorize`.
    """
    batches = None if batches is None else list(batches)
    moments = layer_moments(model, batches, factors, skip)
    if ranks == "feature_error":
        if not batches:
            raise ValueError("ranks 'feature_error' need batches: give some of the training data")
        if not all(isinstance(batch, Tensor) for batch in batches):
            raise ValueError(
                "ranks 'feature_error' are for image classifiers: their batches are tensors of "
                f"images, not {type(batches[0]).__name__}; choose uniform or energy"
            )
        step = multiple if multiple > 1 else 8
        images = torch.cat(batches)
        images = images[:: -(-len(images) // PROBES)]
        plan = plan_feature_error(model, images, ratio, skip, moments, step)
        return factorize(model, ranks=plan, moments=moments)
    (plan,) = _plans(model, [ratio], ranks, moments, skip, multiple).values()
    return factorize(model, ranks=plan, moments=moments)


def compress_each(
    model: nn.Module,
    ratios: Sequence[float],
    ranks: Ranks = "uniform",
    moments: Mapping[str, Tensor] | None = None,
) -> dict[float, nn.Module]:
    """Low-rank copies of a model at several ratios, at the cost of one decomposition.

    `factorize` orders the factors by decreasing singular value, so that the factors of rank r are
    the first r columns and rows of those of any higher rank.

    Args:
        model: a dense model; it stays unchanged.
        ratios: κ of each copy.
        ranks: "uniform" or "energy", as for `compress`.
        moments: from `layer_moments`; None for plain factors.

    Returns:
        The copies by ratio, each as `compress` would make it.

    Raises:
        ValueError: as `compress`.
    """
    plans = _plans(model, ratios, ranks, moments)
    highest = {name: max(plan[name] for plan in plans.values()) for name in plans[ratios[0]]}
    largest = factorize(copy.deepcopy(model), ranks=highest, moments=moments)
    return {ratio: truncate(copy.deepcopy(largest), plan) for ratio, plan in plans.items()}


def layer_moments(
    model: nn.Module, batches: Iterable[Any] | None, factors: Factors, skip: Sequence[str] = ()
) -> dict[str, Tensor] | None:
    """The `moments` of `factorize`, measured on inputs; None for plain factors.

    Args:
        model: a dense model.
        batches: as for `compress`.
        factors: as for `compress`.
        skip: as for `compress`.

    Returns:
        C (d_in, d_in) of every layer, by name.

    Raises:
        ValueError: for unknown factors, factors that need batches without any, or a layer that the
            batches do not reach.
    """
    if factors not in ("svd", "whitened", "asvd"):
        raise ValueError(f"unknown factors {factors!r}: expected 'svd', 'whitened' or 'asvd'")
    if factors == "svd":
        return None
    if batches is None:
        raise ValueError(
            f"factors {factors!r} need batches to see the layers' inputs: give some of the "
            "training data, or factors 'svd'"
        )
    with Calibration(model, skip, factors) as calibration:
        run(model, batches)
    return calibration.moments()


@torch.no_grad()
def truncate(model: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """Lower the ranks of a model's low-rank layers, in place.

    Right after `factorize` this drops the smallest singular values. After training, factors are no
    longer ordered: `merge` the model and factorise it again instead.

    Args:
        model: a low-rank model.
        ranks: by layer name, see `plan_of`; layers that are not named stay as they are.

    Returns:
        The same model.

    Raises:
        ValueError: before anything is changed, if a name is no low-rank layer, or a rank is not
            from 1 to that of the layer.
    """
    layers = low_rank_layers(model)
    for name, rank in ranks.items():
        if name not in layers:
            raise ValueError(f"{name!r} is no low-rank layer of {type(model).__name__}")
        current_rank = factors_of(name, layers[name])[0].out_features
        if not 1 <= rank <= current_rank:
            raise ValueError(f"rank {rank} for {name}: expected 1 to its rank {current_rank}")
    for name, rank in ranks.items():
        u, v = factors_of(name, layers[name])
        u.weight = nn.Parameter(u.weight[:rank].clone(), u.weight.requires_grad)
        v.weight = nn.Parameter(v.weight[:, :rank].clone(), v.weight.requires_grad)
        u.out_features = v.in_features = rank
    return model


def _plans(
    model: nn.Module,
    ratios: Sequence[float],
    ranks: Ranks,
    moments: Mapping[str, Tensor] | None,
    skip: Sequence[str] = (),
    multiple: int = 1,
) -> dict[float, dict[str, int]]:
    """The plan of each ratio."""
    if ranks == "uniform":
        return {ratio: plan_uniform(model, ratio, skip, multiple) for ratio in ratios}
    if ranks != "energy":
        raise ValueError(f"unknown ranks {ranks!r}: expected 'uniform' or 'energy'")
    shares = energy_shares(model, skip, moments)
    return {r: plan_energy(model, r, skip, moments, multiple, shares) for r in ratios}
