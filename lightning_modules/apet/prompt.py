"""Soft tokens before the input: prompt tuning (Lester et al., 2021) on a transformers model.

In APET (arXiv 2306.02320, Section 5.1) this is CONCAT at the input: rows W_2 are prepended to the
embedded tokens. In an encoder–decoder they are prepended to the encoder's input. The attention mask
is extended, and the rows' positions are removed again from outputs by token, (B, L, …) such as
logits and `last_hidden_state`, so that labels, losses and `generate` work with the given lengths.
`hidden_states` and `attentions`, which are tuples of all layers, keep them, and so does what an
encoder–decoder's encoder returns.

The pooler of a BERT reads the first position, which is the first soft token and not [CLS], as with
peft's prompt tuning.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.backbones import first_position
from lightning_modules.labels import IGNORED

HOOKS = "apet_prompt_hooks"


def add_prompt(model: nn.Module, tokens: int, seed: int) -> None:
    """Prepend trainable rows to the embedded input of a transformers model, in place.

    Their initial values are the embeddings of tokens drawn from the vocabulary, as in peft.

    Args:
        model: a transformers encoder, decoder or encoder–decoder, with or without its head, but no
            decoder with a classifier: that reads the last token that is no padding, which it finds
            by token ids, and these are not given with embedded input.
        tokens: number of rows.
        seed: of that draw.

    Raises:
        ValueError: for a model that `check_prompt` refuses.
    """
    check_prompt(model)
    embed: Any = model.get_input_embeddings()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(embed.num_embeddings, (tokens,), generator=generator)
    with torch.no_grad():
        initial = embed(rows.to(embed.weight.device)).float().clone()  # scaled, where it scales
    model.apet_prompt = nn.Parameter(initial)
    config: Any = model.config
    hook = _extend_mask_hook if config.is_encoder_decoder else _prepend_hook
    handles = [model.register_forward_pre_hook(hook, with_kwargs=True)]
    if config.is_encoder_decoder:
        encoder: Any = model.get_encoder()  # type: ignore[operator]
        encoder_hook = _EncoderHook(model)
        handles.append(encoder.register_forward_pre_hook(encoder_hook, with_kwargs=True))
    else:
        handles.append(model.register_forward_hook(_cut_hook, with_kwargs=True))
    setattr(model, HOOKS, handles)


def check_prompt(model: nn.Module) -> None:
    """Refuse a model that cannot have a prompt.

    Raises:
        ValueError: if the model does not embed tokens, is a decoder with a classifier, or answers
            with positions of its input.
    """
    if isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(
            f"{type(model).__name__} would classify by padding once its input has a prompt: use "
            "LabelWordTuning, which answers by label words"
        )
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(embed, nn.Embedding):
        raise ValueError(
            f"{type(model).__name__} embeds no tokens, so it takes no prompt: use add, concat or "
            "plug"
        )
    if "start_positions" in signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} answers with positions of its input, which a prompt would "
            "shift: use add, concat or plug"
        )


def remove_prompt(model: nn.Module) -> None:
    """Remove the rows and their hooks, in place."""
    for handle in getattr(model, HOOKS):
        handle.remove()
    delattr(model, HOOKS)
    del model.apet_prompt


def _prepend_hook(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Prepend the rows to an encoder's or decoder's input, unless a cached prefix contains them."""
    kwargs = _by_name(args, kwargs)
    past = kwargs.get("past_key_values")
    cached = past is not None and past.get_seq_length() > 0
    rows = len(model.apet_prompt)  # type: ignore[arg-type]
    kwargs["attention_mask"] = _extended(kwargs.get("attention_mask"), rows, 1)
    kwargs.pop("cache_position", None)  # the model computes it for the longer input
    positions = kwargs.get("position_ids")
    if positions is not None:
        positions = positions + rows
        if not cached:
            first = torch.arange(rows, device=positions.device) + first_position(model)
            positions = torch.cat([first.expand(len(positions), -1), positions], 1)
        kwargs["position_ids"] = positions
    if not cached:
        kwargs = _prepend_rows(model, kwargs)
        if isinstance(kept := kwargs.get("logits_to_keep"), Tensor):  # positions of the input
            kwargs["logits_to_keep"] = kept + rows
        for name, fill in (("token_type_ids", 0), ("labels", IGNORED)):
            if kwargs.get(name) is not None and kwargs[name].ndim == 2:
                kwargs[name] = _extended(kwargs[name], rows, fill)
    return (), kwargs


def _cut_hook(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Remove the rows' positions from the outputs by token; tuples of all layers keep them."""
    if isinstance(output, tuple):
        raise ValueError(
            f"{type(model).__name__} returned a tuple, in which the prompt's positions cannot be "
            "told apart: leave out return_dict=False"
        )
    embedded = kwargs.get("inputs_embeds")
    if embedded is None:
        return output
    for name, values in list(output.items()):
        by_token = isinstance(values, Tensor) and values.ndim == 3
        if by_token and values.shape[1] == embedded.shape[1]:
            output[name] = values[:, len(model.apet_prompt) :]  # type: ignore[arg-type]
    return output


def _extend_mask_hook(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Extend the mask of the decoder's cross-attention; `_EncoderHook` prepends the rows."""
    kwargs = _by_name(args, kwargs)
    rows = len(model.apet_prompt)  # type: ignore[arg-type]
    kwargs["attention_mask"] = _extended(kwargs.get("attention_mask"), rows, 1)
    return (), kwargs


class _EncoderHook:
    """Prepends the rows to the encoder's input, whether the model or `generate` calls it."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(
        self, encoder: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        kwargs = _by_name(args, kwargs)
        given = kwargs.get("inputs_embeds")
        length = (kwargs["input_ids"] if given is None else given).shape[1]
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.shape[1] == length:
            kwargs["attention_mask"] = _extended(mask, len(self.model.apet_prompt), 1)  # type: ignore
        return (), _prepend_rows(self.model, kwargs)


def _by_name(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as keyword arguments."""
    names = ("input_ids", "attention_mask")
    if len(args) > len(names):
        raise ValueError(
            f"a model with a prompt takes only input_ids and attention_mask by position, and got "
            f"{len(args)} arguments by position: give the others by name"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _prepend_rows(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with embedded tokens, behind the prompt's rows, in place of ids."""
    embedded = kwargs.get("inputs_embeds")
    if embedded is None:
        embedded = model.get_input_embeddings()(kwargs.pop("input_ids"))  # type: ignore[operator]
    rows = model.apet_prompt.to(embedded.dtype).expand(len(embedded), -1, -1)  # type: ignore
    kwargs["inputs_embeds"] = torch.cat([rows, embedded], 1)
    return kwargs


def _extended(values: Tensor | None, rows: int, fill: int) -> Tensor | None:
    """A mask, token types or labels (B, L) with `rows` entries of `fill` put in front."""
    if values is None:
        return None
    if values.ndim != 2:
        raise ValueError(
            f"a mask of shape {tuple(values.shape)} cannot be extended for the prompt: give one of "
            "shape (batch, length)"
        )
    return torch.cat([values.new_full((len(values), rows), fill), values], 1)
