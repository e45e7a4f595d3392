"""The losses and the scores of fine-tuning."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassMatthewsCorrCoef,
)
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef


def loss_of(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of (n, C) with classes (n,), or squared error of scores (n,), in fp32."""
    if logits.ndim == 1:
        return F.mse_loss(logits.float(), targets.float())
    return F.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)


def classification_scores(num_classes: int) -> MetricCollection:
    """Scores over a whole set and all ranks.

    Args:
        num_classes: more than 1 gives accuracy, F1 (of class 1 of two; of more, the mean over
            classes), Matthews' correlation and the number of classes that were predicted at all;
            1 gives Pearson's and Spearman's correlation.
    """
    scores: dict[str, Metric | MetricCollection]
    if num_classes == 1:
        scores = {"pearson": PearsonCorrCoef(), "spearman": SpearmanCorrCoef()}
    else:
        scores = {
            "accuracy": MulticlassAccuracy(num_classes, average="micro"),
            "f1": BinaryF1Score() if num_classes == 2 else MulticlassF1Score(num_classes),
            "matthews": Matthews(num_classes),
            "classes_predicted": ClassesPredicted(num_classes),
        }
    return MetricCollection(scores)


class Matthews(MulticlassMatthewsCorrCoef):
    """0 where all predictions or all labels are of one class, as scikit-learn and GLUE have it.

    torchmetrics gives two classes another number there, which depends on how many each has.
    """

    def compute(self) -> Tensor:
        """A scalar in [-1, 1]."""
        one_class = any((self.confmat.sum(side) > 0).sum() < 2 for side in (0, 1))
        return torch.zeros((), device=self.confmat.device) if one_class else super().compute()


class ClassesPredicted(Metric):
    """How many classes were predicted at least once; 1 means that the model has collapsed.

    Args:
        num_classes: C.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_classes: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(num_classes, dtype=torch.int64), "sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Count the predicted classes (n,); the targets do not matter."""
        self.counts += predictions.bincount(minlength=len(self.counts))

    def compute(self) -> Tensor:
        """A whole number from 0 to C."""
        return (self.counts > 0).sum()
