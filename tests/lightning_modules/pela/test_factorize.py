"""Exact counts of the paper's models; full rank ≡ dense; the error of the factors; bad input."""

import copy

import pytest
import timm
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.pela import (
    Calibration,
    factorize,
    low_rank_layers,
    merge,
    plan_energy,
    plan_of,
    plan_uniform,
)
from lightning_modules.pela.factorize import factors, singular_values

COUNTS = [
    ("deit_base_patch16_224", 2, (), (86_567_656, "17.564"), (44_081_896, "9.194")),
    ("deit_base_patch16_224", 3, (), (86_567_656, "17.564"), (29_870_824, "6.395")),
    ("deit3_large_patch16_224", 2, (), (304_374_760, "61.555"), (153_232_360, "31.780")),
    (
        "swin_base_patch4_window7_224",
        1.5,
        ("attn.proj",),
        (87_768_224, "15.431"),
        (62_164_128, "10.904"),
    ),
]
RANKS = {
    (768, 768): (256, 192, 128),
    (768, 2304): (384, 288, 192),
    (768, 3072): (409, 307, 204),
    (1024, 4096): (546, 409, 273),
}


def small_vit(dtype=torch.float64):
    torch.manual_seed(0)
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=12, **settings).to(dtype).eval()


def small_bert(kind=BertModel, dtype=torch.float64):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return kind(config).to(dtype).eval()


def images(count=3, dtype=torch.float64):
    return torch.randn(count, 3, 16, 16, dtype=dtype, generator=torch.Generator().manual_seed(1))


def full_plan(model):
    linear = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and "head" not in n}
    return {name: min(m.in_features, m.out_features) for name, m in linear.items()}


def error(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("name", "ratio", "skip", "dense", "low_rank"), COUNTS)
def test_counts_of_the_paper(name, ratio, skip, dense, low_rank):
    with torch.device("meta"):
        model = timm.create_model(name)
    for expected in (dense, low_rank):
        macs = count_macs(model, (1, 3, 224, 224))
        assert (count_parameters(model), f"{macs / 1e9:.3f}") == expected
        if expected is dense:
            factorize(model, ratio, skip)


@pytest.mark.parametrize(("inputs", "outputs"), RANKS)
def test_ranks_of_the_paper(inputs, outputs):
    for expected, ratio in zip(RANKS[inputs, outputs], (1.5, 2, 3), strict=True):
        for a, b in ((inputs, outputs), (outputs, inputs)):
            model = nn.ModuleDict({"fc": nn.Linear(a, b, device="meta")})
            assert plan_uniform(model, ratio) == {"fc": expected}
            assert plan_of(factorize(model, ratio)) == {"fc": expected}


def test_a_rank_is_exact():
    """In floating point 24 · 24 / (0.8 · 48) is below 15."""
    assert plan_uniform(nn.ModuleDict({"fc": nn.Linear(24, 24, device="meta")}), 0.8) == {"fc": 15}


def test_which_layers_of_a_vit_are_factorised():
    model = factorize(small_vit(), 2)
    assert list(plan_of(model)) == [
        f"blocks.{i}.{part}"
        for i in range(2)
        for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ]
    assert type(model.head) is nn.Linear
    layer = model.blocks[0].mlp.fc1
    assert layer.u.bias is None and layer.v.bias is not None
    assert (layer.u.in_features, layer.u.out_features, layer.v.out_features) == (32, 12, 128)


def test_skip_takes_whole_parts_wildcards_and_few_outputs():
    model = nn.ModuleDict(
        {
            "overhead": nn.Linear(64, 64),
            "head": nn.Sequential(nn.Linear(64, 64)),
            "few": nn.Linear(64, 9),
            "blocks": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)),
        }
    )
    assert set(plan_uniform(model)) == {"overhead", "blocks.0", "blocks.1"}
    assert set(plan_uniform(model, skip=("blocks.*",))) == {"overhead"}


def test_subclasses_of_linear_and_convolutions_stay():
    attention = nn.MultiheadAttention(32, 4)  # reads out_proj.weight, a subclass of nn.Linear
    model = nn.ModuleDict({"a": attention, "conv": nn.Conv2d(16, 16, 1), "fc": nn.Linear(32, 32)})
    assert list(plan_of(factorize(model))) == ["fc"]


@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_full_rank_is_the_dense_model(method):
    model, x = small_vit(), images()
    expected = model(x)
    factorize(model, ranks=full_plan(model), method=method)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)


def test_full_rank_bert_is_the_dense_model():
    model, tokens = small_bert(), torch.arange(12).reshape(2, 6)
    expected = model(tokens).last_hidden_state
    factorize(model, ranks=full_plan(model))
    assert "encoder.layer.0.attention.self.query" in plan_of(model)
    torch.testing.assert_close(model(tokens).last_hidden_state, expected, rtol=1e-10, atol=1e-12)


def test_full_rank_with_moments_is_the_dense_model():
    model, x = small_vit(), images(8)
    expected = model(x)
    with Calibration(model) as calibration:
        model(x)
    factorize(model, ranks=full_plan(model), moments=calibration.moments())
    torch.testing.assert_close(model(x), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (30, 30)])
def test_squared_error_is_the_discarded_singular_values(shape):
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigma = torch.linalg.svdvals(weight)
    for rank in (1, 7, 20):
        u, v = factors(weight, rank)
        lost = (v @ u - weight).square().sum()
        torch.testing.assert_close(lost, sigma[rank:].square().sum(), rtol=1e-10, atol=1e-20)
        torch.testing.assert_close(u @ u.T, sigma[:rank].diag())  # √Σ on both sides
        torch.testing.assert_close(v.T @ v, sigma[:rank].diag())


@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
def test_squared_error_in_float32_is_within_its_rounding_of_the_largest_value(shape):
    """A spectrum that falls to 1e-6, below what a float32 Gram matrix resolves."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0][:, :60]
        for n in shape
    )
    sigma = torch.logspace(0, -6, 60, dtype=torch.float64)
    weight = (a * sigma @ b.T).float()
    best = torch.linalg.svdvals(weight.double()).square()
    for rank in (1, 12, 30, 60):
        u, v = (factor.double() for factor in factors(weight, rank))
        lost = (v @ u - weight.double()).square().sum()
        assert abs(lost - best[rank:].sum()) < 1e-6 * best[0]
        torch.testing.assert_close(v.norm(dim=0), u.norm(dim=1), rtol=1e-3, atol=0)


def test_a_zero_weight_has_zero_factors():
    u, v = factors(torch.zeros(12, 20), 4)
    assert v.abs().max() < 1e-15 and u.abs().max() < 1e-15


def test_autocast_does_not_round_the_factors():
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    expected = factors(weight, 10)
    with torch.autocast("cpu", torch.bfloat16):
        found = factors(weight, 10)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_error_with_moments_is_the_outputs_error():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 16, dtype=torch.float64, generator=generator)
    mix = torch.randn(16, 16, dtype=torch.float64, generator=generator)
    x = torch.randn(500, 16, dtype=torch.float64, generator=generator) @ mix
    moment = x.T @ x / len(x)
    u, v = factors(weight, 6, moment=moment)
    plain_u, plain_v = factors(weight, 6)

    def lost(u, v):
        return (x @ (v @ u - weight).T).square().sum(1).mean()

    discarded = singular_values(weight, moment)[6:].square().sum()
    torch.testing.assert_close(lost(u, v), discarded, rtol=1e-4, atol=0)  # damping is a millionth
    assert lost(u, v) < 0.8 * lost(plain_u, plain_v)


def test_randomized_is_near_the_best_repeatable_and_leaves_the_generator_alone():
    generator = torch.Generator().manual_seed(0)
    a, _ = torch.linalg.qr(torch.randn(120, 80, generator=generator))
    b, _ = torch.linalg.qr(torch.randn(80, 80, generator=generator))
    weight = a * (1 / torch.arange(1, 81)) @ b.T
    state = torch.get_rng_state()
    u, v = factors(weight, 10, randomized=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(factors(weight, 10, randomized=True)[0], u)
    best = torch.linalg.svdvals(weight)[10:].norm()
    assert (v @ u - weight).norm() < 1.001 * best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_training_mode_and_frozen_weights_are_kept(dtype):
    model = small_vit(dtype)
    model.blocks[0].mlp.fc1.requires_grad_(False)
    factorize(model)
    layer = model.blocks[0].mlp.fc1
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not any(module.training for module in model.modules())
    assert not any(p.requires_grad for p in layer.parameters())
    assert all(p.requires_grad for p in model.blocks[0].mlp.fc2.parameters())
    assert not any(p.requires_grad for p in merge(model).blocks[0].mlp.fc1.parameters())


def test_merge_gives_a_plain_model_that_computes_the_same():
    model, x = small_vit(), images()
    dense = copy.deepcopy(model)
    expected = factorize(model)(x)
    assert merge(model) is model
    assert not low_rank_layers(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)
    dense.load_state_dict(model.state_dict())


def test_the_plan_rebuilds_the_model():
    model, x = factorize(small_vit()), images()
    again = factorize(small_vit(), ranks=plan_of(model), method="empty")
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


def test_a_layer_used_twice_stays_one():
    fc = nn.Linear(32, 32)
    model = nn.Sequential(fc, nn.GELU(), fc)
    factorize(model)
    assert model[0] is model[2] and plan_of(model) == {"0": 8}
    merge(model)
    assert model[0] is model[2] and type(model[0]) is nn.Linear


@pytest.mark.parametrize("ratio", [0, -2, float("nan"), float("inf")])
def test_ratio_must_be_above_zero(ratio):
    assert f"ratio is {ratio}: expected" in error(lambda: factorize(small_vit(), ratio))


def test_rank_zero_and_rank_above_full_name_the_layer():
    message = error(lambda: factorize(small_vit(), 20))
    assert "leaves blocks.0.attn.proj (32 → 32) rank 0: give a ratio of at most 16" in message
    message = error(lambda: factorize(small_vit(), 0.4))
    assert "asks blocks.0.attn.qkv (32 → 96) for rank 60, above its full rank 32" in message


def test_nothing_to_factorise():
    message = error(lambda: factorize(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Linear(16, 9))))
    assert "nothing to factorise in Sequential" in message
    assert "nothing to factorise" in error(lambda: factorize(small_vit(), ranks={}))


def test_skip_must_fit_and_be_a_list():
    message = error(lambda: factorize(small_vit(), skip=("attn.prj",)))
    assert (
        "'attn.prj' matches no module of VisionTransformer: its linear layers are blocks.0"
        in message
    )
    assert "expected a list" in error(lambda: factorize(small_vit(), skip="head"))


def test_a_plan_that_does_not_fit():
    message = error(lambda: factorize(small_bert(), ranks={"blocks.0.attn.qkv": 3}))
    assert "does not fit BertModel: 'blocks.0.attn.qkv' is not a linear layer of it" in message
    for rank in (0, 33, 2.5):
        message = error(lambda rank=rank: factorize(small_vit(), ranks={"blocks.0.mlp.fc1": rank}))
        assert f"blocks.0.mlp.fc1 (32 → 128) rank {rank}: expected" in message
        assert "its full rank 32" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_leave_the_model_as_it_was(value):
    model = small_vit()
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight[0, 0] = value
    for call in (factorize, plan_energy):
        message = error(lambda call=call: call(model))
        assert "blocks.1.mlp.fc2.weight has NaN or infinite values" in message
    assert not low_rank_layers(model)


def test_low_rank_already_and_not_yet():
    model = small_vit()
    assert "no low-rank layer" in error(lambda: merge(model))
    plan = plan_of(factorize(model))
    for call in (lambda: factorize(model), lambda: factorize(model, ranks=plan)):
        assert "low-rank already: merge(model) first" in error(call)


def test_tied_weights_are_refused():
    model = nn.ModuleDict({"embedding": nn.Embedding(40, 32), "decoder": nn.Linear(32, 40)})
    model["decoder"].weight = model["embedding"].weight
    assert "decoder.weight is shared" in error(lambda: factorize(model))


def test_bert_keeps_its_tied_head():
    model = factorize(small_bert(BertForMaskedLM))
    assert not any(name.startswith("cls.") for name in plan_of(model))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_unknown_method():
    assert "unknown method 'qr'" in error(lambda: factorize(small_vit(), method="qr"))
