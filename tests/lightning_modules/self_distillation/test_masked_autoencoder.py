"""The path through encoder and decoder: each image as if alone, clean features in order."""

import math

import pytest
import timm
import torch
from torch import nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from lightning_modules.self_distillation import (
    MaskedAutoencoder,
    from_transformers,
    mae_decoder,
    mask_patches,
)
from lightning_modules.self_distillation.masked_autoencoder import sincos_positions

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


def stirred(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.double().eval()


def vit(**settings):
    torch.manual_seed(0)
    size = {"img_size": 12, "patch_size": 3, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_base_patch16_224.mae", num_classes=0, **(size | settings))


def autoencoder(kind, **settings):
    torch.manual_seed(0)
    if kind == "timm":
        encoder = vit()
        return stirred(MaskedAutoencoder(encoder, mae_decoder(encoder, 2, 12, 3)))
    return from_transformers(stirred(ViTMAEForPreTraining(ViTMAEConfig(**SMALL, **settings))))


def images(count=4):
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(0)).double()


KINDS = pytest.mark.parametrize("kind", ["timm", "transformers"])


@KINDS
def test_different_numbers_of_visible_patches_as_if_alone(kind):
    model, x = autoencoder(kind), images()
    mask = mask_patches(4, 16, 0.6, "bernoulli", torch.Generator().manual_seed(3))
    mask[2], mask[3] = True, False  # all hidden, none hidden
    assert len(set(mask.sum(1).tolist())) == 4
    together = model(x, mask)
    for i in range(4):
        alone = model(x[i : i + 1], mask[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-9, atol=1e-9)


@KINDS
@pytest.mark.parametrize("whole", [False, True], ids=["autocast", "bfloat16"])
def test_different_numbers_in_bfloat16(kind, whole):
    model, x = autoencoder(kind).float(), images().float()
    mask = mask_patches(4, 16, 0.6, "bernoulli", torch.Generator().manual_seed(3))
    expected = model(x, mask)
    if whole:
        model, x = model.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
        prediction = model(x, mask)
    assert prediction.dtype == torch.bfloat16
    error = (prediction.float() - expected).square().mean() / expected.square().mean()
    assert error < 0.01


@KINDS
def test_hidden_patches_are_not_seen(kind):
    model, x = autoencoder(kind), images(2)
    mask = mask_patches(2, 16, 0.75, generator=torch.Generator().manual_seed(0))
    pixels = mask.reshape(2, 1, 4, 4).repeat_interleave(3, 2).repeat_interleave(3, 3)
    other = torch.where(pixels, torch.randn_like(x), x)
    assert torch.equal(model(x, mask), model(other, mask))
    assert not torch.allclose(model(x, ~mask), model(other, ~mask))


def test_clean_features_are_timm_forward_features():
    model = autoencoder("timm")
    expected = model.encoder.forward_features(images())
    torch.testing.assert_close(model.encode(images()), expected, rtol=1e-10, atol=1e-10)


def test_clean_features_are_transformers_unshuffled():
    model = autoencoder("transformers", mask_ratio=0.0)
    features = model.encode(images())
    output = model.encoder(images())
    shuffled = output.last_hidden_state
    torch.testing.assert_close(features[:, 0], shuffled[:, 0], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(features[:, 1:], shuffled[:, 1:])  # why they are not used as they are
    places = output.ids_restore[..., None].expand(-1, -1, 16)
    restored = shuffled[:, 1:].gather(1, places)
    torch.testing.assert_close(features[:, 1:], restored, rtol=1e-9, atol=1e-9)


def test_positions_are_maes():
    """Patch (row, column): sines and cosines of the column first, then of the row."""
    positions = sincos_positions(3, 8)
    expected = []
    for row in range(3):
        for column in range(3):
            for place in (column, row):
                expected += [math.sin(place), math.sin(place / 100)]
                expected += [math.cos(place), math.cos(place / 100)]
    torch.testing.assert_close(positions[0, 1:].flatten(), torch.tensor(expected))
    assert not positions[0, 0].any()
    torch.manual_seed(0)
    theirs = ViTMAEForPreTraining(ViTMAEConfig(**SMALL)).vit.embeddings
    theirs.patch_embeddings.projection._is_hf_initialized = False
    theirs.initialize_weights()
    torch.testing.assert_close(theirs.position_embeddings.data, sincos_positions(4, 16))
    with pytest.raises(ValueError, match="width 10 has no sine positions"):
        sincos_positions(3, 10)


def test_zero_positions_of_a_new_model_are_filled_and_it_is_said(caplog):
    plain = ViTMAEForPreTraining(ViTMAEConfig(**SMALL))
    with torch.no_grad():
        plain.vit.embeddings.position_embeddings.zero_()
        plain.decoder.decoder_pos_embed.zero_()
    model = from_transformers(plain)
    assert torch.equal(model.encoder.embeddings.position_embeddings, sincos_positions(4, 16))
    assert torch.equal(model.decoder.decoder_pos_embed, sincos_positions(4, 12))
    assert caplog.text.count("were all zero") == 2


@KINDS
def test_positions_are_frozen_and_the_rest_learns(kind):
    model = autoencoder(kind)
    mask = mask_patches(2, 16, 0.5)
    model(images(2), mask).square().sum().backward()
    frozen = {name for name, p in model.named_parameters() if p.grad is None}
    encoder = "pos_embed" if kind == "timm" else "embeddings.position_embeddings"
    assert frozen == {f"encoder.{encoder}", "decoder.decoder_pos_embed"}


def test_a_new_decoder_has_the_shape_of_maes():
    with torch.device("meta"):
        encoder = timm.create_model("vit_base_patch16_224.mae", num_classes=0)
        decoder = mae_decoder(encoder)
        theirs = ViTMAEForPreTraining(ViTMAEConfig()).decoder
    shapes = [{n: t.shape for n, t in d.state_dict().items()} for d in (decoder, theirs)]
    assert shapes[0] == shapes[1]


def test_models_that_do_not_fit():
    with pytest.raises(ValueError, match="Linear is no encoder for masked images"):
        mae_decoder(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Identity as its final norm.*'global_pool': 'token'"):
        mae_decoder(vit(global_pool="avg"))
    with pytest.raises(ValueError, match="5 prefix tokens"):
        mae_decoder(vit(reg_tokens=4))
    with pytest.raises(ValueError, match="images of 12 × 24"):
        mae_decoder(vit(img_size=(12, 24)))
    small = mae_decoder(vit(img_size=6), 1, 12, 3)
    with pytest.raises(ValueError, match="for width 16 and 4 patches.*width 16 and 16 patches"):
        MaskedAutoencoder(vit(), small)
    with pytest.raises(ValueError, match="images are 24 × 24, but the encoder takes 12 × 12"):
        autoencoder("transformers").encode(torch.zeros(1, 3, 24, 24))
