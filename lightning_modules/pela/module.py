"""PELA's intermediate stage: repairs a low-rank image classifier against its dense original."""

import math
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.gradient_shares import log_gradient_shares
from lightning_modules.pela.classifier_module import Classifier
from lightning_modules.pela.features import Features
from lightning_modules.pela.losses import feature_distillation, weight_perturbation


class PELA(Classifier):
    """A low-rank image classifier that learns from labels and from its dense original.

        L = L_base + α · L_fd + β · L_rwp        (arXiv 2310.10700, Eq. 7)

    L_base is the cross-entropy, also on soft targets (mixup). With α or β above 0 the module adds
    the callback FrozenTeacher. At the steps that the trainer logs, `train/share_…` is each term's
    share of the gradient, ‖g_i‖ / Σ_j ‖g_j‖ with g_i the gradient of the weighted term i.

    Args:
        teacher_from: the teacher's weights; null where init_from or the hub gives dense ones. Not
            saved in checkpoints.
        teacher_args: the teacher's model_args, where they differ from the student's (for example
            after pruning).
        alpha: α, weight of L_fd.
        beta: β, weight of L_rwp.
        features: the outputs that L_fd compares: "blocks", "stages" or "pooled"; see `Features`.
        setting: form of L_fd and L_rwp, "paper" or "released"; see pela.losses.
        p: exponent of L_rwp's norm, at least 1 or .inf.
        epsilon: radius ε of L_rwp.
        **kwargs: see `Classifier`; ratio is κ.
    """

    def __init__(
        self,
        teacher_from: str | None = None,
        teacher_args: dict[str, Any] | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        features: Literal["blocks", "stages", "pooled"] = "blocks",
        setting: Literal["paper", "released"] = "released",
        p: float = math.inf,
        epsilon: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.teacher_from = teacher_from
        self.teacher: nn.Module | None = None

    def configure_callbacks(self) -> list[Callback]:
        """FrozenTeacher, if one of the losses needs a teacher."""
        from callbacks.frozen_teacher import FrozenTeacher

        return [FrozenTeacher()] if self.settings.alpha or self.settings.beta else []

    def build_teacher(self) -> nn.Module:
        """The teacher for the callback FrozenTeacher: the dense original, see `dense_original`."""
        return self.dense_original(self.teacher_from, self.settings.teacher_args)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Eq. 7, with one pass of the student."""
        h, (images, targets) = self.settings, batch
        terms: dict[str, tuple[float, Tensor]] = {}  # name → weight, loss
        if h.alpha:
            with (
                Features(self.model, h.features) as student,
                Features(required(self.teacher), h.features) as teacher,
            ):
                logits = self(images)
                with torch.no_grad():
                    required(self.teacher)(images)
                distance = feature_distillation(student.take(), teacher.take(), None, h.setting)
            terms["distillation"] = (h.alpha, distance)
        else:
            logits = self(images)
        terms["base"] = (1.0, F.cross_entropy(logits.float(), targets))
        if h.beta:
            distance = weight_perturbation(
                self.model, required(self.teacher), h.p, h.epsilon, h.setting
            )
            terms["perturbation"] = (h.beta, distance)
        weighted = {name: weight * value for name, (weight, value) in terms.items()}
        loss = torch.stack(list(weighted.values())).sum()
        self.log_dict({f"train/{name}": value.detach() for name, (_, value) in terms.items()})
        self.log("train/loss", loss, prog_bar=True)
        log_gradient_shares(self, weighted)
        return loss


def required(teacher: nn.Module | None) -> nn.Module:
    """The teacher, if there is one.

    Raises:
        ValueError: otherwise.
    """
    if teacher is None:
        raise ValueError(
            "there is no teacher: callbacks.frozen_teacher.FrozenTeacher builds it when training "
            "starts"
        )
    return teacher
