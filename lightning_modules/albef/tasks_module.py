"""Fine-tunes an ALBEF on visual entailment (SNLI-VE) and visual question answering (VQA)."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_modules.albef.answers import answer_loss, rank_answers
from lightning_modules.albef.base_module import AlbefModule
from lightning_modules.albef.losses import distilled_cross_entropy
from lightning_modules.albef.model import build
from lightning_modules.labels import IGNORED


class Entailment(AlbefModule):
    """SNLI-VE: a classifier on the fused class token (arXiv 2107.07651, Section 5.2).

    Evaluation logs `stage/accuracy`.

    Args:
        num_classes: number of classes.
        **kwargs: see `AlbefModule`.
    """

    task = "entailment"
    heads = ("cls_head",)

    def __init__(self, num_classes: int = 3, **kwargs: Any):
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=IGNORED)

    def dense(self) -> Any:
        """The dense model with `num_classes` outputs and random weights."""
        sizes = {**(self.settings.sizes or {}), "classes": self.settings.num_classes}
        return build(self.task, **sizes)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits (B, num_classes) for a batch of `EntailmentData`."""
        return self.model(batch["images"], batch["input_ids"], batch["attention_mask"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy on the labels and on the momentum model's prediction."""
        inputs = batch["images"], batch["input_ids"], batch["attention_mask"]
        self.momentum.update(self.model)
        with torch.no_grad():
            logits_m = self.momentum.model(*inputs)
        losses = distilled_cross_entropy(
            self(batch), batch["labels"], logits_m, self.alpha(batch_idx)
        )
        return self.total_loss({"entailment": losses.mean()})

    def score(self, batch: dict[str, Tensor]) -> None:
        """Add a batch to the accuracy."""
        self.accuracy.update(self(batch).float(), batch["labels"])

    def report(self, stage: str) -> None:
        """Log `stage/accuracy`."""
        self.log(f"{stage}/accuracy", self.accuracy.compute(), prog_bar=True)
        self.accuracy.reset()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The predicted class (B,), an index into datamodules' RELATIONS."""
        return self(batch).argmax(-1)


class VQA(AlbefModule):
    """VQA: a decoder that generates answers, evaluated by ranking a list of candidates.

    arXiv 2107.07651, Section 5.3. Evaluation logs `stage/accuracy`, the VQA challenge's measure.

    Args:
        k: number of candidates of each question that are scored completely.
        **kwargs: see `AlbefModule`.
    """

    task = "vqa"

    def __init__(self, k: int = 128, **kwargs: Any):
        super().__init__(**kwargs)
        self.accuracy = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy on all given answers, weighted by the share of people who gave each."""
        self.momentum.update(self.model)
        logits = self._decode(self.model, batch)
        with torch.no_grad():
            logits_m = self._decode(self.momentum.model, batch)
        loss = answer_loss(
            logits,
            logits_m,
            batch["answer_ids"],
            batch["answer_mask"],
            batch["answer_weight"],
            len(batch["images"]),
            self.alpha(batch_idx),
        )
        return self.total_loss({"answers": loss})

    def _decode(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        mask, row = batch["attention_mask"], batch["answer_row"]
        question = model.encode_question(batch["images"], batch["input_ids"], mask)
        return model.decode(batch["answer_ids"], batch["answer_mask"], question[row], mask[row])

    def rank(self, batch: dict[str, Tensor]) -> Tensor:
        """Log-likelihood of every candidate (B, C), for an evaluation batch of `VQAData`."""
        mask = batch["attention_mask"]
        question = self.model.encode_question(batch["images"], batch["input_ids"], mask)
        candidates = batch["candidate_ids"], batch["candidate_mask"]
        return rank_answers(self.model, question, mask, *candidates, self.settings.k)

    def score(self, batch: dict[str, Tensor]) -> None:
        """Add a batch to the accuracy."""
        chosen = self.rank(batch).argmax(1, keepdim=True)
        real = batch["labels"] >= 0  # not padding that gives all ranks equally many examples
        scores = batch["scores"].gather(1, chosen)[:, 0][real]
        if len(scores):
            self.accuracy.update(scores)

    def report(self, stage: str) -> None:
        """Log `stage/accuracy`."""
        self.log(f"{stage}/accuracy", self.accuracy.compute(), prog_bar=True)
        self.accuracy.reset()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The index of the best candidate, (B,)."""
        return self.rank(batch).argmax(1)
