"""Which patches are hidden, and the loss against its formula and transformers'."""

import pytest
import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from lightning_modules.self_distillation import (
    from_transformers,
    mask_patches,
    masked_autoencoding,
)
from lightning_modules.self_distillation.masked_image import patchify, pixel_loss

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 12,
    "patch_size": 3,
    "decoder_hidden_size": 12,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 3,
    "decoder_intermediate_size": 20,
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def vitmae(**settings):
    torch.manual_seed(0)
    model = ViTMAEForPreTraining(ViTMAEConfig(**SMALL, **settings)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize(
    ("patches", "ratio", "kept"), [(196, 0.75, 49), (10, 0.9, 1), (16, 0.7, 4), (64, 0.5, 32)]
)
def test_the_exact_mask_keeps_its_number(patches, ratio, kept):
    mask = mask_patches(50, patches, ratio, generator=seeded())
    assert mask.shape == (50, patches) and mask.dtype == torch.bool
    assert ((~mask).sum(1) == kept).all()
    assert len({tuple(row.tolist()) for row in mask}) > 25 if patches > 10 else True
    assert torch.equal(mask, mask_patches(50, patches, ratio, generator=seeded()))
    assert not torch.equal(mask, mask_patches(50, patches, ratio, generator=seeded(1)))


def test_the_exact_mask_takes_every_patch_alike():
    share = mask_patches(20_000, 16, 0.75, generator=seeded()).double().mean(0)
    assert (share - 0.75).abs().max() < 5 * (0.75 * 0.25 / 20_000) ** 0.5


def test_the_bernoulli_mask_is_independent():
    mask = mask_patches(20_000, 16, 0.6, "bernoulli", generator=seeded()).double()
    assert (mask.mean(0) - 0.6).abs().max() < 5 * (0.24 / 20_000) ** 0.5
    numbers = mask.sum(1)  # binomial: np, np(1 − p)
    assert abs(numbers.mean() - 9.6) < 0.1 and abs(numbers.var() - 3.84) < 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 4, 0.9), "leaves no visible patch of 4: expected one between 0.25 and 0.75"),
        ((2, 1, 0.5), "leaves no visible patch of 1"),
        ((2, 16, 0.0), "mask ratio is 0.0: expected a share of patches between 0 and 1"),
        ((2, 16, 1.0), "mask ratio is 1.0"),
        ((2, 16, 0.5, "random"), "unknown masking 'random': expected 'exact' or 'bernoulli'"),
    ],
)
def test_bad_masks(arguments, message):
    with pytest.raises(ValueError, match=message):
        mask_patches(*arguments)


def test_patches_are_read_row_by_row_with_colours_innermost():
    images = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    patches = patchify(images, 2)
    assert patches.shape == (2, 6, 12)
    expected = images[1, :, 2:4, 4:6].permute(1, 2, 0).flatten()  # second row, third column
    assert torch.equal(patches[1, 5], expected)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_the_loss_is_its_formula(norm_pix):
    prediction = torch.randn(3, 4, 12, dtype=torch.float64, generator=seeded())
    images = torch.randn(3, 3, 4, 4, dtype=torch.float64, generator=seeded(1))
    mask = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    terms = {0: [], 1: []}
    for image, k in ((0, 0), (0, 3), (1, 1)):
        row, column = 2 * (k // 2), 2 * (k % 2)
        pixels = images[image, :, row : row + 2, column : column + 2].permute(1, 2, 0).flatten()
        if norm_pix:
            variance = ((pixels - pixels.mean()) ** 2).sum() / 11
            pixels = (pixels - pixels.mean()) / (variance + 1e-6) ** 0.5
        terms[image].append(((prediction[image, k] - pixels) ** 2).sum() / 12)
    expected = (sum(terms[0]) / 2 + terms[1][0]) / 2  # the third image hides nothing
    torch.testing.assert_close(pixel_loss(prediction, images, mask, 2, norm_pix), expected)


def test_nothing_hidden_is_no_loss():
    prediction = torch.randn(2, 4, 12, requires_grad=True)
    loss = pixel_loss(prediction, torch.randn(2, 3, 4, 4), torch.zeros(2, 4).bool(), 2)
    loss.backward()
    assert loss == 0 and not prediction.grad.any()


@pytest.mark.parametrize("norm_pix", [True, False])
def test_loss_and_gradients_are_transformers(norm_pix):
    theirs = vitmae(norm_pix_loss=norm_pix)
    images = torch.randn(4, 3, 12, 12, dtype=torch.float64, generator=seeded())
    output = theirs(images)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in theirs.named_parameters() if p.requires_grad}
    theirs.zero_grad()
    ours = from_transformers(theirs)
    mask = output.mask.bool()
    assert ((~mask).sum(1) == 4).all()
    torch.testing.assert_close(ours(images, mask), output.logits, rtol=1e-10, atol=1e-10)
    loss = masked_autoencoding(ours, images, mask, norm_pix)
    loss.backward()
    torch.testing.assert_close(loss, output.loss, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        mine = theirs.get_parameter(name).grad
        torch.testing.assert_close(mine, gradient, rtol=1e-8, atol=1e-12)


def test_float32_under_autocast():
    ours = from_transformers(vitmae().float())
    images = torch.randn(2, 3, 12, 12, generator=seeded())
    mask = mask_patches(2, 16, 0.75, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        prediction = ours(images, mask)
        loss = pixel_loss(prediction, images, mask, 3)
    assert prediction.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert loss == pixel_loss(prediction.float(), images, mask, 3)
