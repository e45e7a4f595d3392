"""Fine-tuning of sentence classifiers and regressors (VeRA, Section 4.1)."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_modules.backbones import build_text, match_tokenizer, text_inputs
from lightning_modules.labels import IGNORED
from lightning_modules.vera.module import FineTuning
from lightning_modules.vera.scores import classification_scores


class TextTuning(FineTuning):
    """A sentence classifier of transformers; with one class, a regressor (STS-B).

    Args:
        num_classes: outputs of the head; 1 for regression.
        architecture: a hub name, a folder with config.json, or a model type such as "roberta".
        **kwargs: see `FineTuning`.
    """

    def __init__(
        self, num_classes: int, architecture: str = "FacebookAI/roberta-base", **kwargs: Any
    ):
        super().__init__(architecture=architecture, **kwargs)

    def build(self) -> nn.Module:
        """The transformers model for sequence classification."""
        h: Any = self.hparams
        arguments = {**(h.model_args or {}), "num_labels": h.num_classes}
        model = build_text(h.architecture, "classification", arguments, self.pretrained)
        match_tokenizer(model, self._trainer, h.architecture if self.pretrained else None)
        return model

    def default_heads(self, model: nn.Module) -> list[str]:
        """Every child with parameters besides the pre-trained model: the classifier."""
        return [
            name
            for name, part in model.named_children()
            if name != model.base_model_prefix and any(True for _ in part.parameters())
        ]

    def build_scores(self) -> MetricCollection:
        """Accuracy, F1 and Matthews' correlation; Pearson's and Spearman's for regression."""
        return classification_scores(self.hparams["num_classes"])

    def outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (n, C), or scores (n,) for regression, and labels (n,), of rows with a label."""
        targets = batch["labels"]
        logits = self.predict_step(batch, 0)
        kept = targets != IGNORED
        return logits[kept], targets[kept]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, C), or scores (B,) of a regressor."""
        assert self.model is not None
        logits = self.model(**text_inputs(batch, self.model)).logits
        return logits.squeeze(-1) if self.hparams["num_classes"] == 1 else logits

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the padding token too, which the model may have from the DataModule."""
        super().on_save_checkpoint(checkpoint)
        config: Any = self.tuned_model.config
        checkpoint["pad_token_id"] = config.pad_token_id

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the padding token: a loaded model may have no DataModule to give it.

        Raises:
            ValueError: see `FineTuning`.
        """
        super().on_load_checkpoint(checkpoint)
        config: Any = self.tuned_model.config
        if "pad_token_id" in checkpoint:  # not in those of earlier versions
            config.pad_token_id = checkpoint["pad_token_id"]
