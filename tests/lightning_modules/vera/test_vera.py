"""VeRA changes what the paper says it changes, by the numbers the paper gives."""

import copy
import pickle
from collections import OrderedDict

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CodeGenConfig,
    CodeGenForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lightning_modules.backbones import build_text
from lightning_modules.tuning import trainable
from lightning_modules.vera import add_vera, lora_factors, merge, strip, unmerge
from lightning_modules.vera.vera import layers_of, projections_of, vectors_of


class Toy(nn.Module):
    """Layers of two shapes, a fused projection and a head."""

    def __init__(self, width=12):
        super().__init__()
        self.query, self.wide = nn.Linear(width, width), nn.Linear(width, 2 * width, bias=False)
        self.qkv, self.proj = nn.Linear(2 * width, 6 * width), nn.Linear(6 * width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.proj(self.qkv(self.wide(self.query(x).tanh()).tanh()).tanh()))


ALL = ["query", "wide", "qkv:0of3,2of3", "proj"]


def toy(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return Toy().to(dtype)


def scramble(model, seed=1):
    """Give every vector some values, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for pair in vectors_of(model).values():
            for vector in pair:
                vector.copy_(torch.randn(vector.shape, generator=generator))
    return model


def forced(model, path):
    """Make every layer of the model take one path."""
    answer = (0, 1) if path == "factored" else (1, 0)
    for layer in layers_of(model).values():
        layer.costs = lambda *_: answer
    return model


def roberta(hidden, layers, heads, **kwargs):
    config = RobertaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, **kwargs
    )
    return RobertaForSequenceClassification(config)


SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2(width, layers, heads, **kwargs):
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, **SPECIAL, **kwargs)
    return GPT2LMHeadModel(config)


def llama(hidden, inner, layers, heads):
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    return LlamaForCausalLM(config)


ROBERTA = ["query", "value"]
LLAMA_7B, LLAMA_13B = (4096, 11008, 32, 32), (5120, 13824, 40, 40)


@pytest.mark.parametrize(
    ("build", "rank", "targets", "expected"),
    [
        (lambda: roberta(768, 12, 12), 1024, ROBERTA, 43_008),
        (lambda: roberta(1024, 24, 16), 256, ROBERTA, 61_440),
        (lambda: gpt2(1024, 24, 16), 1024, "c_attn:q,v", 98_304),
        (lambda: gpt2(1280, 36, 20), 1024, {"c_attn": ["q", "v"]}, 165_888),
        (lambda: gpt2(1280, 36, 20), 1024, "c_attn", 175_104),
        (lambda: timm.create_model("vit_base_patch16_224"), 256, "qkv:q,v", 24_576),
        (lambda: timm.create_model("vit_large_patch16_224"), 256, "qkv:q,v", 61_440),
        (lambda: llama(*LLAMA_7B), 1024, "all-linear", 1_589_248),
        (lambda: llama(*LLAMA_13B), 1024, "all-linear", 2_416_640),
    ],
)
def test_counts_of_the_paper(build, rank, targets, expected):
    with torch.device("meta"):
        model = build()
    before = list(model.state_dict())
    add_vera(model, rank, targets)
    trained = trainable(model)
    assert sum(p.numel() for p in trained.values()) == expected
    assert sorted(model.state_dict()) == sorted([*before, *trained])  # no A or B anywhere
    assert len(projections_of(model)) == 1


@pytest.mark.parametrize(("sizes", "expected"), [(LLAMA_7B, 159_907_840), (LLAMA_13B, 250_347_520)])
def test_counts_of_lora(sizes, expected):
    with torch.device("meta"):
        model = add_vera(llama(*sizes), 64, "all-linear")
    assert sum(a.numel() + b.numel() for a, b in lora_factors(model).values()) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [("b", "d"), ("b",), ("d",)])
def test_the_start_is_the_base(dtype, train):
    model, x = toy(dtype), torch.randn(4, 5, 12).to(dtype)
    expected = model(x)
    add_vera(model, 8, ALL, train=train, heads=["head"])
    assert torch.equal(forced(model, "factored")(x), expected)
    dense = forced(model, "dense")(x)
    # Slices are products of their own there, so the last bits are the BLAS library's.
    tight = {"rtol": 0, "atol": 1e-14} if dtype == torch.float64 else {}
    torch.testing.assert_close(dense, expected, **tight)
    names = [n for n in trainable(model) if "vera_" in n]
    assert {n.rpartition("vera_")[2][0] for n in names} == set(train)
    precise = torch.promote_types(dtype, torch.float32)
    assert {model.get_parameter(n).dtype for n in names} == {precise}
    forced(model, "factored")(x).sum().backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == set(trainable(model))
    # The first step has somewhere to go.
    assert any(model.get_parameter(n).grad.abs().sum() > 0 for n in names)


def test_whole_layers_start_at_the_base_on_the_dense_path_too():
    model, x = toy(torch.float32), torch.randn(4, 5, 12)
    expected = model(x)
    add_vera(model, 8, ["query", "wide", "qkv", "proj"])
    assert torch.equal(forced(model, "dense")(x), expected)


def test_formula():
    model, x = scramble(add_vera(toy(), 8, ALL)), torch.randn(3, 24).double()
    a, b = projections_of(model)[0].on(torch.device("cpu"), torch.float64)
    assert a.shape == (8, 72) and b.shape == (24, 8)
    layer = model.qkv
    y = F.linear(x, layer.weight, layer.bias)
    for label, rows in (("0of3", slice(0, 24)), ("2of3", slice(48, 72))):
        scale_b, scale_d = getattr(layer, f"vera_b_{label}"), getattr(layer, f"vera_d_{label}")
        y[:, rows] += x @ (scale_b.diag() @ b @ scale_d.diag() @ a[:, :24]).T
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_merged_and_back(shared):
    model, x = scramble(add_vera(toy(), 8, ALL, shared=shared)), torch.randn(4, 5, 12).double()
    weights = copy.deepcopy(model.state_dict())
    expected = model(x)
    merge(merge(model)).eval()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)
    assert not torch.equal(model.query.weight, weights["query.weight"])
    plain = strip(copy.deepcopy(model))
    unmerge(unmerge(model))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), expected)
    assert [type(m) for m in plain.modules()] == [type(m) for m in Toy().modules()]
    assert list(plain.state_dict()) == list(Toy().state_dict())
    torch.testing.assert_close(plain(x), expected, rtol=0, atol=1e-10)
    assert len({tuple(pair.sha256()) for pair in projections_of(model)}) == (1 if shared else 5)


def test_merging_holds_in_every_type():
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.01)):
        model, x = scramble(add_vera(toy(dtype), 8, ALL)), torch.randn(4, 5, 12).to(dtype)
        weights = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            expected = model(x).float()
            delta = model.query.delta(model.query.slices[0], torch.float32)
            rounded_once = (model.query.weight.float() + delta).to(dtype)
            error = (merge(model)(x).float() - expected).abs().max() / expected.abs().max()
        assert error < bound, dtype
        assert torch.equal(model.query.weight, rounded_once)
        unmerge(model)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_training_while_merged_is_refused():
    model = merge(add_vera(toy(), 8, ALL))
    with pytest.raises(RuntimeError, match="call unmerge"):
        model(torch.randn(1, 12).double())


def gradients(model, x, path):
    x = x.clone().requires_grad_()
    output = forced(copy.deepcopy(model), path)
    y = output(x)
    y.square().sum().backward()
    named = {n: p.grad for n, p in output.named_parameters() if p.grad is not None}
    return {"output": y, "input": x.grad, **named}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("build", [toy, lambda: gpt2_block()])
@pytest.mark.parametrize("weights_too", [True, False])
def test_both_paths_are_the_same(build, shared, weights_too, monkeypatch):
    model = build()
    targets = ALL if isinstance(model, Toy) else ["c_attn:q,v", "c_proj", "c_fc"]
    scramble(add_vera(model, 8, targets, shared=shared))
    if weights_too:
        model.requires_grad_(True)
    x = torch.randn(2, 7, 12).double()
    one = gradients(model, x, "factored")
    assert len(one) == 2 + sum(p.requires_grad for p in model.parameters())
    for costs in ((0, 1), (1, 0)):  # of the two ends that the backward pass can begin at
        monkeypatch.setattr(
            "lightning_modules.vera.layer._backward_costs", lambda *_, costs=costs: costs
        )
        other = gradients(model, x, "dense")
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-10, msg=name)


def gpt2_block():
    torch.manual_seed(0)
    return gpt2(12, 1, 2, vocab_size=9).transformer.h[0].double().eval()


def test_low_precision_keeps_small_changes():
    """In bfloat16 W0 + ΔW would lose a ΔW of a thousandth of W0; W0 x + ΔW x does not."""
    torch.manual_seed(0)
    layer = add_vera(nn.Sequential(nn.Linear(64, 64, bias=False)), 16, "0")
    x = torch.randn(256, 64)
    with torch.no_grad():
        layer[0].vera_b.fill_(1e-3)
        base = F.linear(x, layer[0].weight)
        exact = layer(x) - base
        layer.bfloat16()
        short = forced(layer, "dense")[0]
        update = F.linear(x.bfloat16(), short.delta(short.slices[0], torch.bfloat16))
        torch.testing.assert_close(update.float(), exact, rtol=0.05, atol=1e-5)
        by_path = [forced(layer, path)(x.bfloat16()) for path in ("factored", "dense")]
    torch.testing.assert_close(*by_path, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_low_precision_adds_outputs_and_not_weights():
    """Where the base gives zero, as the sum of the rounded weights would too."""
    torch.manual_seed(0)
    layer = add_vera(nn.Sequential(nn.Linear(64, 64, bias=False)), 16, "0")
    half = torch.randn(256, 32)
    x = torch.cat([half, half], 1)
    layer[0].weight[:, 32:] = -layer[0].weight[:, :32]
    layer[0].vera_b.fill_(1e-3)
    exact = layer(x)
    short = forced(layer.bfloat16(), "dense")(x.bfloat16()).float()
    assert (short - exact).norm() < 0.05 * exact.norm()


def test_the_path_is_chosen_by_counting():
    model = add_vera(nn.Sequential(nn.Linear(768, 768, device="meta")), 1024, "0")
    layer = model[0]
    t, n, m, r = 1024, 768, 768, 1024
    factored, dense = layer.costs(t, grad_input=True, grad=True, apart=False)
    assert factored == 2 * t * r * (n + m)
    assert dense == 2 * m * n * r + t * m * n
    low = add_vera(nn.Sequential(nn.Linear(n, m, device="meta")), 256, "0")[0]
    assert low.costs(t, True, True, False)[1] == m * n * 256 + t * 256 * (n + m)
    chosen = []
    for tokens in (1, 128, 1024, 8192):
        factored, dense = layer.costs(tokens, True, True, False)
        chosen.append(factored > dense)
    assert chosen == [False, False, True, True]

    counted = []
    layer._factored = lambda x, dtype: counted.append("factored") or x
    layer._dense = lambda x, dtype: counted.append("dense") or x
    for tokens in (8, 8192):
        model(torch.empty(tokens, 768, device="meta", requires_grad=True))
    assert counted == ["factored", "dense"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rank"), [(5, 8), (5, 64), (300, 8), (300, 64)])
@pytest.mark.parametrize("grad_input", [True, False])
@pytest.mark.parametrize("targets", ["0", "0:0of3,2of3"])
def test_the_counts_are_those_of_the_operations(dtype, tokens, rank, grad_input, targets):
    def operations(model):
        x = torch.empty(tokens, 16, device="meta", dtype=dtype, requires_grad=grad_input)
        with FlopCounterMode(display=False) as counter:
            y = model(x)
            if y.requires_grad:
                y.sum().backward()
        return counter.get_total_flops() // 2

    model = nn.Sequential(nn.Linear(16, 48, device="meta", dtype=dtype)).requires_grad_(False)
    base = operations(model)
    layer = add_vera(model, rank, targets)[0]
    costs = layer.costs(tokens, grad_input, True, apart=dtype == torch.bfloat16)
    vectors = len(layer.slices) * 48 // layer.slices[0].blocks * rank
    for path, cost in zip(("factored", "dense"), costs, strict=True):
        extra = operations(forced(model, path)) - base - cost
        # Of the two small products M d and Mᵀ b the counter knows the second only.
        assert extra == (0 if path == "factored" else vectors), path
        del layer.costs


def test_slices_touch_only_q_and_v():
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2
    )
    model.double()
    x = torch.randn(3, 17, 24).double()
    qkv = model.blocks[0].attn.qkv
    before = qkv(x).chunk(3, -1)
    scramble(add_vera(model, 8, "blocks.*.attn.qkv:q,v"))
    for path in ("factored", "dense"):
        q, k, v = forced(model, path).blocks[0].attn.qkv(x).chunk(3, -1)
        torch.testing.assert_close(k, before[1], rtol=0, atol=1e-14)
        assert not torch.allclose(q, before[0]) and not torch.allclose(v, before[2])
    weight = qkv.weight.detach().clone()
    merge(model)
    changed = [
        not torch.equal(*pair) for pair in zip(weight.chunk(3), qkv.weight.chunk(3), strict=True)
    ]
    assert changed == [True, False, True]


def one_token(model, targets):
    """The logits of one token before and after VeRA moves the targets."""
    model.double().eval()
    ids = torch.tensor([[3]])
    before = model(ids).logits
    scramble(add_vera(model, 4, targets))
    return before, model(ids).logits


def test_with_one_token_the_query_does_not_matter():
    """Attention over one position gives its value, whatever the query and key are."""
    for letter, matters in (("q", False), ("k", False), ("v", True)):
        torch.manual_seed(0)
        before, after = one_token(gpt2(12, 2, 2, vocab_size=9), f"c_attn:{letter}")
        assert torch.allclose(before, after, rtol=0, atol=1e-12) != matters, letter


BIG_CODE = {"vocab_size": 9, "n_embd": 12, "n_layer": 1, "n_head": 2, **SPECIAL}


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (
            lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**BIG_CODE, multi_query=False)),
            "c_attn",
        ),
        (lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**BIG_CODE)), "c_attn"),
        (
            lambda: CodeGenForCausalLM(
                CodeGenConfig(vocab_size=9, n_embd=16, n_layer=1, n_head=4, rotary_dim=4, **SPECIAL)
            ),
            "qkv_proj",
        ),
    ],
    ids=["by head", "multi-query", "by block"],
)
def test_fused_projections_in_another_order_are_refused(model, layer):
    """Their first third moves the values too, as one token shows."""
    torch.manual_seed(0)
    model = model()
    with pytest.raises(ValueError, match=f"{layer} .*(equal thirds|equal blocks)"):
        add_vera(model, 4, f"{layer}:q")
    assert all(p.requires_grad for p in model.parameters())
    if model.config.model_type == "codegen":
        before, after = one_token(model, f"{layer}:0of3")
        assert not torch.allclose(before, after)


def test_blocks_of_other_fused_layers():
    model, x = nn.Sequential(nn.Linear(4, 12)).double(), torch.randn(2, 4).double()
    before = model(x).chunk(2, -1)
    scramble(add_vera(model, 3, {"0": ["1of2"]}))
    after = model(x).chunk(2, -1)
    assert model[0].vera_b_1of2.shape == (6,)
    assert torch.equal(before[0], after[0]) and not torch.allclose(before[1], after[1])


def test_autocast_computes_with_one_cast_copy():
    model = scramble(add_vera(toy(torch.float32), 8, ALL))
    x = torch.randn(4, 5, 12)
    expected = model(x)
    projections = projections_of(model)[0]
    for path in ("factored", "dense"):
        forced(model, path)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            copies = {k: v for k, v in projections._copies.items() if k[1] == torch.bfloat16}
            assert len(copies) == 1
            again = projections.on(torch.device("cpu"), torch.bfloat16)
            assert again[0] is next(iter(copies.values()))[0]
        assert y.dtype == torch.bfloat16
        assert (y - expected).abs().max() < 0.05 * expected.abs().max()
        y.float().sum().backward()
        assert model.query.vera_b.grad.dtype == torch.float32


def test_inference_mode_first_then_training():
    model = add_vera(toy(torch.float32).bfloat16(), 8, ALL)
    x = torch.randn(4, 12).bfloat16()
    with torch.inference_mode():
        model(x)
    for path in ("factored", "dense"):
        forced(model, path)(x).sum().backward()


def test_copies_and_pickles_share_and_redraw():
    model, x = scramble(add_vera(toy(), 8, ALL)), torch.randn(2, 12).double()
    twin = copy.deepcopy(model)
    assert projections_of(twin)[0] is projections_of(model)[0]
    text = pickle.dumps(projections_of(model)[0])
    assert len(text) < 1000
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_inits():
    for init, low, high in (
        ("kaiming_uniform", -((6 / 72) ** 0.5), (6 / 72) ** 0.5),
        ("kaiming_normal", -1.0, 1.0),
        ("uniform", 0.0, 0.1),
    ):
        model = add_vera(toy(), 8, ALL, init=init, d_init=0.5, seed=3)
        a, _ = projections_of(model)[0].on(torch.device("cpu"), torch.float32)
        assert low <= a.min() and a.max() <= high and a.std() > 0.02
        assert model.query.vera_d.tolist() == [0.5] * 8
    wide = projections_of(add_vera(toy(), 4000, "proj", init="kaiming_normal"))[0]
    a, _ = wide.on(torch.device("cpu"), torch.float32)
    assert abs(a.std() - (2 / 72) ** 0.5) < 1e-3


class Quantised(nn.Linear):
    """Stands for bitsandbytes' layers: integer weights and a forward of its own."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)
        self.weight = nn.Parameter(torch.randint(-8, 8, (outputs, inputs)).char(), False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) / 8).T


def test_quantised_bases():
    model, x = nn.Sequential(Quantised(12, 12)), torch.randn(3, 12)
    expected = model(x)
    add_vera(model, 8, "all-linear")
    assert torch.equal(model(x), expected) and isinstance(model[0], Quantised)
    scramble(model)
    by_path = [forced(model, path)(x) for path in ("factored", "dense")]
    torch.testing.assert_close(*by_path)
    with pytest.raises(ValueError, match="of type torch.int8: an adapter can only be merged"):
        merge(model)


def test_an_output_may_be_changed_in_place():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True))
    add_vera(model, 16, "0")
    model(torch.randn(2, 64, 16)).sum().backward()  # so many tokens take the dense path
    assert all(vector.grad is not None for pair in vectors_of(model).values() for vector in pair)


def test_all_linear_takes_a_model_whose_head_is_more_than_a_layer():
    with torch.device("meta"):
        model = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=24, num_heads=(2,) * 4)
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert linear[-1] == "head.fc"
    add_vera(model, 4, "all-linear")
    assert list(model.vera.layers) == linear[:-1]


def test_all_linear_leaves_the_head():
    with torch.device("meta"):
        model = gpt2(12, 1, 2, vocab_size=9)
        distilled = timm.create_model("deit_tiny_distilled_patch16_224", depth=1)  # has two heads
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    add_vera(model, 4, "all-linear")
    assert {n.rpartition(".")[2] for n in layers_of(model)} == {"c_attn", "c_proj", "c_fc"}
    add_vera(distilled, 4, "all-linear")
    assert {n.rpartition(".")[2] for n in layers_of(distilled)} == {"qkv", "proj", "fc1", "fc2"}


def test_all_linear_leaves_the_output_layer_of_a_decoder_of_one_s_own():
    class Decoder(Toy):
        def get_output_embeddings(self):
            return self.head

    model = add_vera(Decoder(), 4, "all-linear")
    assert list(layers_of(model)) == ["query", "wide", "qkv", "proj"]


def test_all_linear_says_that_it_leaves_mixtures_of_experts():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    with torch.device("meta"):
        model = build_text("mixtral", "causal", sizes)
    with pytest.warns(UserWarning, match="of 2 modules such as model.layers.0.mlp.experts stay"):
        add_vera(model, 4, "all-linear")


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_all_linear_leaves_the_classifier_of_transformers(kind):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    sizes |= {"num_attention_heads": 2}
    if kind == "distilbert":
        sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 50}
    model = build_text(kind, "classification", sizes)
    before = {n for n, m in model.base_model.named_modules() if type(m) is nn.Linear}
    add_vera(model, 4, "all-linear")
    assert set(layers_of(model)) == {f"{model.base_model_prefix}.{name}" for name in before}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": "keys"}, r"'keys' matches no linear layer of Toy: .* query \(1\), wide"),
        ({"targets": []}, "name no layer"),
        ({"targets": "head", "heads": ["head"]}, "'head' matches no linear layer"),
        ({"targets": ["query", "q*"]}, "query is matched by two targets, the second 'q\\*'"),
        ({"targets": "qkv:q,w"}, "unknown slice 'w'"),
        ({"targets": "qkv:q,0of2"}, "do not go together"),
        ({"targets": "qkv:q"}, "how q, k and v lie in qkv is not known: .*Toy is no attention"),
        ({"targets": "head:0of2"}, "3 output features, which are not 2 equal blocks"),
        ({"rank": 0}, "rank 0 is not a whole number of at least 1"),
        ({"rank": 2.0}, "rank 2.0 is not a whole number"),
        ({"seed": -1}, "seed -1"),
        ({"d_init": float("nan")}, "d_init nan"),
        ({"init": "ones"}, "unknown init 'ones': expected kaiming_uniform"),
        ({"train": ["c"]}, "expected b, d or both"),
        ({"heads": ["neck"]}, "head 'neck' is no module of Toy: .* query, wide"),
    ],
)
def test_bad_input(arguments, message):
    model = toy()
    with pytest.raises(ValueError, match=message):
        add_vera(model, **({"rank": 8, "targets": "query"} | arguments))
    assert all(p.requires_grad for p in model.parameters())
    assert [type(m) for m in model.modules()] == [type(m) for m in Toy().modules()]


def test_a_model_built_on_meta_is_initialised_by_reset_parameters():
    reference = add_vera(toy(torch.float32), 8, ALL, d_init=0.3, seed=4)
    with torch.device("meta"):
        model = add_vera(Toy(), 8, ALL, d_init=0.3, seed=4)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, (b, d) in vectors_of(model).items():
        assert b.eq(0).all() and d.eq(0.3).all(), name
    matrices = [projections_of(m)[0].on(b.device, b.dtype) for m in (model, reference)]
    assert all(torch.equal(*pair) for pair in zip(*matrices, strict=True))
    model.load_state_dict(reference.state_dict())
    x = torch.randn(3, 12)
    assert torch.equal(model(x), reference(x))


def test_a_conv1d_built_on_meta_is_initialised():
    with torch.device("meta"):
        model = add_vera(gpt2(12, 1, 2, vocab_size=9), 4, "c_fc").transformer.h[0].mlp.c_fc
    model.to_empty(device="cpu").reset_parameters()
    assert model.vera_b.eq(0).all() and 0 < model.weight.std() < 0.05


def test_casting_a_model_leaves_the_vectors_in_float32():
    model = scramble(add_vera(toy(torch.float32), 8, ALL))
    exact = {name: (b.clone(), d.clone()) for name, (b, d) in vectors_of(model).items()}
    model(torch.randn(2, 12)).sum().backward()
    model.bfloat16()
    assert model.query.weight.dtype == torch.bfloat16
    for name, pair in vectors_of(model).items():
        assert all(vector.grad.dtype == torch.float32 for vector in pair)
        assert all(torch.equal(*both) for both in zip(pair, exact[name], strict=True))
    assert all(vector.dtype == torch.float64 for vector in vectors_of(model.double())["query"])


def low_rank(inputs=12, rank=4, outputs=12):
    return nn.Sequential(
        OrderedDict(u=nn.Linear(inputs, rank, bias=False), v=nn.Linear(rank, outputs))
    )


def test_low_rank_layers():
    model, x = toy(), torch.randn(3, 12).double()
    model.query, model.qkv = low_rank().double(), low_rank(24, 4, 72).double()
    expected = model(x)
    add_vera(model, 8, ["query", "qkv:0of3,2of3"])
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
    assert list(layers_of(model)) == ["query.u", "query.v", "qkv.v"]
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == (4 + 8) + (12 + 8) + 2 * (24 + 8)
    scramble(model)
    changed = model(x)
    assert not torch.allclose(changed, expected)
    torch.testing.assert_close(strip(merge(model))(x), changed, rtol=0, atol=1e-10)
    assert type(model.query) is nn.Sequential
    every = toy()
    every.query = low_rank().double()
    add_vera(every, 8, "all-linear")
    assert {"query.u", "query.v"} < set(layers_of(every))


class OtherLinear(nn.Linear):
    """Stands for a layer that another method has put in place."""


@pytest.mark.parametrize("targets", ["query", "all-linear", ["wide", "q*"]])
def test_layers_of_an_unknown_type_are_refused_by_name(targets):
    model = toy()
    model.query = OtherLinear(12, 12)
    with pytest.raises(ValueError, match="matches query, a OtherLinear, and VeRA knows"):
        add_vera(model, 8, targets)
    assert all(p.requires_grad for p in model.parameters()) and not hasattr(model, "vera")
    encoder = nn.TransformerEncoderLayer(12, 2, 24)
    with pytest.raises(ValueError, match="self_attn.out_proj, a NonDynamicallyQuantizableLinear"):
        add_vera(encoder, 8, "all-linear")


def test_models_that_cannot_be_adapted():
    model = add_vera(toy(), 8, "query")
    with pytest.raises(ValueError, match="has VeRA layers already"):
        add_vera(model, 8, "proj")
    for use in (merge, unmerge, strip):
        with pytest.raises(ValueError, match="Toy has no VeRA layer: call add_vera"):
            use(toy())
    tied = toy()
    tied.proj.weight = tied.qkv.weight
    with pytest.raises(ValueError, match="proj.weight is shared with another module"):
        add_vera(tied, 8, "proj")
