"""L_MAE on images: the masking of patches, and the error of their predicted pixels.

Self-distillation (arXiv 2210.02871), Eq. 2 and Appendix C, with a Gaussian likelihood as in MAE
(arXiv 2111.06377): the squared error of the hidden patches' pixels.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_modules.modes import precise

Masking = Literal["exact", "bernoulli"]


def mask_patches(
    batch: int,
    patches: int,
    ratio: float,
    masking: Masking = "exact",
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw the patches to hide, for each image independently.

    "exact" keeps ⌊N·(1 − γ)⌋ patches of every image, as MAE and the released code do: 49 of 196 at
    γ = 0.75. "bernoulli" hides each patch with probability γ, z_k ~ Bernoulli(γ), as in Eq. 2: the
    number differs between images, and may be none or all of an image's patches.

    Args:
        batch: number of images B.
        patches: patches of an image N.
        ratio: γ.
        masking: "exact" or "bernoulli".
        generator: random numbers, on `device`; torch's default generator if None.
        device: of the result.

    Returns:
        (B, N), True for hidden patches.

    Raises:
        ValueError: for an unknown masking, or a ratio that hides nothing or everything.
    """
    if masking not in ("exact", "bernoulli"):
        raise ValueError(f"unknown masking {masking!r}: expected 'exact' or 'bernoulli'")
    if not 0 < ratio < 1:
        raise ValueError(f"mask ratio is {ratio}: expected a share of patches between 0 and 1")
    noise = torch.rand(batch, patches, generator=generator, device=device)
    if masking == "bernoulli":
        return noise < ratio
    # 1e-9: 10 · (1 − 0.9) is slightly below 1 in floating point, but has to keep one patch
    kept = math.floor(patches * (1 - ratio) + 1e-9)
    if not 0 < kept < patches:
        left = "visible" if kept == 0 else "hidden"
        raise ValueError(
            f"mask ratio {ratio} leaves no {left} patch of {patches}: expected one between "
            f"{1 / patches:.3g} and {1 - 1 / patches:.3g}, or smaller patches"
        )
    return noise.argsort(1).argsort(1) >= kept


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """The pixels of each patch, row by row: (B, C, H, W) → (B, N, patch_size² · C), C innermost."""
    b, c, h, w = images.shape
    p = patch_size
    grid = images.reshape(b, c, h // p, p, w // p, p)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(b, (h // p) * (w // p), p * p * c)


def pixel_loss(
    prediction: Tensor, images: Tensor, mask: Tensor, patch_size: int, norm_pix: bool = True
) -> Tensor:
    """Eq. 2 for images: L_MAE = mean over images of 1/Z Σ_k z_k · MSE(prediction_k, pixels_k).

    Z is the number of an image's hidden patches; an image with none is left out. With equal numbers
    ("exact") this is the mean over all hidden patches, as in MAE. Computed in float32 even under
    autocast (float64 images in float64).

    Args:
        prediction: (B, N, patch_size² · C).
        images: (B, C, H, W), normalised.
        mask: (B, N), True for hidden patches.
        patch_size: side of a patch, in pixels.
        norm_pix: normalise each target patch by its mean and standard deviation (unbiased, ε 1e-6).
            True for checkpoints with MAE's norm-pixel decoder, False for those with its raw-pixel
            decoder ("mae_visualize").

    Returns:
        A scalar; zero, with zero gradients, if no patch is hidden.
    """
    with torch.autocast(images.device.type, enabled=False):
        target = patchify(precise(images), patch_size)
        if norm_pix:
            mean, variance = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
            target = (target - mean) / (variance + 1e-6).sqrt()
        errors = (precise(prediction) - target).square().mean(-1)
        hidden = mask.to(errors.dtype)
        counts = hidden.sum(1)
        by_image = (errors * hidden).sum(1) / counts.clamp(min=1)
        return by_image.sum() / (counts > 0).sum().clamp(min=1)


def masked_autoencoding(
    model: nn.Module, images: Tensor, mask: Tensor, norm_pix: bool = True
) -> Tensor:
    """L_MAE of a batch, a scalar; see `pixel_loss`.

    Args:
        model: a MaskedAutoencoder.
        images: (B, C, H, W), normalised.
        mask: (B, N) from `mask_patches`.
        norm_pix: see `pixel_loss`.
    """
    patch_size: int = model.patch_size  # type: ignore[assignment]
    return pixel_loss(model(images, mask), images, mask, patch_size, norm_pix)
