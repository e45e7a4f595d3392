"""slice ≡ mask ≡ extracted, exact counts, and operations that really are saved."""

from functools import partial

import pytest
import timm
import torch
from timm.layers import GluMlp, Mlp, SwiGLU, SwiGLUPacked
from torch import nn

from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.matformer.nest import (
    GRANULARITIES,
    extract,
    nest,
    nesting_of,
    set_granularity,
)
from lightning_modules.matformer.nested_layers import Nested

HEAD_FRACTIONS = (1 / 4, 1 / 2, 3 / 4, 1)
FFNS = {
    "mlp": Mlp,
    "mlp_norm": partial(Mlp, norm_layer=nn.LayerNorm),
    "glu": GluMlp,
    "swiglu_packed": SwiGLUPacked,
    "swiglu": partial(SwiGLU, norm_layer=nn.LayerNorm),
}


def small_vit(**arguments):
    torch.manual_seed(0)
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **settings, **arguments)
    model = model.double()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide wrong slices
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def masked_forward(model, images, granularity, part):
    """The reference: the full model, with the unused neurons or heads multiplied by zero."""
    layers = {layer.name: layer for layer in nesting_of(model).layers}
    set_granularity(model, len(nesting_of(model).names) - 1)
    chosen = nesting_of(model).resolve(granularity)
    handles = []
    for layer, index in zip(layers.values(), chosen, strict=True):
        reducing = layer.layer.reducing
        features = layer.widths[index] * reducing.parts[0][1]

        def hide(module, inputs, features=features):
            mask = torch.zeros(inputs[0].shape[-1], dtype=inputs[0].dtype)
            mask[:features] = 1
            return (inputs[0] * mask,)

        handles.append(layer.module.get_submodule(reducing.path).register_forward_pre_hook(hide))
    out = model(images)
    for handle in handles:
        handle.remove()
    return out


CASES = [("ffn", name, (1 / 8, 1 / 4, 1 / 2, 1)) for name in ("mlp", "glu", "swiglu_packed")]
CASES += [("heads", "mlp", HEAD_FRACTIONS)]


@pytest.mark.parametrize(("part", "ffn", "fractions"), CASES)
@pytest.mark.parametrize("granularity", ["S", "M", "L", "XL", [0, 1, 3], [3, 0, 2]])
def test_slice_equals_mask_equals_extracted(part, ffn, fractions, granularity):
    model = small_vit(mlp_layer=FFNS[ffn])
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    nest(model, fractions, part)
    set_granularity(model, granularity)
    weight = torch.randn(2, 7, dtype=torch.float64)
    sliced = model(images)
    (sliced * weight).sum().backward()
    slice_gradients = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    masked = masked_forward(model, images, granularity, part)
    (masked * weight).sum().backward()
    torch.testing.assert_close(sliced, masked, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(slice_gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)

    small = extract(model, granularity)
    extracted = small(images)
    (extracted * weight).sum().backward()
    torch.testing.assert_close(sliced, extracted, rtol=1e-12, atol=1e-12)
    set_granularity(model, granularity)
    names = {id(m): name for name, m in model.named_modules()}
    sizes = {
        names[id(child)]: child
        for layer in nesting_of(model).layers
        for child in layer.slices().values()
    }
    for name, parameter in small.named_parameters():
        owner, _, kind = name.rpartition(".")
        expected = slice_gradients[name]
        if owner in sizes and parameter.shape != expected.shape:
            runs, axis = sizes[owner].runs, sizes[owner].axis(kind)
            expected = torch.cat([expected.narrow(axis, a, b - a) for a, b in runs], axis)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp_norm", "swiglu"])
def test_norm_over_the_hidden_state_is_that_of_the_narrow_layer(name):
    # a mask cannot serve as the reference here: the norm would count the zeros
    model = small_vit(mlp_layer=FFNS[name])
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = model(images)
    nest(model)
    assert torch.equal(model(images), expected)
    for granularity in ("S", "M", "L"):
        small = extract(model, granularity)
        native = small_vit(
            mlp_layer=FFNS[name], mlp_ratio=4 * {"S": 1 / 8, "M": 1 / 4, "L": 1 / 2}[granularity]
        )
        native.load_state_dict(small.state_dict())
        set_granularity(model, granularity)
        torch.testing.assert_close(model(images), native(images), rtol=1e-12, atol=1e-12)


def test_a_norm_keeps_its_epsilon():
    layer = nest(nn.Sequential(Mlp(8, 16, norm_layer=partial(nn.LayerNorm, eps=0.1))))
    x = torch.randn(3, 8)
    expected = extract(layer, "S")(x)
    set_granularity(layer, "S")
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("part", "fractions"), [("ffn", (1 / 8, 1 / 4, 1 / 2, 1)), ("heads", HEAD_FRACTIONS)]
)
def test_largest_is_the_original_to_the_bit(part, fractions):
    model = small_vit()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    names, logits = list(model.state_dict()), model(images)
    nest(model, fractions, part)
    assert list(model.state_dict()) == names
    assert torch.equal(model(images), logits)
    whole = extract(model, "XL")
    assert torch.equal(whole(images), logits)
    assert not any(isinstance(m, Nested) for m in whole.modules())
    assert not hasattr(whole, "nesting") and hasattr(model, "nesting")


def test_gated_attention_with_norm_slices_heads():
    from timm.layers import Attention

    torch.manual_seed(0)
    attention = Attention(
        32, 4, qkv_bias=True, qk_norm=True, scale_norm=True, gated=True, norm_layer=nn.LayerNorm
    )
    model = nest(nn.Sequential(attention).double(), HEAD_FRACTIONS, "heads")
    small = extract(model, 1)
    tokens = torch.randn(2, 5, 32, dtype=torch.float64)
    set_granularity(model, 1)
    assert torch.equal(model(tokens), small(tokens))
    assert small[0].gate.out_features == 16 and small[0].norm.normalized_shape == (16,)


# papers/matformer.md, "Counts to hold as exact tests"
COUNTS = {
    "vit_base_patch16_224": (36_221_184, 43_303_680, 57_468_672, 85_798_656),
    "vit_large_patch16_224": (127_054_848, 152_232_960, 202_589_184, 303_301_632),
}


@pytest.mark.parametrize("architecture", COUNTS)
def test_counts_of_the_paper(architecture):
    model = nest(timm.create_model(architecture, num_classes=0, device="meta"))
    counts = tuple(count_parameters(extract(model, name)) for name in GRANULARITIES)
    assert counts == COUNTS[architecture]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_multiply_adds_are_those_of_a_native_model(granularity):
    model = nest(timm.create_model("vit_base_patch16_224", device="meta"))
    ratio = dict(zip(GRANULARITIES, (0.5, 1, 2, 4), strict=True))[granularity]
    native = timm.create_model("vit_base_patch16_224", mlp_ratio=ratio, device="meta")
    shape = (1, 3, 224, 224)
    macs = count_macs(native, shape)
    set_granularity(model, granularity)
    assert count_macs(extract(model, granularity), shape) == macs
    assert count_macs(model, shape) == macs  # slicing, not masking


def test_multiply_adds_of_a_known_model():
    # papers/pela.md: deit_base_patch16_224, attention products included
    model = timm.create_model("deit_base_patch16_224", device="meta")
    assert count_parameters(model) == 86_567_656
    assert round(count_macs(model, (1, 3, 224, 224)) / 1e9, 3) == 17.564


def test_training_cost_of_the_paper():
    # 2.58 = 31/12: all four granularities against one XL; linear layers of the blocks only
    d = 768
    model = nest(timm.create_model("vit_base_patch16_224", num_classes=0, device="meta"))
    linear = [
        sum(
            m.weight.numel()
            for m in extract(model, name).blocks.modules()
            if isinstance(m, nn.Linear)
        )
        for name in GRANULARITIES
    ]
    assert linear[-1] == 12 * 12 * d * d
    assert sum(linear) / linear[-1] == 31 / 12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("XXL", "unknown granularity 'XXL': this model has S, M, L, XL, and .* as S[*]2[+]XL[*]1$"),
        ("S*1+XXL*2", "unknown granularity 'S[*]1[+]XXL[*]2'"),
        ("S*1+M*x", "unknown granularity"),
        (
            "S*1+M*1",
            r"granularity 'S\*1\+M\*1' has 2 entries: this model has 3 nested layers, give one for "
            r"each, such as S\*2\+XL\*1$",
        ),
        ("0,1", "has 2 entries"),
        ("width:S", "unknown axis 'width': this model is nested in ffn"),
        (4, "unknown granularity 4: this model has 0 to 3"),
        (-1, "unknown granularity -1"),
        ([0, 1], "has 2 entries: this model has 3 nested layers"),
        ([0, 1, 9], "unknown granularity 9"),
        (["S", "S", "M"], r"unknown granularity 'S': this model has 0 to 3 \(S, M, L, XL\)"),
    ],
)
def test_unknown_granularity(wrong, message):
    with pytest.raises(ValueError, match=message):
        set_granularity(nest(small_vit()), wrong)


def test_labels_are_understood():
    """What a report names can be typed."""
    nesting = nesting_of(nest(small_vit()))
    for chosen in ([0, 0, 0], [0, 1, 1], [3, 0, 3], [2, 1, 0]):
        assert nesting.resolve(nesting.label(chosen)) == chosen
    assert nesting.resolve("0,0,3") == [0, 0, 3] and nesting.label([0, 0, 3]) == "S*2+XL*1"
    both = nesting_of(nest(small_vit(), {"ffn": (1 / 4, 1 / 2, 1), "heads": (1 / 4, 1 / 2, 1)}))
    for chosen in ([0] * 6, [0, 1, 0, 1, 2, 2], [1, 0, 1, 0, 1, 0]):
        assert both.resolve(both.label(chosen)) == chosen
    assert both.label([1] * 6) == "1"  # and not "ffn:1,heads:1"
    assert both.resolve("ffn:0") == both.resolve({"ffn": 0})


def test_bad_nesting():
    with pytest.raises(ValueError, match="Sequential has no feed-forward network"):
        nest(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="has 4 heads: a fraction of 0.125 is 0.5 of them"):
        nest(small_vit(), part="heads")
    with pytest.raises(ValueError, match="must increase from above 0 to exactly 1"):
        nest(small_vit(), (0.5, 0.25, 1))
    with pytest.raises(ValueError, match="unknown part 'norms'"):
        nest(small_vit(), part="norms")
    with pytest.raises(ValueError, match="nested already"):
        nest(nest(small_vit()))
    with pytest.raises(ValueError, match="is not nested"):
        extract(small_vit(), "S")
    with pytest.raises(ValueError, match=r"norm is a torch.*BatchNorm1d, and only"):
        nest(nn.Sequential(Mlp(8, 16, norm_layer=nn.BatchNorm1d)))


def test_other_counts_of_granularities_go_by_number():
    model = nest(small_vit(), (0.5, 1))
    assert nesting_of(model).names == ("0", "1")
    set_granularity(model, "0")
    assert model.blocks[0].mlp.fc1.runs == ((0, 64),)
    assert nesting_of(model).label([0, 0, 1]) == "0*2+1*1"
