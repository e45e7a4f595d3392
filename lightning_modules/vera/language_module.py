"""Fine-tuning of causal language models: E2E and instructions (VeRA, Sections 4.2 and 4.3)."""

from typing import Any, Literal

from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_modules.backbones import build_text, match_tokenizer, text_inputs
from lightning_modules.vera.module import IGNORED, FineTuning


class LanguageTuning(FineTuning):
    """A causal language model of transformers, trained on what its labels keep.

    The loss is the mean over the tokens whose label is not -100: the reference of an E2E example,
    the response to an instruction.

    Args:
        architecture: a hub name, a folder with config.json, or a model type such as "gpt2".
        quantize: hold the frozen, pre-trained weights in 4 or 8 bits (QLoRA; CUDA). Checkpoints
            are then `adapter_only`, because bitsandbytes writes its 4-bit weights into a
            state_dict and cannot read them back.
        gradient_checkpointing: compute activations twice instead of keeping them.
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
            self.save_hyperparameters()  # pretrained too: see `adapter_only`
            self.adapter_only, self.strict_loading = True, False

    def build(self) -> nn.Module:
        """A transformers model for causal language modelling."""
        h: Any = self.hparams
        model: Any = build_text(
            h.architecture, "causal", h.model_args or {}, self.pretrained, h.quantize
        )
        match_tokenizer(model, self._trainer)
        if h.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def default_heads(self, model: nn.Module) -> list[str]:
        """None: the output layer stays as it is."""
        return []

    def build_scores(self) -> MetricCollection:
        """None beside the loss, a mean over all tokens; text is scored after generation."""
        return MetricCollection({})

    def outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (n, V) before each of the n tokens that count, and those tokens (n,)."""
        targets = batch["labels"][:, 1:]
        kept = targets != IGNORED
        return self.predict_step(batch, 0)[:, :-1][kept], targets[kept]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, L, V)."""
        assert self.model is not None
        return self.model(**text_inputs(batch, self.model), use_cache=False).logits
