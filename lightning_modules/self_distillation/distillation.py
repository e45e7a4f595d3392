"""Distillation losses: on hidden states, or for ablations on predictions or weights.

Self-distillation (arXiv 2210.02871), Algorithm 1 and Table 3. All are computed in float32 even
under autocast (float64 inputs in float64), and only the student gets gradients.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_modules.modes import precise
from lightning_modules.self_distillation.mars import constrained, largest_row
from lightning_modules.weights import mismatch

Match = Literal["cls", "all", "mean"]
Reduction = Literal["sum", "mean"]


def distillation(
    student: Tensor,
    teacher: Tensor,
    match: Match = "cls",
    reduction: Reduction = "sum",
    attention_mask: Tensor | None = None,
) -> Tensor:
    """L_Distill = mean over examples of ‖f_θ(x) − StopGrad f_θ0(x)‖², on the unmasked x.

    Args:
        student: the student's final hidden states (B, T, D), [CLS] first, then patches or tokens.
        teacher: the teacher's, of the same shape.
        match: "cls", the first token that is no padding, as in the released code; "all", every
            token; "mean", the average of the tokens. "all" and "mean" include [CLS] and leave
            padding out.
        reduction: of an example's squared differences (the released code has "sum"); the result is
            averaged over examples.
        attention_mask: (B, T), 0 on padding; None without padding.

    Returns:
        A scalar.

    Raises:
        ValueError: for an unknown match or reduction, or shapes that differ.
    """
    if match not in ("cls", "all", "mean"):
        raise ValueError(f"unknown match {match!r}: expected 'cls', 'all' or 'mean'")
    _check(student, teacher, reduction)
    with torch.autocast(student.device.type, enabled=False):
        difference = precise(student) - precise(teacher.detach())
        tokens = torch.ones(difference.shape[:2], device=student.device, dtype=torch.bool)
        if attention_mask is not None:
            tokens = attention_mask.bool()
        if match == "cls":
            tokens = tokens & (tokens.cumsum(1) == 1)
        difference = difference.masked_fill(~tokens[..., None], 0)
        counts = tokens.sum(1)
        if match == "mean":
            difference = difference.sum(1, keepdim=True) / counts[:, None, None]
            counts = torch.ones_like(counts)
        squares = difference.square().sum((1, 2))
        return (squares if reduction == "sum" else squares / (counts * student.shape[-1])).mean()


def prediction_matching(student: Tensor, teacher: Tensor, reduction: Reduction = "sum") -> Tensor:
    """Table 3, images: mean over examples of ‖g∘f(x̂) − g_0∘f_0(x̂)‖², over every patch.

    Args:
        student: the student's predicted pixels (B, N, P) of masked images.
        teacher: the teacher's, for the same mask.
        reduction: of an example's squared differences.

    Returns:
        A scalar.

    Raises:
        ValueError: for an unknown reduction, or shapes that differ.
    """
    _check(student, teacher, reduction)
    with torch.autocast(student.device.type, enabled=False):
        squares = (precise(student) - precise(teacher.detach())).square().flatten(1)
        return (squares.sum(1) if reduction == "sum" else squares.mean(1)).mean()


def token_prediction_matching(
    student: Tensor,
    teacher: Tensor,
    attention_mask: Tensor | None = None,
    reduction: Reduction = "sum",
) -> Tensor:
    """Table 3, text: mean over examples of Σ_{t=1}^{T} KL(p_θ0(x_t | x̂) ‖ p_θ(x_t | x̂)), in nats.

    The sum is over all positions of a text, hidden or not.

    Args:
        student: the student's logits (B, L, V) for masked texts.
        teacher: the teacher's, for the same mask.
        attention_mask: (B, L), 0 on padding, which is left out; None without padding.
        reduction: "mean" also divides by the number of an example's positions.

    Returns:
        A scalar.

    Raises:
        ValueError: for an unknown reduction, or shapes that differ.
    """
    _check(student, teacher, reduction)
    with torch.autocast(student.device.type, enabled=False):
        log_q = precise(student).log_softmax(-1)
        log_p = precise(teacher.detach()).log_softmax(-1)
        divergences = (log_p.exp() * (log_p - log_q)).sum(-1)
        counts = torch.full_like(divergences[:, 0], divergences.shape[1])
        if attention_mask is not None:
            divergences = divergences.masked_fill(attention_mask == 0, 0)
            counts = attention_mask.sum(1)
        sums = divergences.sum(1)
        return (sums if reduction == "sum" else sums / counts).mean()


def weight_matching(
    student: nn.Module, teacher: nn.Module, norm: Literal["l2", "mars"] = "l2"
) -> Tensor:
    """Table 3: how far the student's weights are from the teacher's, as a penalty.

        l2:    Σ over parameters of ‖θ − θ_0‖²
        mars:  Σ over linear and convolutional layers of max_j Σ_i |W_ji − U_ji|

    Args:
        student: the student's encoder.
        teacher: the teacher's encoder, of the same architecture.
        norm: "l2" or "mars".

    Returns:
        A scalar.

    Raises:
        ValueError: for another norm, or parameters that differ in name or shape.
    """
    if norm not in ("l2", "mars"):
        raise ValueError(f"unknown norm {norm!r} of the weights: expected 'l2' or 'mars'")
    student_weights = dict(student.named_parameters())
    teacher_weights = dict(teacher.named_parameters())
    if differing := mismatch(student_weights, teacher_weights):
        name, in_student, in_teacher = differing
        raise ValueError(
            f"{name} is {in_student} in the student and {in_teacher} in the teacher: expected the "
            "same parameters; give two encoders of one architecture"
        )
    device = next(iter(student_weights.values())).device.type
    with torch.autocast(device, enabled=False):
        if norm == "mars":
            layers = constrained(student)
            changes = [
                largest_row(
                    precise(student_weights[name]) - precise(teacher_weights[name].detach()), dims
                )
                for name, dims in layers.items()
            ]
        else:
            changes = [
                (precise(student_weights[name]) - precise(teacher_weights[name].detach()))
                .square()
                .sum()
                for name in student_weights
            ]
        return torch.stack(changes).sum()


def _check(student: Tensor, teacher: Tensor, reduction: str) -> None:
    if reduction not in ("sum", "mean"):
        raise ValueError(f"unknown reduction {reduction!r}: expected 'sum' or 'mean'")
    if student.shape != teacher.shape:
        raise ValueError(
            f"the student gives {tuple(student.shape)} and the teacher {tuple(teacher.shape)}: "
            "expected the same shape; give both the same inputs"
        )
