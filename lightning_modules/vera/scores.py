"""The losses and metrics of fine-tuning."""

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
    """The mean loss, computed in float32.

    Args:
        logits: (n, C) for cross-entropy, or predicted scores (n,) for the squared error.
        targets: classes (n,) or soft targets (n, C); scores (n,) for the squared error.
        label_smoothing: of the cross-entropy.
    """
    if logits.ndim == 1:
        return F.mse_loss(logits.float(), targets.float())
    return F.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)


def classification_scores(num_classes: int) -> MetricCollection:
    """Metrics over a full set and all processes.

    Args:
        num_classes: 1 for Pearson's and Spearman's correlation. More for accuracy, F1 (of class 1
            for two classes, otherwise the mean over classes), Matthews' correlation and the number
            of classes that were predicted at least once.
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
    """Matthews' correlation; 0 if all predictions or all labels are of one class.

    This is the definition of scikit-learn and GLUE. With two classes torchmetrics would return
    another number in this case, which depends on their frequencies.
    """

    def compute(self) -> Tensor:
        """A scalar in [-1, 1]."""
        one_class = any((self.confmat.sum(side) > 0).sum() < 2 for side in (0, 1))
        return torch.zeros((), device=self.confmat.device) if one_class else super().compute()


class ClassesPredicted(Metric):
    """The number of classes predicted at least once; 1 means that the model has collapsed.

    Args:
        num_classes: C.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_classes: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(num_classes, dtype=torch.int64), "sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Count the predicted classes (n,); the targets are ignored."""
        self.counts += predictions.bincount(minlength=len(self.counts))

    def compute(self) -> Tensor:
        """A whole number from 0 to C."""
        return (self.counts > 0).sum()
