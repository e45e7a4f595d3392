"""Any model to low rank in one call: which ranks, and which factors."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from lightning_modules.pela.calibration import Calibration, Kind, run
from lightning_modules.pela.energy import plan_energy
from lightning_modules.pela.factorize import factorize, plan_uniform

Ranks = Literal["uniform", "energy"]
Factors = Literal["svd", "whitened", "asvd"]


def compress(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    ratio: float = 2.0,
    ranks: Ranks = "uniform",
    factors: Factors = "svd",
    skip: Sequence[str] = (),
    multiple: int = 1,
) -> nn.Module:
    """Replace every fully connected layer of a model by two of low rank, in place.

    Args:
        model: a dense model of timm, transformers or any other.
        batches: some inputs for "whitened" and "asvd": an iterable of what the model takes, a
            tensor, a tuple of arguments, or a dictionary of keyword arguments.
        ratio: κ; 2 halves the layers' parameters and multiply-adds.
        ranks: "uniform", κ for every layer (the paper); "energy", from the singular values under
            the same budget (see `energy.py`), with "whitened" and "asvd" from those of W · L.
        factors: "svd" (the paper); "whitened" or "asvd", which fit the data (see `calibration.py`).
        skip: layers to leave alone beside the defaults, see `find_layers`.
        multiple: ranks are rounded down to multiples of it; 8 suits processors.

    Returns:
        The same model.

    Raises:
        ValueError: for an unknown choice, factors that need batches without any, or as `factorize`.
    """
    if ranks not in ("uniform", "energy"):
        raise ValueError(f"unknown ranks {ranks!r}: expected 'uniform' or 'energy'")
    if factors not in ("svd", "whitened", "asvd"):
        raise ValueError(f"unknown factors {factors!r}: expected 'svd', 'whitened' or 'asvd'")
    moments = None if factors == "svd" else _moments(model, batches, skip, factors)
    if ranks == "energy":
        plan = plan_energy(model, ratio, skip, moments, multiple)
    else:
        plan = plan_uniform(model, ratio, skip, multiple)
    return factorize(model, ranks=plan, moments=moments)


def _moments(
    model: nn.Module, batches: Iterable[Any] | None, skip: Sequence[str], kind: Kind
) -> dict[str, Tensor]:
    if batches is None:
        raise ValueError(
            f"factors {kind!r} need batches to see the layers' inputs: give some of the training "
            "data, or factors 'svd'"
        )
    with Calibration(model, skip, kind) as calibration:
        run(model, batches)
    return calibration.moments()
