"""Fine-tuning of causal language models: E2E and instructions (VeRA, Sections 4.2 and 4.3)."""

from typing import Any, Literal

from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_modules.backbones import build_text, match_tokenizer, text_inputs
from lightning_modules.labels import IGNORED
from lightning_modules.vera.module import FineTuning


class LanguageTuning(FineTuning):
    """A causal language model of transformers.

    The loss is the mean over the tokens whose label is not -100: those of an E2E example's
    reference or of the response to an instruction.

    Args:
        architecture: a hub name, a folder with config.json, or a model type such as "gpt2".
        quantize: hold the frozen, pre-trained weights in 4 or 8 bits (QLoRA; CUDA). Checkpoints
            are then `adapter_only`, because bitsandbytes cannot load the 4-bit weights of a
            state_dict.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        **kwargs: see `FineTuning`.
    """

    def __init__(
        self,
        architecture: str = "openai-community/gpt2-medium",
        quantize: Literal["nf4", "int8"] | None = None,
        gradient_checkpointing: bool = False,
        **kwargs: Any,
    ):
        super().__init__(architecture=architecture, **kwargs)
        if quantize:
            self.save_hyperparameters()  # also `pretrained`, which `adapter_only` needs
            self.adapter_only, self.strict_loading = True, False

    def build(self) -> nn.Module:
        """The transformers model for causal language modelling."""
        h: Any = self.hparams
        model: Any = build_text(
            h.architecture, "causal", h.model_args or {}, self.pretrained, h.quantize
        )
        match_tokenizer(model, self._trainer, h.architecture if self.pretrained else None)
        if h.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def default_heads(self, model: nn.Module) -> list[str]:
        """No modules: the output layer stays frozen."""
        return []

    def build_scores(self) -> MetricCollection:
        """No scores besides the loss; generated text is scored in recipes."""
        return MetricCollection({})

    def outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (n, V) that predict the n tokens with a label, and those tokens (n,)."""
        targets = batch["labels"][:, 1:]
        kept = targets != IGNORED
        return self.predict_step(batch, 0)[:, :-1][kept], targets[kept]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, L, V)."""
        assert self.model is not None
        return self.model(**text_inputs(batch, self.model), use_cache=False).logits
