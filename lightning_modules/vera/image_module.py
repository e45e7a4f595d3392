"""Fine-tuning of image classifiers (VeRA, Section 4.4)."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_modules.backbones import build_vision, classifier_names
from lightning_modules.labels import IGNORED
from lightning_modules.vera.module import FineTuning
from lightning_modules.vera.scores import classification_scores


class ImageTuning(FineTuning):
    """An image classifier of timm.

    Args:
        num_classes: outputs of the head.
        architecture: timm name.
        **kwargs: see `FineTuning`.
    """

    def __init__(
        self,
        num_classes: int,
        architecture: str = "vit_base_patch16_224.augreg_in21k",
        **kwargs: Any,
    ):
        super().__init__(architecture=architecture, **kwargs)

    def build(self) -> nn.Module:
        """The timm model."""
        h: Any = self.hparams
        return build_vision(h.architecture, h.num_classes, h.model_args or {}, self.pretrained)

    def default_heads(self, model: nn.Module) -> list[str]:
        """The classifier, or both of a distilled model."""
        return classifier_names(model)

    def build_scores(self) -> MetricCollection:
        """Accuracy, F1 and Matthews' correlation."""
        return classification_scores(self.hparams["num_classes"])

    def outputs(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (n, C) and labels (n,), or soft targets (n, C), of the images with a label."""
        targets = batch[1]
        kept = targets != IGNORED if targets.ndim == 1 else slice(None)
        return self.predict_step(batch, 0)[kept], targets[kept]

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, C)."""
        assert self.model is not None
        return self.model(batch[0])
