"""The two losses that repair a low-rank model against its dense original.

PELA (arXiv 2310.10700), Eqs 4–7: L = L_base + α · L_fd + β · L_rwp. Where the paper and the
released code differ, setting="paper" or "released" chooses.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_modules.pela.factorize import LowRankLinear, low_rank_layers

Setting = Literal["paper", "released"]


def feature_distillation(
    student_features: Sequence[Tensor],
    teacher_features: Sequence[Tensor],
    setting: Setting = "paper",
) -> Tensor:
    """Eq. 4: the distance between student's and teacher's layer outputs.

        paper:     L_fd = 1/(2N) · Σ_i ‖S_i − T_i‖²    the norm over one input's tokens and
                                                        channels, the mean over the batch
        released:  L_fd = 1/N · Σ_i mean((S_i − T_i)²)  the mean over everything

    The paper's M is the identity. Computed in float32 also under autocast (float64 for float64);
    gradients reach the student only.

    Args:
        student_features: N tensors (B, …), of blocks (B, tokens, D) or a pooled (B, D).
        teacher_features: N tensors of the same shapes.
        setting: "paper" or "released".

    Returns:
        A scalar.

    Raises:
        ValueError: if the features differ in number or shape, or there are none.
    """
    _check_setting(setting)
    shapes = [[tuple(f.shape) for f in side] for side in (student_features, teacher_features)]
    if not shapes[0] or len(shapes[0]) != len(shapes[1]):
        raise ValueError(
            f"the student gives {len(shapes[0])} features and the teacher {len(shapes[1])}: "
            "expected the same number, at least one; take them from matching layers"
        )
    for i, (own, other) in enumerate(zip(*shapes, strict=True)):
        if own != other:
            raise ValueError(
                f"feature {i} is {own} in the student and {other} in the teacher: expected the "
                "same shape; take them from matching layers and the same inputs"
            )
    terms = []
    with torch.autocast(student_features[0].device.type, enabled=False):
        for student, teacher in zip(student_features, teacher_features, strict=True):
            squares = (_precise(student) - _precise(teacher.detach())).square()
            terms.append(
                squares.sum() / (2 * len(squares)) if setting == "paper" else squares.mean()
            )
        return torch.stack(terms).mean()


def weight_perturbation(
    student: nn.Module | Iterable[tuple[LowRankLinear, Tensor]],
    teacher: nn.Module | None = None,
    p: float = math.inf,
    epsilon: float = 0.0,
    setting: Setting = "paper",
) -> Tensor:
    """Eqs 5–6: how far the products V·U have moved from the original weights W.

        paper:     L_rwp = Σ_k (‖V_k·U_k − W_k‖_p − ε)
        released:  L_rwp = mean_k (‖V_k·U_k − W_k‖_p − ε)²

    with the norm over the matrix's entries; the released code's is p = ∞, the largest absolute
    difference. In the paper's form ε shifts the loss and not its gradient; in the released form it
    is the distance that is aimed at, from below too.

    Computed in float32 also under autocast (float64 for float64). One layer's difference exists at
    a time: each is computed again in the backward pass. Gradients reach the student only.

    Args:
        student: a low-rank model, or its pairs from `weight_pairs`.
        teacher: the dense model that it came from; None when student is pairs.
        p: the norm's exponent, at least 1, or math.inf.
        epsilon: radius ε, at least 0 (released: 0 for Swin, 1e-3 for ALBEF).
        setting: "paper" or "released".

    Returns:
        A scalar.

    Raises:
        ValueError: for an unknown setting, p below 1, ε below 0, or a teacher whose layers do not
            match the student's.
    """
    _check_setting(setting)
    if not p >= 1:
        raise ValueError(f"p is {p}: expected the exponent of a norm, at least 1 or math.inf")
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}: expected a radius, at least 0")
    if isinstance(student, nn.Module):
        if teacher is None:
            raise ValueError("weight_perturbation needs the teacher: the dense original model")
        pairs = weight_pairs(student, teacher)
    else:
        pairs = list(student)
    if not pairs:
        raise ValueError("no pairs of layer and weight: take them from weight_pairs")
    excess = torch.stack([_distance(layer, weight, p) for layer, weight in pairs]) - epsilon
    return excess.sum() if setting == "paper" else excess.square().mean()


def weight_pairs(student: nn.Module, teacher: nn.Module) -> list[tuple[LowRankLinear, Tensor]]:
    """Every low-rank layer of the student with the teacher's weight of the same name.

    Raises:
        ValueError: if the student has no low-rank layer, or the teacher lacks one of its layers.
    """
    layers = low_rank_layers(student)
    if not layers:
        raise ValueError(
            f"the student {type(student).__name__} has no low-rank layer: call factorize first"
        )
    dense = dict(teacher.named_modules())
    pairs = []
    for name, layer in layers.items():
        original = dense.get(name)
        size = (layer.in_features, layer.out_features)
        if not isinstance(original, nn.Linear):
            raise ValueError(
                f"the teacher {type(teacher).__name__} has no dense layer {name}: give the model "
                "that the student was factorised from"
            )
        if (original.in_features, original.out_features) != size:
            raise ValueError(
                f"{name} is {size[0]} → {size[1]} in the student and {original.in_features} → "
                f"{original.out_features} in the teacher: give the model that the student was "
                "factorised from"
            )
        pairs.append((layer, original.weight.detach()))
    return pairs


def _distance(layer: LowRankLinear, weight: Tensor, p: float) -> Tensor:
    u, v = layer.u.weight, layer.v.weight

    def norm(u: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            product = _precise(_whole(v)) @ _precise(_whole(u))
            return torch.linalg.vector_norm(product - _precise(_whole(weight.detach())), p)

    distance = checkpoint(norm, u, v, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(distance, Tensor)
    return distance


def _whole(tensor: Tensor) -> Tensor:
    """A sharded parameter (FSDP2), gathered."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check_setting(setting: str) -> None:
    if setting not in ("paper", "released"):
        raise ValueError(f"unknown setting {setting!r}: expected 'paper' or 'released'")
