"""Noise on embeddings: the divergence against its formula, and where the noise goes."""

import pytest
import timm
import torch
from torch import nn
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from lightning_modules.self_distillation import r3f
from lightning_modules.self_distillation.r3f import embedding_layer, symmetric_divergence


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def vit():
    torch.manual_seed(0)
    settings = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **settings)
    return model.double().eval(), torch.randn(3, 3, 8, 8, generator=seeded()).double()


def hf_vit():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    images = torch.randn(3, 3, 8, 8, generator=seeded()).double()
    return ViTForImageClassification(config).double().eval(), {"pixel_values": images}


def roberta():
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=5,
        pad_token_id=1,
    )
    model = RobertaForSequenceClassification(config).double().eval()
    ids = torch.randint(2, 20, (3, 6), generator=seeded())
    ids[0, 4:] = 1
    return model, {"input_ids": ids, "attention_mask": (ids != 1).long()}


def run(model, inputs):
    output = model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs)
    return getattr(output, "logits", output)


def test_the_divergence_is_its_formula():
    p, q = torch.randn(2, 3, 4, dtype=torch.float64, generator=seeded()).softmax(-1)
    expected = sum(
        (p[i] * (p[i] / q[i]).log() + q[i] * (q[i] / p[i]).log()).sum() for i in range(3)
    )
    torch.testing.assert_close(symmetric_divergence(p.log(), q.log() + 7), expected / 3)
    value = symmetric_divergence(p.log().bfloat16(), q.log().bfloat16())
    assert value.dtype == torch.float32


@pytest.mark.parametrize("noise", ["uniform", "normal"])
@pytest.mark.parametrize("build", [vit, hf_vit, roberta])
def test_noise_on_the_embeddings(build, noise):
    """The same noise added by hand, to the embeddings as the clean pass has them."""
    model, inputs = build()
    layer = embedding_layer(model)
    clean, kept = run(model, inputs), []
    handle = layer.register_forward_hook(lambda m, a, out: kept.append(out))
    run(model, inputs)
    handle.remove()
    drawn = torch.empty_like(kept[0])
    if noise == "uniform":
        drawn.uniform_(-0.1, 0.1, generator=seeded(5))
    else:
        drawn.normal_(0, 0.1, generator=seeded(5))
    handle = layer.register_forward_hook(lambda m, a, out: kept[0] + drawn)
    expected = symmetric_divergence(clean, run(model, inputs))
    handle.remove()
    loss = r3f(model, inputs, clean, 0.1, noise, seeded(5))
    assert torch.equal(loss, expected) and loss > 0
    assert torch.equal(run(model, inputs), clean)  # the hook has left
    assert not torch.equal(r3f(model, inputs, clean, 0.1, noise, seeded(6)), loss)


def test_it_is_inputs_embeds_where_padding_is_on_the_right():
    model, inputs = roberta()
    words = model.get_input_embeddings()(inputs["input_ids"])
    noise = torch.empty_like(words).normal_(0, 0.1, generator=seeded(5))
    mask = inputs["attention_mask"]
    noisy = model(inputs_embeds=words + noise, attention_mask=mask).logits
    clean = run(model, inputs)
    loss = r3f(model, inputs, clean, 0.1, generator=seeded(5))
    torch.testing.assert_close(loss, symmetric_divergence(clean, noisy), rtol=1e-8, atol=0)


def test_the_divergence_falls_with_the_square_of_the_noise():
    model, inputs = vit()
    clean = run(model, inputs)
    large, small = (r3f(model, inputs, clean, e, generator=seeded()) for e in (1e-2, 1e-3))
    assert 90 < large / small < 110


def test_gradients_flow_through_both_passes():
    model, inputs = vit()
    clean = run(model, inputs)
    clean.retain_grad()
    r3f(model, inputs, clean, 0.1).backward()
    assert clean.grad.any() and model.patch_embed.proj.weight.grad.any()
    model.zero_grad()
    r3f(model, inputs, clean.detach(), 0.1).backward()
    assert model.patch_embed.proj.weight.grad.any()


def test_bad_input():
    model, inputs = vit()
    clean = run(model, inputs)
    with pytest.raises(ValueError, match="unknown noise 'gamma': expected 'normal' or 'uniform'"):
        r3f(model, inputs, clean, noise="gamma")
    with pytest.raises(ValueError, match="epsilon is 0: expected the noise's scale, above 0"):
        r3f(model, inputs, clean, 0)
    with pytest.raises(ValueError, match="Linear has no embedding layer to put noise on"):
        r3f(nn.Linear(2, 2), inputs, clean)
    with pytest.raises(AssertionError):
        r3f(model, torch.zeros(1, 3, 4, 4).double(), clean)
    assert not model.patch_embed._forward_hooks  # also left after an error
