"""Analyses of trained adapters and of VeRA's expressiveness: Fig. 3 and Appendices D and E.

VeRA (arXiv 2310.11454). Layers are named as in `vectors_of`: "name", or "name:label" for a slice of
a fused projection.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_modules.vera.vera import layers_of, vectors_of


@dataclass(frozen=True)
class VectorChange:
    """How far training moved the two vectors of a layer (Fig. 3).

    Attributes:
        d: ‖d‖ after training.
        b: ‖b‖ after training.
        d_moved: ‖d - d₀‖, with d₀ the initial value of d.
        b_moved: ‖b - b₀‖, with b₀ the initial value of b.
    """

    d: float
    b: float
    d_moved: float
    b_moved: float


def vector_changes(model: nn.Module) -> dict[str, VectorChange]:
    """The norms of every layer's d and b, and of their changes by training.

    Raises:
        ValueError: if the model has no VeRA layer.
    """
    starts = next(iter(layers_of(model).values())).starts
    return {
        key: VectorChange(
            d=d.norm().item(),
            b=b.norm().item(),
            d_moved=(d - starts[1]).norm().item(),
            b_moved=(b - starts[0]).norm().item(),
        )
        for key, (b, d) in vectors_of(model).items()
    }


@torch.no_grad()
def weight_changes(model: nn.Module) -> dict[str, Tensor]:
    """ΔW (m, n) of every layer that VeRA or peft's LoRA adapts, which a merge adds to the weight.

    Raises:
        ValueError: if the model has neither.
    """
    if hasattr(model, "vera"):
        return {
            f"{name}:{piece.label}" if piece.label else name: layer.delta(
                piece, layer.vectors(piece)[0].dtype
            )
            for name, layer in layers_of(model).items()
            for piece in layer.slices
        }
    changes = {
        name: layer.get_delta_weight("default")
        for name, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    if not changes:
        raise ValueError(
            f"{type(model).__name__} has no layers of VeRA or LoRA: give a model that add_vera or "
            "tune(model, 'lora') has changed"
        )
    return changes


def cosine_similarity(one: Tensor, other: Tensor) -> float:
    """⟨X, Y⟩ / (‖X‖ ‖Y‖) of two flattened matrices (Appendix D); 0 if one is zero."""
    norms = one.norm() * other.norm()
    return ((one * other).sum() / norms).item() if norms > 0 else 0.0


def stable_rank(matrix: Tensor) -> float:
    """‖X‖_F² / ‖X‖₂², the effective number of directions of a matrix; 0 if it is zero."""
    values = torch.linalg.svdvals(matrix)
    return (values.square().sum() / values[0].square()).item() if values[0] > 0 else 0.0


def fit_lora(targets: Tensor, rank: int) -> Tensor:
    """The smallest error with which B A of a rank can fit random matrices (Appendix E).

    By Eckart and Young (1936) it is the sum of the squared singular values beyond the rank.

    Args:
        targets: S matrices, (S, m, n).
        rank: r; B A has r·(m + n) parameters.

    Returns:
        Mean squared error over the entries, (S,).
    """
    discarded = torch.linalg.svdvals(targets)[:, rank:].square().sum(-1)
    return discarded / targets[0].numel()


def fit_vera(targets: Tensor, rank: int, generator: torch.Generator, steps: int = 300) -> Tensor:
    """The error with which Λ_b B Λ_d A of a rank fits random matrices (Appendix E).

    A and B are drawn for each target, Kaiming uniform. The product is linear in b and in d, so each
    in turn is set to its least-squares optimum. The error never grows, but the result may be a
    local minimum.

    Args:
        targets: S matrices, (S, m, n).
        rank: r; b and d have m + r parameters.
        generator: for A and B, and then for b's initial values.
        steps: number of times that both are solved for.

    Returns:
        Mean squared error over the entries, (S,).
    """
    count, outputs, inputs = targets.shape
    a, b_matrix = (
        (2 * torch.rand(count, *shape, generator=generator, dtype=targets.dtype) - 1)
        * math.sqrt(6 / shape[1])
        for shape in ((rank, inputs), (outputs, rank))
    )
    b = torch.randn(count, outputs, generator=generator, dtype=targets.dtype)
    # column k of `basis` is vec(B[:, k] A[k, :]), so that vec(Λ_b B Λ_d A) = (b ⊗ 1) ⊙ (basis d)
    basis = torch.einsum("smk,skn->smnk", b_matrix, a)
    flat = targets.flatten(1)
    fitted = torch.zeros_like(targets)
    for _ in range(steps):
        columns = (basis * b[:, :, None, None]).flatten(1, 2)
        d = torch.linalg.lstsq(columns, flat[..., None], driver="gelsy").solution
        unscaled = (basis @ d[:, None]).squeeze(-1)
        b = (targets * unscaled).sum(-1) / unscaled.square().sum(-1)
        fitted = b[..., None] * unscaled
    return (targets - fitted).square().mean((1, 2))
