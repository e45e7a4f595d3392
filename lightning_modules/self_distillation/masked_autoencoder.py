"""MAE (arXiv 2111.06377): encodes the visible patches and predicts the pixels of all patches.

The encoder is an unchanged timm ViT or transformers' ViTMAEModel, the decoder transformers'
ViTMAEDecoder. Only the path between them is written here, because neither library accepts a given
mask or images with different numbers of visible patches, or returns the features of full images
with their patches in order.
"""

import math
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEModel
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEDecoder


class MaskedAutoencoder(nn.Module):
    """The encoder f and the decoder g of self-distillation (arXiv 2210.02871) on images.

    In the paper's x̂ a mask token replaces each hidden patch. MAE and the released code instead
    leave hidden patches out of the encoder's input and put mask tokens into the decoder's.

    Args:
        encoder: a timm ViT with a [CLS] token and a final norm, or transformers' ViTMAEModel. Its
            positions are frozen, as in MAE; a classifier on it is not used.
        decoder: transformers' ViTMAEDecoder for the encoder's width and patches; see `mae_decoder`.

    Raises:
        ValueError: if the encoder is neither, or the decoder does not fit it.
    """

    encoder: Any
    decoder: Any

    def __init__(self, encoder: nn.Module, decoder: nn.Module):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.image_size, self.patch_size, self.width = geometry(encoder)
        if not isinstance(encoder, ViTMAEModel):  # transformers has frozen its positions
            self.encoder.pos_embed.requires_grad_(False)
        width, positions = self.decoder.decoder_embed.in_features, self.decoder.decoder_pos_embed
        if (width, positions.shape[1]) != (self.width, self.patches + 1):
            raise ValueError(
                f"the decoder is for width {width} and {positions.shape[1] - 1} patches, but the "
                f"encoder has width {self.width} and {self.patches} patches: build it with "
                "mae_decoder(encoder)"
            )

    @property
    def patches(self) -> int:
        """Number of patches N of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def base_model(self) -> nn.Module:
        """The encoder, under transformers' name for a model without its head."""
        return self.encoder

    def encode(self, images: Tensor) -> Tensor:
        """The final hidden states f(x) of unmasked images, [CLS] first, then patches row by row.

        transformers' ViTMAEModel with mask_ratio 0 would return the patches in random order.

        Args:
            images: (B, C, H, W).

        Returns:
            (B, 1 + N, D), after the final norm.
        """
        return self._transform(self._embed(images), None)

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        """Predicted pixels g(f(x̂)) of every patch.

        Images may have different numbers of visible patches. The shorter sequences are then padded,
        and the padding is masked in the attention, so that the result for an image does not depend
        on the other images of the batch.

        Args:
            images: (B, C, H, W).
            mask: (B, N), True for hidden patches.

        Returns:
            (B, N, patch_size² · C).
        """
        tokens = self._embed(images)
        visible_counts = (~mask).sum(1)
        longest = int(visible_counts.max())
        order = mask.int().argsort(dim=1, stable=True)  # visible patches first
        visible = _pick(tokens[:, 1:], order[:, :longest])
        bias = None
        if int(visible_counts.min()) < longest:
            padding = torch.arange(longest + 1, device=mask.device) > visible_counts[:, None]
            bias = torch.zeros(padding.shape, device=mask.device, dtype=tokens.dtype)
            bias = bias.masked_fill(padding, -math.inf)[:, None, None]
        latent = self._transform(torch.cat([tokens[:, :1], visible], 1), bias)
        return self._decode(latent, order, mask)

    def _embed(self, images: Tensor) -> Tensor:
        """Patch embeddings with positions, [CLS] first. (B, 1 + N, D)."""
        size = tuple(images.shape[-2:])
        if size != (self.image_size, self.image_size):
            raise ValueError(
                f"images are {size[0]} × {size[1]}, but the encoder takes {self.image_size} × "
                f"{self.image_size}: set data.image_size to that, or build the encoder for theirs "
                "(model.model_args: img_size of timm, image_size of ViTMAE), whose positions are "
                "interpolated"
            )
        encoder = self.encoder
        if isinstance(encoder, ViTMAEModel):
            embeddings = encoder.embeddings
            patches = embeddings.patch_embeddings(images)
            cls = embeddings.cls_token.expand(len(images), -1, -1)
            return torch.cat([cls, patches], 1) + embeddings.position_embeddings
        return encoder.norm_pre(encoder._pos_embed(encoder.patch_embed(images)))

    def _transform(self, tokens: Tensor, bias: Tensor | None) -> Tensor:
        encoder = self.encoder
        if isinstance(encoder, ViTMAEModel):
            blocks, norm = encoder.layers, encoder.layernorm
        else:
            blocks, norm = encoder.blocks, encoder.norm
        for block in blocks:
            tokens = block(tokens, bias)
        return norm(tokens)

    def _decode(self, latent: Tensor, order: Tensor, mask: Tensor) -> Tensor:
        decoder = self.decoder
        tokens = decoder.decoder_embed(latent)
        hidden = decoder.mask_token.expand(*mask.shape, -1)
        patches = torch.cat([tokens[:, 1:], hidden[:, tokens.shape[1] - 1 :]], 1)
        patches = _pick(patches, order.argsort(1))  # back in the images' order
        patches = torch.where(mask[..., None], hidden, patches)  # replaces the padding, too
        tokens = torch.cat([tokens[:, :1], patches], 1) + decoder.decoder_pos_embed
        for block in decoder.decoder_layers:
            tokens = block(tokens)
        return decoder.decoder_pred(decoder.decoder_norm(tokens[:, 1:]))


def geometry(encoder: Any) -> tuple[int, int, int]:
    """Image size and patch size in pixels, and width D, of an encoder.

    Raises:
        ValueError: if it is no ViT with a [CLS] token, square patches and a final norm.
    """
    if isinstance(encoder, ViTMAEModel):
        config = encoder.config
        return config.image_size, config.patch_size, config.hidden_size  # type: ignore
    kind = type(encoder).__name__
    if not isinstance(encoder, VisionTransformer) or encoder.pos_embed is None:
        raise ValueError(
            f"{kind} is no encoder for masked images: expected a timm ViT with learned "
            "positions, or transformers' ViTMAEModel"
        )
    if encoder.num_prefix_tokens != 1 or isinstance(encoder.norm, nn.Identity):
        raise ValueError(
            f"{kind} has {encoder.num_prefix_tokens} prefix tokens and "
            f"{type(encoder.norm).__name__} as its final norm: expected a [CLS] token alone and a "
            "LayerNorm; build it with model_args {'global_pool': 'token'}"
        )
    embed = encoder.patch_embed
    (height, width), (rows, columns) = embed.img_size, embed.patch_size
    if height != width or rows != columns:
        raise ValueError(
            f"{kind} has images of {height} × {width} and patches of {rows} × {columns} pixels: "
            "expected squares"
        )
    return height, rows, encoder.embed_dim


def mae_decoder(
    encoder: nn.Module, depth: int = 8, width: int = 512, heads: int = 16, channels: int = 3
) -> ViTMAEDecoder:
    """A new decoder for an encoder, initialised as in MAE; the defaults are MAE's for ViT-B.

    Args:
        encoder: see MaskedAutoencoder.
        depth: number of blocks.
        width: features of a token.
        heads: number of attention heads.
        channels: of the images.
    """
    image_size, patch_size, hidden = geometry(encoder)
    config = ViTMAEConfig(
        hidden_size=hidden,
        image_size=image_size,
        patch_size=patch_size,
        num_channels=channels,
        decoder_hidden_size=width,
        decoder_num_hidden_layers=depth,
        decoder_num_attention_heads=heads,
        decoder_intermediate_size=4 * width,
        layer_norm_eps=1e-6,
    )
    config._attn_implementation = "sdpa"  # transformers chooses it for complete models only
    decoder = ViTMAEDecoder(config, (image_size // patch_size) ** 2)
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.normal_(decoder.mask_token, std=0.02)
    with torch.no_grad():
        decoder.decoder_pos_embed.copy_(sincos_positions(image_size // patch_size, width))
    return decoder


def sincos_positions(grid: int, width: int) -> Tensor:
    """MAE's fixed position embeddings: sines and cosines of column and row, zero for [CLS].

    Frequencies are 10000^(−j / (width / 4)).

    Args:
        grid: number of patches in a row.
        width: number of features D.

    Returns:
        (1, 1 + grid², width).

    Raises:
        ValueError: if the width is not a multiple of four.
    """
    if width % 4:
        raise ValueError(f"width {width} has no sine positions: expected a multiple of 4")
    quarter = width // 4
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(grid, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    columns, rows = waves.repeat(grid, 1), waves.repeat_interleave(grid, 0)
    positions = torch.cat([columns, rows], 1).float()
    return torch.cat([torch.zeros(1, width), positions])[None]


def _pick(tokens: Tensor, places: Tensor) -> Tensor:
    """Tokens (B, N, D) at places (B, K)."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))
