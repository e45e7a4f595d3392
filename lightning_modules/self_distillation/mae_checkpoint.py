"""Converts MAE weights between the formats in use.

- original: as MAE's authors publish them, `blocks.0.attn.qkv.weight`, `decoder_blocks.0…`; timm's
  ViT has the same names, without the decoder.
- vitmae: transformers' ViTMAEForPreTraining, `vit.layers.0.attention.q_proj.weight`,
  `decoder.decoder_layers.0…`, and also its names on disk and before version 5.
- MaskedAutoencoder: `encoder.…` (timm's or transformers' names), `decoder.…` (transformers').

Every conversion passes through the original format.
"""

import logging
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel

from lightning_modules.backbones import classifier_names
from lightning_modules.self_distillation.masked_autoencoder import (
    MaskedAutoencoder,
    geometry,
    sincos_positions,
)
from lightning_modules.weights import LoadReport, read_state_dict

log = logging.getLogger(__name__)

# from the names of any format to the original ones, applied in order
TO_ORIGINAL = [
    (r"^(model\.)?vit\.", ""),
    (r"^encoder\.layer\.", "blocks."),
    (r"^encoder\.", ""),
    (r"^decoder\.", ""),
    (r"^embeddings\.cls_token", "cls_token"),
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^layernorm\.", "norm."),
    (r"^layers\.", "blocks."),
    (r"^decoder_(encoder\.layer|layers)\.", "decoder_blocks."),
    (r"\.attention\.attention\.(q|k|v)(uery|ey|alue)\.", r".attn.\1."),
    (r"\.attention\.(q|k|v)_proj\.", r".attn.\1."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
]
# from the original names to transformers', without their prefix "vit." or "decoder."
TO_VITMAE = [
    (r"^cls_token", "embeddings.cls_token"),
    (r"^pos_embed", "embeddings.position_embeddings"),
    (r"^patch_embed\.proj", "embeddings.patch_embeddings.projection"),
    (r"^norm\.", "layernorm."),
    (r"^blocks\.", "layers."),
    (r"^decoder_blocks\.", "decoder_layers."),
    (r"\.attn\.(q|k|v)\.", r".attention.\1_proj."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
]


def to_original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of any format under the original names, with q, k and v in one tensor."""
    renamed = {_rename(name, TO_ORIGINAL): value for name, value in state.items()}
    original = {}
    for name, value in renamed.items():
        if ".attn.q." in name:
            parts = [renamed[name.replace(".attn.q.", f".attn.{part}.")] for part in "qkv"]
            original[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
        elif not re.search(r"\.attn\.[kv]\.", name):
            original[name] = value
    return original


def to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's part of a state_dict of any format, under timm's names."""
    return {name: value for name, value in to_original(state).items() if not in_decoder(name)}


def to_vitmae(original: dict[str, Tensor]) -> dict[str, Tensor]:
    """An original state_dict under the names of transformers' ViTMAEForPreTraining (version 5)."""
    state: dict[str, Tensor] = {}
    for name, value in original.items():
        prefix = "decoder." if in_decoder(name) else "vit."
        parts = {name: value}
        if ".attn.qkv." in name:
            pieces = zip("qkv", value.chunk(3), strict=True)
            parts = {name.replace(".qkv.", f".{part}."): piece for part, piece in pieces}
        state |= {prefix + _rename(part, TO_VITMAE): piece for part, piece in parts.items()}
    return state


def from_transformers(model: ViTMAEForPreTraining) -> MaskedAutoencoder:
    """A MaskedAutoencoder that shares encoder and decoder with a transformers model.

    transformers 5 leaves the frozen positions of a model built from a config at zero; they are set
    to MAE's.
    """
    encoder, decoder = model.vit, model.decoder
    grid = geometry(encoder)[0] // geometry(encoder)[1]
    for positions in (encoder.embeddings.position_embeddings, decoder.decoder_pos_embed):
        if positions.device.type != "meta" and not positions.any():
            log.warning("positions (%s) were all zero: set to MAE's", positions.shape[-1])
            with torch.no_grad():
                positions.copy_(sincos_positions(grid, positions.shape[-1]))
    return MaskedAutoencoder(encoder, decoder)


def to_transformers(model: MaskedAutoencoder, norm_pix: bool = True) -> ViTMAEForPreTraining:
    """A plain transformers model with a copy of an autoencoder's weights.

    Args:
        model: an autoencoder with timm's or transformers' encoder.
        norm_pix: `norm_pix_loss` of the configuration: the decoder predicts normalised pixels.
    """
    state = to_vitmae(to_original(model.state_dict()))
    encoder, decoder = model.encoder, model.decoder
    if isinstance(encoder, ViTMAEModel):
        settings = encoder.config.to_dict()
    else:
        block = encoder.blocks[0]
        settings = {
            "hidden_size": model.width,
            "num_hidden_layers": len(encoder.blocks),
            "num_attention_heads": block.attn.num_heads,
            "intermediate_size": block.mlp.fc1.out_features,
            "layer_norm_eps": encoder.norm.eps,
            "image_size": model.image_size,
            "patch_size": model.patch_size,
            "num_channels": encoder.patch_embed.proj.in_channels,
            "qkv_bias": block.attn.qkv.bias is not None,
        }
    settings |= {
        "decoder_hidden_size": decoder.config.hidden_size,
        "decoder_num_hidden_layers": decoder.config.num_hidden_layers,
        "decoder_num_attention_heads": decoder.config.num_attention_heads,
        "decoder_intermediate_size": decoder.config.intermediate_size,
        "norm_pix_loss": norm_pix,
    }
    plain = ViTMAEForPreTraining(ViTMAEConfig(**settings))
    plain.load_state_dict(state)
    return plain.train(model.training)


def in_decoder(name: str) -> bool:
    """Whether an original name belongs to the decoder."""
    return name.startswith("decoder_") or name == "mask_token"


def load_mae(
    model: MaskedAutoencoder,
    source: str | Path,
    fresh_decoder: bool = False,
    state: dict[str, Tensor] | None = None,
) -> LoadReport:
    """Load an autoencoder's weights from a checkpoint of any format, and log the report.

    Positions of another image size are interpolated (bicubic, in the encoder and the decoder).

    Args:
        model: receives the weights, in place.
        source: see `weights.read_state_dict`.
        fresh_decoder: do not load the decoder, whether or not the checkpoint has one.
        state: the source's tensors, if they have been read already.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the checkpoint lacks a decoder that is to be loaded, or weights are missing
            or have other shapes.
    """
    original = to_original(read_state_dict(source) if state is None else state)
    if fresh_decoder:
        original = {name: value for name, value in original.items() if not in_decoder(name)}
    elif not any(map(in_decoder, original)):
        raise without_decoder(source)
    return _load(model, original, source, optional=("decoder.",) if fresh_decoder else ())


def without_decoder(source: str | Path) -> ValueError:
    """The error for weights without a decoder."""
    return ValueError(
        f"{source} has no decoder, so it cannot predict pixels: give a pre-training checkpoint "
        "with its decoder, such as facebook/vit-mae-base, or fit a new one to it first, a "
        "stage with model.train decoder (--decoder_steps 2000 of "
        "recipes.self_distillation.images)"
    )


def load_encoder(encoder: nn.Module, source: str | Path) -> LoadReport:
    """Load an encoder's weights from a checkpoint of any format, and log the report.

    Positions of another image size are interpolated (bicubic). The decoder is left out.

    Args:
        encoder: a timm model, with or without a head, or transformers' ViTMAEModel; a head that the
            checkpoint lacks, or has for other classes, keeps its values.
        source: see `weights.read_state_dict`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if weights are missing or have other shapes.
    """
    state = read_state_dict(source)
    if isinstance(encoder, ViTMAEModel):
        return _load(encoder, to_timm(state), source, ())
    if state.keys() & encoder.state_dict().keys():
        # to_timm would take names of other models of timm, such as Swin's layers.0, for ViTMAE's
        state = {name: value for name, value in state.items() if not in_decoder(name)}
    else:
        state = to_timm(state)
    heads = [f"{name}." for name in classifier_names(encoder)]
    return _load(encoder, state, source, [*heads, "fc_norm."])


def _load(
    model: nn.Module, original: dict[str, Tensor], source: str | Path, optional: Iterable[str]
) -> LoadReport:
    """Load weights under the original names.

    Those with an `optional` prefix keep their values if they are missing or of another shape.
    """
    expected = model.state_dict()
    state = _renamed_for(model, original)
    resampled = []
    for name in state.keys() & expected.keys():
        value, shape = state[name], expected[name].shape
        if value.shape != shape and re.search(r"pos(ition)?_embed(dings)?$", name):
            state[name] = _resample(value, shape[1])
            if state[name].shape == shape:
                resampled.append(f"{name} {tuple(value.shape)} for {tuple(shape)}")
    reshaped = [
        f"{name} {tuple(state[name].shape)} for {tuple(expected[name].shape)}"
        for name in sorted(state.keys() & expected.keys())
        if state[name].shape != expected[name].shape
    ]
    missing = sorted(expected.keys() - state.keys())
    kept = tuple(optional)
    lacking = [name for name in missing if not name.startswith(kept)]
    wrong = [shapes for shapes in reshaped if not shapes.startswith(kept)]
    if wrong or lacking:
        problem = f"lacks {', '.join(lacking[:4])}" if lacking else f"has {', '.join(wrong[:4])}"
        raise ValueError(
            f"{source} does not fit {type(model).__name__}: it {problem}; build the model with the "
            "checkpoint's depth, widths and patch size"
        )
    loaded = {
        name: state[name]
        for name in expected.keys() & state.keys()
        if state[name].shape == expected[name].shape
    }
    unexpected = sorted(state.keys() - expected.keys())
    report = LoadReport(sorted(loaded), missing, unexpected, reshaped, sorted(resampled))
    model.load_state_dict({**expected, **loaded})
    partial = missing or unexpected or reshaped or resampled
    level = logging.WARNING if partial else logging.INFO
    log.log(level, "loaded %s: %s", source, report)
    return report


def _renamed_for(model: Any, original: dict[str, Tensor]) -> dict[str, Tensor]:
    """An original state_dict under the names of a MaskedAutoencoder, ViTMAEModel or timm ViT."""
    if not isinstance(model, MaskedAutoencoder):
        if not isinstance(model, ViTMAEModel):
            return dict(original)
        return {name.removeprefix("vit."): value for name, value in to_vitmae(original).items()}
    encoder = {name: value for name, value in original.items() if not in_decoder(name)}
    decoder = {name: value for name, value in original.items() if in_decoder(name)}
    encoder = _renamed_for(model.encoder, encoder)
    return {f"encoder.{name}": value for name, value in encoder.items()} | to_vitmae(decoder)


def _resample(positions: Tensor, tokens: int) -> Tensor:
    """Positions (1, 1 + N, D) for `tokens` tokens; unchanged if a grid is not square."""
    side = math.isqrt(tokens - 1)
    if side**2 != tokens - 1 or math.isqrt(positions.shape[1] - 1) ** 2 != positions.shape[1] - 1:
        return positions
    return resample_abs_pos_embed(positions, [side, side], num_prefix_tokens=1)


def _rename(name: str, rules: list[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
