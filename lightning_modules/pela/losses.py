"""The two losses that repair a low-rank model against its dense original.

PELA (arXiv 2310.10700), Eqs 4–7: L = L_base + α · L_fd + β · L_rwp. Where the paper and the
released code differ, `setting` chooses between "paper" and "released".
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_modules.modes import precise
from lightning_modules.pela.layers import (
    Linear,
    dense_weight,
    factors_of,
    low_rank_layers,
)
from lightning_modules.weights import gathered

Setting = Literal["paper", "released"]
Pair = tuple[nn.Linear, nn.Linear, Tensor]  # u, v and the original weight W (d_out, d_in)


def feature_distillation(
    student_features: Sequence[Tensor],
    teacher_features: Sequence[Tensor],
    masks: Sequence[Tensor | None] | None = None,
    setting: Setting = "paper",
) -> Tensor:
    """Eq. 4: the distance between student's and teacher's layer outputs.

        paper:     L_fd = 1/(2N) · Σ_i ‖S_i − T_i‖²    norm over an input's tokens and channels,
                                                        then mean over the batch
        released:  L_fd = 1/N · Σ_i mean((S_i − T_i)²)  mean over batch, tokens and channels

    The paper's mapping M of the features is the identity here. Computed in float32 even under
    autocast (float64 features in float64); only the student gets gradients.

    Args:
        student_features: N tensors (B, …): a block's (B, tokens, D) or a pooled feature's (B, D).
        teacher_features: N tensors of the same shapes.
        masks: for each feature the tokens that count, (B, tokens), true or 1 where there is no
            padding (transformers' attention_mask); None for all tokens. Padding is left out of
            both the sum and the divisor of the mean.
        setting: "paper" or "released".

    Returns:
        A scalar.

    Raises:
        ValueError: for an unknown setting, or if the features or masks differ in number or shape,
            or there are none.
    """
    _check_setting(setting)
    shapes = [[tuple(f.shape) for f in side] for side in (student_features, teacher_features)]
    if not shapes[0] or len(shapes[0]) != len(shapes[1]):
        raise ValueError(
            f"the student gives {len(shapes[0])} features and the teacher {len(shapes[1])}: "
            "expected the same number, at least one; take them from matching layers"
        )
    for i, (of_student, of_teacher) in enumerate(zip(*shapes, strict=True)):
        if of_student != of_teacher:
            raise ValueError(
                f"feature {i} is {of_student} in the student and {of_teacher} in the teacher: "
                "expected the same shape; take them from matching layers and the same inputs"
            )
    if masks is None:
        masks = [None] * len(shapes[0])
    elif len(masks) != len(shapes[0]):
        raise ValueError(f"{len(masks)} masks for {len(shapes[0])} features: expected one for each")
    terms = []
    with torch.autocast(student_features[0].device.type, enabled=False):
        triples = zip(student_features, teacher_features, masks, strict=True)
        for i, (student, teacher, mask) in enumerate(triples):
            squares = (precise(student) - precise(teacher.detach())).square()
            count: Any = squares.numel()
            if mask is not None:
                if mask.shape != squares.shape[:2] or squares.ndim != 3:
                    raise ValueError(
                        f"mask {i} is {tuple(mask.shape)} for a feature {tuple(squares.shape)}: "
                        "expected (batch, tokens)"
                    )
                squares = squares.masked_fill(~mask.bool()[..., None], 0)
                count = mask.bool().sum().clamp(min=1) * squares.shape[-1]
            total = squares.sum()
            terms.append(total / (2 * len(squares)) if setting == "paper" else total / count)
        return torch.stack(terms).mean()


def weight_perturbation(
    student: nn.Module | Iterable[Pair],
    teacher: nn.Module | None = None,
    p: float = math.inf,
    epsilon: float = 0.0,
    setting: Setting = "paper",
) -> Tensor:
    """Eqs 5–6: how far the products V·U have moved from the original weights W.

        paper:     L_rwp = Σ_k (‖V_k·U_k − W_k‖_p − ε)
        released:  L_rwp = mean_k (‖V_k·U_k − W_k‖_p − ε)²

    with the norm over the matrix's entries; the released code has p = ∞, the largest absolute
    difference. In the paper's form ε shifts the loss but not its gradient; in the released form the
    distance is pulled towards ε from either side.

    Computed in float32 even under autocast (float64 weights in float64). Each difference is
    recomputed in the backward pass, so that only one of them is in memory. Only the student gets
    gradients.

    Args:
        student: a low-rank model, or its pairs from `weight_pairs`.
        teacher: the dense model that the student was made from; None when `student` is pairs.
        p: the norm's exponent, at least 1, or math.inf.
        epsilon: radius ε, at least 0 (released: 0 for Swin, 1e-3 for ALBEF).
        setting: "paper" or "released".

    Returns:
        A scalar.

    Raises:
        ValueError: for an unknown setting, p below 1, ε below 0, no teacher or pairs, or a teacher
            whose layers do not match the student's.
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
    excess = torch.stack([_distance(u.weight, v.weight, w, p) for u, v, w in pairs]) - epsilon
    return excess.sum() if setting == "paper" else excess.square().mean()


def weight_pairs(student: nn.Module, teacher: nn.Module) -> list[Pair]:
    """u and v of every trainable low-rank layer, with the teacher's weight of the same name.

    Layers that do not train, such as the momentum copies of ALBEF, are left out.

    Raises:
        ValueError: if the student has no low-rank layer that trains, one carries an adapter, or
            the teacher lacks one of its layers.
    """
    layers = {
        name: layer
        for name, layer in low_rank_layers(student).items()
        if any(parameter.requires_grad for parameter in layer.parameters())
    }
    if not layers:
        raise ValueError(
            f"the student {type(student).__name__} has no low-rank layer that trains: call "
            "factorize first, and leave its weights trainable"
        )
    modules = dict(teacher.named_modules())
    pairs = []
    for name, layer in layers.items():
        (u, v), original = factors_of(name, layer), modules.get(name)
        if not isinstance(original, Linear):
            raise ValueError(
                f"the teacher {type(teacher).__name__} has no dense layer {name}: give the model "
                "that the student was factorised from"
            )
        weight = dense_weight(original).detach()
        size = (u.in_features, v.out_features)
        if tuple(weight.shape) != size[::-1]:
            raise ValueError(
                f"{name} is {size[0]} → {size[1]} in the student and {weight.shape[1]} → "
                f"{weight.shape[0]} in the teacher: give the model that the student was "
                "factorised from"
            )
        pairs.append((u, v, weight))
    return pairs


def _distance(u: Tensor, v: Tensor, weight: Tensor, p: float) -> Tensor:
    def norm(u: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            product = precise(gathered(v)) @ precise(gathered(u))
            return torch.linalg.vector_norm(product - precise(gathered(weight)), p)

    distance = checkpoint(norm, u, v, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(distance, Tensor)
    return distance


def _check_setting(setting: str) -> None:
    if setting not in ("paper", "released"):
        raise ValueError(f"unknown setting {setting!r}: expected 'paper' or 'released'")
