"""One set of weights in three formats: the outputs stay the same."""

import re

import pytest
import timm
import torch
from torch.nn import functional as F
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from lightning_modules.self_distillation import (
    MaskedAutoencoder,
    from_transformers,
    load_encoder,
    load_mae,
    mae_decoder,
    mask_patches,
    to_transformers,
)
from lightning_modules.self_distillation.mae_checkpoint import to_original, to_timm, to_vitmae
from lightning_modules.weights import fingerprint

HEADS, DECODER_HEADS, EPS = 2, 3, 1e-6


def vitmae():
    torch.manual_seed(0)
    config = ViTMAEConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=64,
        image_size=12,
        patch_size=3,
        decoder_hidden_size=12,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=DECODER_HEADS,
        decoder_intermediate_size=48,
        layer_norm_eps=EPS,
    )
    model = ViTMAEForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def vit(img_size=12, num_classes=0, width=16):
    size = {
        "img_size": img_size,
        "patch_size": 3,
        "embed_dim": width,
        "depth": 2,
        "num_heads": HEADS,
    }
    return timm.create_model("vit_base_patch16_224.mae", num_classes=num_classes, **size)


def on_timm(img_size=12):
    torch.manual_seed(1)
    encoder = vit(img_size)
    return MaskedAutoencoder(encoder, mae_decoder(encoder, 2, 12, DECODER_HEADS)).eval()


def original_mae(state, images, mask):
    """The authors' model, written down from its state_dict: (N, D) for one image after another."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], EPS)

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def block(x, name, heads):
        q, k, v = linear(norm(x, f"{name}.norm1"), f"{name}.attn.qkv").chunk(3, -1)
        mixed = []
        for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
            mixed.append((a @ b.T / a.shape[-1] ** 0.5).softmax(-1) @ c)
        x = x + linear(torch.cat(mixed, -1), f"{name}.attn.proj")
        hidden = F.gelu(linear(norm(x, f"{name}.norm2"), f"{name}.mlp.fc1"))
        return x + linear(hidden, f"{name}.mlp.fc2")

    predictions = []
    for image, hides in zip(images, mask, strict=True):
        weight, bias = state["patch_embed.proj.weight"], state["patch_embed.proj.bias"]
        patches = F.conv2d(image[None], weight, bias, stride=3).flatten(2)[0].T
        patches = patches + state["pos_embed"][0, 1:]
        cls = state["cls_token"][0] + state["pos_embed"][0, :1]
        x = torch.cat([cls, patches[~hides]])
        for i in range(2):
            x = block(x, f"blocks.{i}", HEADS)
        x = linear(norm(x, "norm"), "decoder_embed")
        full = state["mask_token"][0].repeat(len(hides), 1)
        full[~hides] = x[1:]
        y = torch.cat([x[:1], full]) + state["decoder_pos_embed"][0]
        for i in range(2):
            y = block(y, f"decoder_blocks.{i}", DECODER_HEADS)
        predictions.append(linear(norm(y, "decoder_norm"), "decoder_pred")[1:])
    return torch.stack(predictions)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """(transformers' model, original state_dict on disk, images, mask, the predictions)."""
    folder = tmp_path_factory.mktemp("mae")
    model = vitmae()
    original = to_original(model.state_dict())
    torch.save({"model": original}, folder / "original.pth")
    model.save_pretrained(folder / "hub")  # writes the names of before version 5
    torch.save(model.state_dict(), folder / "vitmae.pt")
    torch.save(
        {"state_dict": {f"model.{n}": t for n, t in from_transformers(model).state_dict().items()}},
        folder / "lightning.ckpt",
    )
    images = torch.randn(3, 3, 12, 12)
    mask = mask_patches(3, 16, 0.75)
    return folder, model, images, mask, original_mae(original, images, mask)


def test_the_original_names():
    original = to_original(vitmae().state_dict())
    blocks = {re.sub(r"\.\d+\.", ".*.", name) for name in original}
    layer = [
        f"{part}.{kind}"
        for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ]
    assert blocks == {
        *("cls_token", "pos_embed", "mask_token", "decoder_pos_embed"),
        *(f"blocks.*.{name}" for name in layer),
        *(f"decoder_blocks.*.{name}" for name in layer),
        *(
            f"{name}.{kind}"
            for name in (
                "patch_embed.proj",
                "norm",
                "decoder_embed",
                "decoder_norm",
                "decoder_pred",
            )
            for kind in ("weight", "bias")
        ),
    }
    assert to_timm(original).keys() == vit().state_dict().keys()


def test_formats_turn_into_each_other_without_loss():
    model = vitmae()
    state = model.state_dict()
    original = to_original(state)
    assert fingerprint(to_vitmae(original)) == fingerprint(state)
    assert fingerprint(to_original(original)) == fingerprint(original)
    assert fingerprint(to_original(from_transformers(model).state_dict())) == fingerprint(original)


@pytest.mark.parametrize("source", ["original.pth", "hub", "vitmae.pt", "lightning.ckpt"])
@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_any_format_into_either_encoder(weights, source, kind):
    folder, _, images, mask, expected = weights
    model = on_timm() if kind == "timm" else from_transformers(vitmae())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = load_mae(model, folder / source)
    assert not (report.missing or report.unexpected or report.resampled)
    torch.testing.assert_close(model(images, mask), expected, rtol=1e-4, atol=1e-4)


def test_back_to_a_plain_transformers_model(weights, tmp_path):
    folder, theirs, images, _, _ = weights
    model = on_timm()
    load_mae(model, folder / "original.pth")
    plain = to_transformers(model, norm_pix=False)
    assert not plain.config.norm_pix_loss and plain.config.layer_norm_eps == EPS
    assert fingerprint(plain.state_dict()) == fingerprint(theirs.state_dict())
    plain.save_pretrained(tmp_path)
    again = ViTMAEForPreTraining.from_pretrained(tmp_path).eval()
    noise = torch.rand(3, 16)
    expected = theirs(images, noise=noise)
    torch.testing.assert_close(again(images, noise=noise).logits, expected.logits)
    assert to_transformers(from_transformers(theirs)).config.norm_pix_loss


def test_the_encoder_alone_into_a_classifier(weights):
    folder, theirs, images, _, _ = weights
    classifier = vit(num_classes=7)
    head = classifier.head.weight.clone()
    report = load_encoder(classifier, folder / "hub")
    assert report.missing == ["head.bias", "head.weight"] and not report.unexpected
    assert torch.equal(classifier.head.weight, head)
    expected = from_transformers(theirs).encode(images)
    torch.testing.assert_close(classifier.eval().forward_features(images), expected)
    other = vitmae().vit
    torch.nn.init.zeros_(other.embeddings.cls_token)
    load_encoder(other, folder / "original.pth")
    assert fingerprint(other.state_dict()) == fingerprint(theirs.vit.state_dict())


def test_a_classifier_of_other_classes_keeps_its_head(weights, tmp_path, caplog):
    torch.save(vit(num_classes=5).state_dict(), tmp_path / "five.pt")
    classifier = vit(num_classes=7)
    head = classifier.head.weight.clone()
    report = load_encoder(classifier, tmp_path / "five.pt")
    assert report.reshaped == ["head.bias (5,) for (7,)", "head.weight (5, 16) for (7, 16)"]
    assert "2 reshaped: head.bias" in caplog.text and torch.equal(classifier.head.weight, head)
    assert "blocks.0.attn.qkv.weight" in report.loaded
    with pytest.raises(ValueError, match=r"five\.pt does not fit .*: it has blocks\.0\.attn\.proj"):
        load_encoder(vit(num_classes=7, width=24), tmp_path / "five.pt")


@pytest.mark.parametrize(
    ("architecture", "args"),
    [
        (
            "swin_tiny_patch4_window7_224",
            {"patch_size": 2, "window_size": 2, "depths": (1, 1), "num_heads": (1, 2)},
        ),
        ("cait_xxs24_224", {"depth": 1, "num_heads": 2}),
        ("deit_tiny_distilled_patch16_224", {"depth": 1, "num_heads": 2}),
    ],
)
def test_names_of_other_models_of_timm_stay(architecture, args, tmp_path):
    def model(classes):
        args_of_all = {"img_size": 16, "embed_dim": 16, **args}
        return timm.create_model(architecture, num_classes=classes, **args_of_all)

    source = model(5)
    torch.save(source.state_dict(), tmp_path / "own.pt")
    same, other = model(5), model(7)
    load_encoder(same, tmp_path / "own.pt")
    assert fingerprint(same.state_dict()) == fingerprint(source.state_dict())
    report = load_encoder(other, tmp_path / "own.pt")
    assert all("head" in name for name in report.reshaped) and not report.unexpected


def test_positions_for_another_image_size_are_interpolated_and_it_is_said(weights, caplog):
    folder, theirs, *_ = weights
    model = on_timm(img_size=24)
    report = load_mae(model, folder / "original.pth")
    assert report.resampled == [
        "decoder.decoder_pos_embed (1, 17, 12) for (1, 65, 12)",
        "encoder.pos_embed (1, 17, 16) for (1, 65, 16)",
    ]
    assert "2 resampled: decoder.decoder_pos_embed" in caplog.text
    start = theirs.vit.embeddings.position_embeddings
    assert torch.equal(model.encoder.pos_embed[:, 0], start[:, 0])
    square = start[0, 1:].T.reshape(1, 16, 4, 4)
    larger = F.interpolate(square, size=(8, 8), mode="bicubic", antialias=True)
    torch.testing.assert_close(model.encoder.pos_embed[0, 1:], larger[0].flatten(1).T)
    assert model.encode(torch.zeros(1, 3, 24, 24)).shape == (1, 65, 16)


def test_a_checkpoint_without_decoder(weights, tmp_path):
    folder, *_ = weights
    torch.save(to_timm(torch.load(folder / "vitmae.pt")), tmp_path / "encoder.pt")
    model = on_timm()
    before = fingerprint(model.decoder.state_dict())
    with pytest.raises(ValueError, match=r"encoder.pt has no decoder.*or fit a new one"):
        load_mae(model, tmp_path / "encoder.pt")
    report = load_mae(model, tmp_path / "encoder.pt", fresh_decoder=True)
    assert all(name.startswith("decoder.") for name in report.missing) and report.missing
    assert fingerprint(model.decoder.state_dict()) == before
    load_mae(model, folder / "vitmae.pt", fresh_decoder=True)
    assert fingerprint(model.decoder.state_dict()) == before


def test_checkpoints_that_do_not_fit(weights, tmp_path):
    folder, *_ = weights
    state = torch.load(folder / "original.pth")["model"]
    torch.save({n: t for n, t in state.items() if n != "blocks.1.norm1.bias"}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a.pt does not fit.*lacks encoder.blocks.1.norm1.bias"):
        load_mae(on_timm(), tmp_path / "a.pt")
    torch.save(state | {"norm.weight": torch.ones(8)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"has encoder.norm.weight \(8,\) for \(16,\)"):
        load_mae(on_timm(), tmp_path / "b.pt")
    torch.save({"pos_embed": torch.zeros(1, 12, 16)}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"c.pt does not fit VisionTransformer"):
        load_encoder(vit(), tmp_path / "c.pt")
    with pytest.raises(FileNotFoundError):
        load_mae(on_timm(), tmp_path / "none.pt")
