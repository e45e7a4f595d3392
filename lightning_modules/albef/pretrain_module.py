"""Pre-trains an ALBEF, and repairs a low-rank one against its dense original (PELA)."""

import math
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from lightning_modules.albef.alignment import Alignment, Pairs, masked_token_loss, replay
from lightning_modules.albef.checkpoint import load_albef
from lightning_modules.albef.distillation import (
    score_names,
    state_masks,
    state_names,
    tinybert,
)
from lightning_modules.albef.model import PretrainModel
from lightning_modules.albef.retrieval_module import Retrieval
from lightning_modules.gradient_shares import log_gradient_shares
from lightning_modules.labels import IGNORED
from lightning_modules.pela import (
    Features,
    feature_distillation,
    low_rank_layers,
    weight_perturbation,
)
from lightning_modules.pela.baselines import visible_alignment
from lightning_modules.self_distillation.masked_text import mask_tokens


class Pretraining(Retrieval):
    """ALBEF's pre-training: L_itc + L_itm + L_mlm (arXiv 2107.07651, Section 3.2).

    Evaluation is retrieval on held-out pairs, as in `Retrieval`. Special tokens of the DataModule's
    tokenizer are never masked.

    Args:
        mask_probability: probability that a token is masked.
        **kwargs: see `Retrieval`.
    """

    task = "pretrain"

    def __init__(self, mask_probability: float = 0.15, **kwargs: Any):
        super().__init__(**kwargs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """L_itc + L_itm + L_mlm."""
        losses, *_ = self.pretrain(batch, batch_idx)
        return self.total_loss(losses)

    def pretrain(
        self, batch: dict[str, Tensor], batch_idx: int
    ) -> tuple[dict[str, Tensor], Pairs, Alignment, Tensor, Tensor, Tensor]:
        """A step's losses and intermediate results.

        Returns:
            The losses by name; the pairs; their alignment; the masked texts (B, L), their labels
            (B, L) and fused states (B, L, D).
        """
        aligned, losses, pairs = self.align(batch, batch_idx)
        tokenizer = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        masked_ids, labels = mask_tokens(
            pairs.ids,
            pairs.mask,
            tokenizer.mask_token_id,
            tokenizer.all_special_ids,
            len(tokenizer),
            self.settings.mask_probability,
        )
        states = self.model.masked_states(masked_ids, pairs.mask, aligned.image)
        with torch.no_grad():
            states_m = self.momentum.model.masked_states(masked_ids, pairs.mask, aligned.image_m)
        losses["mlm"] = masked_token_loss(
            self.model, self.momentum, states, states_m, labels, self.alpha(batch_idx)
        )
        return losses, pairs, aligned, masked_ids, labels, states


class Repair(Pretraining):
    """PELA's intermediate stage for an ALBEF: L = L_base + α · L_fd + β · L_rwp.

    arXiv 2310.10700, Eq. 7, with ALBEF's pre-training losses as L_base. The teacher, from the
    callback FrozenTeacher, gets the student's images, texts, negatives and masked tokens. L_fd
    compares the states of the image, text and fusion layers in all their runs, padding left out.
    L_rwp compares the online weights. Neither of the two uses the momentum model, which has the
    student's ranks. At the steps that the trainer logs, `train/share_…` is each term's share of the
    gradient.

    Args:
        teacher_from: the dense original's weights; null where init_from gives them. Not saved in
            checkpoints.
        fd_weight: α, weight of the distillation.
        rwp_weight: β, weight of L_rwp.
        distillation: the loss with weight α: "pela", L_fd (Eq. 4), or a baseline: "tinybert", or
            "maskalign", which compares the image encoders alone.
        setting: form of L_fd and L_rwp, "paper" or "released"; see pela.losses.
        p: exponent of L_rwp's norm, at least 1 or .inf.
        epsilon: radius ε of L_rwp.
        **kwargs: see `Pretraining`.
    """

    all_patches = "the repair compares all patches with the teacher's"

    def __init__(
        self,
        teacher_from: str | None = None,
        fd_weight: float = 0.1,
        rwp_weight: float = 1.0,
        distillation: Literal["pela", "tinybert", "maskalign"] = "pela",
        setting: Literal["paper", "released"] = "released",
        p: float = math.inf,
        epsilon: float = 1e-3,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.teacher_from = teacher_from
        self.teacher: PretrainModel | None = None

    def configure_callbacks(self) -> list[L.Callback]:
        """FrozenTeacher, if one of the losses needs a teacher."""
        from callbacks.frozen_teacher import FrozenTeacher

        h = self.settings
        return [FrozenTeacher()] if h.fd_weight or h.rwp_weight else []

    def build_teacher(self) -> PretrainModel:
        """The teacher for the callback FrozenTeacher: the dense original.

        Raises:
            ValueError: if no weights are given, a tensor is missing or of another shape, or the
                weights are low-rank, such as the student's own.
        """
        source = self.teacher_from or self.init_from
        if source is None:
            raise ValueError(
                "the teacher has no weights: give model.teacher_from or model.init_from, the "
                "checkpoint of a dense ALBEF"
            )
        teacher = self.dense()
        report = load_albef(teacher, source)
        low_rank = low_rank_layers(teacher)
        if low_rank or report.missing or report.reshaped:
            reason = f"{next(iter(low_rank))} is low-rank" if low_rank else report
            raise ValueError(
                f"{source} is not the dense original ({reason}): give its checkpoint as "
                "model.teacher_from"
            )
        assert isinstance(teacher, PretrainModel)
        return teacher

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Eq. 7, with one pass of the student and one of the teacher."""
        h = self.settings
        repair_losses: dict[str, Tensor] = {}
        if h.fd_weight:
            losses, distance = self._distil(batch, batch_idx)
            repair_losses["distillation"] = h.fd_weight * distance
        else:
            losses, *_ = self.pretrain(batch, batch_idx)
        if h.rwp_weight:
            distance = weight_perturbation(self.model, self.teacher, h.p, h.epsilon, h.setting)
            repair_losses["perturbation"] = h.rwp_weight * distance
        base = torch.stack(list(losses.values())).sum()
        log_gradient_shares(self, {"base": base, **repair_losses})
        return self.total_loss({**losses, **repair_losses})

    def _distil(self, batch: dict[str, Tensor], batch_idx: int) -> tuple[dict[str, Tensor], Tensor]:
        """The pre-training losses L_base, and the distillation loss without its weight α."""
        h, student, teacher = self.settings, self.model, self.teacher
        assert teacher is not None
        if h.distillation == "maskalign":
            losses, pairs, *_ = self.pretrain(batch, batch_idx)
            encoders = student.visual_encoder, teacher.visual_encoder
            encode = student.encode_image, teacher.encode_image
            return losses, visible_alignment(*encoders, pairs.images, *encode)
        with_scores = h.distillation == "tinybert"
        names = state_names(student) + (score_names(student) if with_scores else [])
        with Features(student, names) as of_student, Features(teacher, names) as of_teacher:
            losses, pairs, aligned, masked_ids, labels, states = self.pretrain(batch, batch_idx)
            with torch.no_grad():
                fused_t, states_t = replay(teacher, pairs, aligned, masked_ids)
            features = of_student.take(), of_teacher.take()
        negatives = aligned.text_negatives
        own_index = torch.arange(len(negatives), device=negatives.device)
        negatives = torch.where(negatives == IGNORED, own_index, negatives)
        masks = state_masks(student, pairs.mask, negatives)
        if not with_scores:
            return losses, feature_distillation(*features, masks, h.setting)
        chosen = labels != IGNORED
        with torch.no_grad():
            targets = teacher.match(fused_t), teacher.predict_tokens(states_t[chosen])
        fused = features[0][len(masks) - 2]  # the last layer's run on the pairs and their negatives
        logits = student.match(fused), student.predict_tokens(states[chosen])
        return losses, tinybert(student, features, masks, list(zip(logits, targets, strict=True)))
