"""Fine-tunes decoders and encoder–decoders on label words or on longer texts (APET, App. D)."""

from typing import Any, Literal

import transformers
from torch import Tensor, nn

from lightning_modules.apet.label_words import LabelWords
from lightning_modules.backbones import (
    build_text,
    match_tokenizer,
    name_in_errors,
    positions_of,
    text_inputs,
)
from lightning_modules.labels import IGNORED
from lightning_modules.vera.language_module import LanguageTuning
from lightning_modules.vera.text_module import TextTuning


class LabelWordTuning(TextTuning):
    """A decoder or encoder–decoder that predicts a label word after `Input: {x} Output:`.

    The DataModule writes the prompts and gives the words' token ids (`data.label_words`).

    Args:
        num_classes: number of classes.
        architecture: a hub name, a folder with config.json, or a model type such as "bloom".
        label_tokens: token id of each class's word; null for the DataModule's, which are then saved
            in the checkpoint.
        **kwargs: see `FineTuning`; names of modules are the language model's, without `LabelWords`.
    """

    def __init__(
        self,
        num_classes: int,
        architecture: str = "bigscience/bloom-560m",
        label_tokens: list[int] | None = None,
        **kwargs: Any,
    ):
        super().__init__(num_classes=num_classes, architecture=architecture, **kwargs)

    def build(self) -> nn.Module:
        """The language model as a classifier, see `LabelWords`.

        Raises:
            ValueError: if neither `label_tokens` nor the DataModule gives label words.
        """
        h: Any = self.hparams
        data: Any = getattr(self._trainer, "datamodule", None)
        if h.label_tokens is None:
            if getattr(data, "label_words", None) is None:
                raise ValueError(
                    "LabelWordTuning needs a word for each class, and the data has none: set "
                    'data.label_words, for example to ["negative", "positive"]'
                )
            h.label_tokens = data.label_tokens
        task = task_of(h.architecture)
        model = build_text(h.architecture, task, h.model_args or {}, self.pretrained)
        match_tokenizer(model, self._trainer, h.architecture if self.pretrained else None)
        return LabelWords(model, h.label_tokens, **getattr(data, "around_labels", {}))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the tokenizer's special tokens around label words, which the DataModule gave."""
        super().on_save_checkpoint(checkpoint)
        words: Any = self.model
        checkpoint["around_labels"] = {
            "begins": words.begins.tolist(),
            "ends": words.ends.tolist(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them: a loaded model may have no DataModule to give them.

        Raises:
            ValueError: see `FineTuning`.
        """
        super().on_load_checkpoint(checkpoint)
        words: Any = self.model
        if "around_labels" in checkpoint:  # not in those of earlier versions
            words.surround(**checkpoint["around_labels"])

    @property
    def tuned_model(self) -> nn.Module:
        """The language model inside `LabelWords`: a prompt, for example, is added to its input."""
        model: Any = self.model
        return model.model

    def default_heads(self, model: nn.Module) -> list[str]:
        """No modules: the label words are in the vocabulary."""
        return []

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, C) of the label words."""
        assert self.model is not None
        return self.model(**text_inputs(batch, self.tuned_model))


class TextToTextTuning(LanguageTuning):
    """A decoder or encoder–decoder that generates an answer or a summary of its input.

    The loss is the mean over the target's tokens; generated texts are scored in recipes.

    Args:
        architecture: a hub name, a folder with config.json, or a model type such as "t5".
        **kwargs: see `FineTuning`.
    """

    def __init__(self, architecture: str = "bigscience/bloom-560m", **kwargs: Any):
        super().__init__(architecture=architecture, **kwargs)

    def build(self) -> nn.Module:
        """The language model.

        Raises:
            ValueError: if data.encoder_decoder does not agree with the architecture.
        """
        h: Any = self.hparams
        task = task_of(h.architecture)
        encoder_decoder = task == "seq2seq"
        data: Any = getattr(self._trainer, "datamodule", None)
        if getattr(data, "encoder_decoder", encoder_decoder) != encoder_decoder:
            raise ValueError(
                f"data.encoder_decoder is {str(not encoder_decoder).lower()}, and "
                f"{h.architecture} is "
                f"{'an encoder–decoder' if encoder_decoder else 'a decoder alone'}: set it to "
                f"{str(encoder_decoder).lower()}"
            )
        if not encoder_decoder:
            return super().build()
        model = build_text(h.architecture, task, h.model_args or {}, self.pretrained)
        match_tokenizer(model, self._trainer, h.architecture if self.pretrained else None)
        return model

    def outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (n, V) that predict the n tokens with a label, and those tokens (n,).

        Raises:
            ValueError: if a text is longer than the model has positions for.
        """
        model: Any = self.model
        if not model.config.is_encoder_decoder:
            return super().outputs(batch)
        labels = batch["labels"]
        longest = positions_of(model)
        if longest is not None and labels.shape[1] > longest:
            raise ValueError(
                f"a target has {labels.shape[1]} tokens and the model {longest} positions: set "
                f"data.target_length to {longest} or less"
            )
        kept = labels != IGNORED
        decoder_ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
        inputs = {**text_inputs(batch, model), "decoder_input_ids": decoder_ids, "use_cache": False}
        return model(**inputs).logits[kept], labels[kept]


def task_of(architecture: str) -> Literal["seq2seq", "causal"]:
    """`build_text`'s task for an architecture: "seq2seq" for encoder–decoders, else "causal"."""
    if architecture in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(architecture)
    else:
        with name_in_errors(architecture):
            config = transformers.AutoConfig.from_pretrained(architecture)
    return "seq2seq" if config.is_encoder_decoder else "causal"
