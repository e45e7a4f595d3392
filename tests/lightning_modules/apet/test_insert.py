"""APET's insertions: exact counts, positions by seed, the base's output at the start, and back."""

import copy
import hashlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from scipy import stats
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_modules.apet import (
    Apet,
    attach,
    bitfit,
    draw,
    insert,
    load,
    merge,
    prompt,
    save,
    strip,
    tunables,
)
from lightning_modules.apet.layer import initial_values
from lightning_modules.apet.placement import Placement, linear_layers
from lightning_modules.apet.product import add_at, product_elements
from lightning_modules.apet.prompt import add_prompt
from lightning_modules.layouts import shape_of
from lightning_modules.tuning import tune
from lightning_modules.vera.vera import add_vera, layers_of

BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def bert():
    return BertForSequenceClassification(BertConfig(vocab_size=60, num_labels=3, **BERT))


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4))


def t5():
    config = T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def llama():
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4))


def vit():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2,
        num_classes=3,
    )  # fmt: skip


MODELS = {"bert": bert, "bloom": bloom, "t5": t5, "llama": llama, "gpt2": gpt2, "vit": vit}
every_model = pytest.mark.parametrize("name", MODELS)


def made(name, dtype=torch.float32):
    """With weights of which any change shows."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()


def output(model):
    """Of fixed inputs."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, transformers.PreTrainedModel):
        ids = torch.randint(60, (3, 7), generator=generator)
        more = {"decoder_input_ids": ids[:, :4]} if model.config.is_encoder_decoder else {}
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
    dtype = next(model.parameters()).dtype
    return model(torch.randn(3, 3, 8, 8, generator=generator).to(dtype))


def still(model):
    """The output without gradients, for which attention picks one and the same kernel."""
    with torch.no_grad():
        return output(model)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def scatter(model):
    """Give every tuned parameter a value that shows."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in tunables(model).values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@every_model
@pytest.mark.parametrize("budget", [1, 2, 7, 1000, 4001])
def test_the_budget_is_met_exactly_and_the_output_is_the_base_s(name, budget):
    model = made(name)
    expected = still(model)
    insert(model, budget, seed=3)
    assert count(model) == budget
    assert torch.equal(still(model), expected)


@pytest.mark.parametrize("budget", [1, 7, 1000, 102_144, 2_409_600])
def test_the_paper_s_budgets_on_bert_base(budget):
    with torch.device("meta"):
        model = transformers.BertModel(BertConfig())
    insert(model, budget, seed=0)
    assert count(model) == budget


@every_model
def test_only_what_was_inserted_changes_and_all_of_it_has_a_gradient(name):
    model = insert(made(name), 600, seed=5)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):  # what starts at zero hides, in the first step, what it is multiplied with
        optimizer.zero_grad()
        output(model).square().sum().backward()
        optimizer.step()
    changed = {
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert changed
    assert all("apet_" in key for key in changed)
    assert all("_rest" not in key for key in changed)
    tuned = {key for key in before if "apet_" in key and "_rest" not in key}
    # an embedding's element has a gradient only if its token is read
    assert {key for key in tuned - changed if "apet_add" not in key} == set()


@pytest.mark.parametrize("operations", [["add"], ["concat"], ["plug"], ["plug", "add"]])
def test_one_operation_alone_meets_the_budget(operations):
    for budget in (1, 33, 100, 999):
        model = made("bert")
        expected = still(model)
        insert(model, budget, seed=1, operations=operations)
        assert count(model) == budget
        assert torch.equal(still(model), expected)
        scatter(model)
        assert not torch.equal(still(model), expected)


DIGEST = """
import cpu_torchvision, torch
from transformers import BertConfig, BertModel
from lightning_modules.apet import draw
with torch.device("meta"):
    model = BertModel(BertConfig())
print(draw(model, 5000, 7).digest())
"""


def test_a_seed_gives_the_same_positions_in_another_process_and_another_seed_others():
    with torch.device("meta"):
        model = transformers.BertModel(BertConfig())
    run = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == draw(model, 5000, 7).digest()
    assert draw(model, 5000, 7).digest() != draw(model, 5000, 8).digest()


def test_positions_are_pinned_across_machines_and_versions():
    with torch.device("meta"):
        model = transformers.BertModel(BertConfig())
    placement = draw(model, 9, 0, ["add"])
    where = {name: index.tolist() for name, index in placement.add.items()}
    pinned = hashlib.sha256(repr(where).encode()).hexdigest()[:16]
    assert pinned == PINNED, where


PINNED = "fd9fff3f7deb534c"


@pytest.mark.parametrize("budget", [100, 1469])  # beyond half, what stays frozen is drawn
def test_elements_are_spread_uniformly(budget):
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 9)
    )
    sizes = [parameter.numel() for parameter in model.parameters()]
    starts = dict(zip(dict(model.named_parameters()), np.cumsum([0, *sizes]), strict=False))
    hits = np.zeros(sum(sizes))
    for seed in range(200):
        for name, index in draw(model, budget, seed, ["add"]).add.items():
            hits[starts[name] + index.numpy()] += 1
    if budget > 100:
        hits = 200 - hits
    assert hits.sum() == 200 * 100
    pieces = np.array([part.sum() for part in np.array_split(hits, 50)])
    expected = np.array([len(part) for part in np.array_split(hits, 50)]) * 200 * 100 / sum(sizes)
    assert stats.chisquare(pieces, expected).pvalue > 1e-3
    assert hits.max() < 40  # 200 draws of 100 in 1,569: each element 12.7 times on average


def test_only_the_last_term_and_neuron_are_truncated():
    model = made("bert")
    layers = linear_layers(model)
    placement = draw(model, 6000, 0, ["concat", "plug"])
    truncated = {"concat": 0, "plug": 0}
    for name, (down, up) in placement.concat.items():
        outputs, inputs = shape_of(layers[name])
        truncated["concat"] += (down, up) != (up // outputs * inputs, up // outputs * outputs)
    for name, (down, biases, up, last) in placement.plug.items():
        width = shape_of(layers[name])[0]
        truncated["plug"] += (down, up, last) != (biases * width, biases * width, 0)
    assert max(truncated.values()) <= 1 and len(placement.plug) > 9


def test_a_truncated_term_or_neuron_has_all_its_parameters():
    placement = Placement(
        concat={"bert.pooler.dense": (32, 42)}, plug={"bert.pooler.dense": (32, 1, 42, 0)}
    )
    assert count(attach(made("bert"), Apet(placement))) == 32 + 42 + 32 + 1 + 42


def test_the_output_layer_takes_no_terms():
    model = made("gpt2")
    assert model.get_output_embeddings() not in linear_layers(model).values()


def test_terms_are_spread_over_the_layers_uniformly():
    with torch.device("meta"):
        model = transformers.BertModel(BertConfig(**BERT))
    names = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    hits = dict.fromkeys(names, 0)
    for seed in range(300):
        for name, (_, up) in draw(model, 2000, seed, ["concat"]).concat.items():
            hits[name] += up // model.get_submodule(name).out_features
    assert stats.chisquare(list(hits.values())).pvalue > 1e-3


@pytest.mark.parametrize("name", ["bert", "bloom", "t5", "llama", "gpt2"])
def test_merging_keeps_the_function(name):
    model = insert(made(name, torch.float64), 900, seed=2, operations=["add", "concat"])
    plain = set(MODELS[name]().state_dict())
    scatter(model)
    expected = still(model)
    assert not torch.allclose(expected, still(made(name, torch.float64)))
    merge(model)
    torch.testing.assert_close(still(model), expected, atol=1e-6, rtol=1e-6)
    assert set(model.state_dict()) == plain
    assert type(model) is type(made(name))


def test_what_cannot_merge_is_named():
    model = insert(made("bert"), 50)
    with pytest.raises(ValueError, match=r"adapters \(plug\) cannot be merged"):
        merge(model)
    assert count(strip(model)) == 0
    for placement in (prompt(3), bitfit(made("t5"))):
        model = attach(made("t5"), Apet(placement))
        with pytest.raises(ValueError, match=r"keep the model as it is, and save what .*apet.save"):
            merge(model)


class Shared(torch.nn.Module):
    """Two linear layers with one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.one(x))


def test_concat_does_not_merge_into_a_shared_weight():
    """It would change the other layer, too."""
    model = attach(Shared(), Apet(Placement(concat={"other": (4, 4)})))
    scatter(model)
    expected = model(torch.ones(1, 4))
    with pytest.raises(ValueError, match="of other cannot be .* also that of one: keep the model"):
        merge(model)
    assert torch.equal(model(torch.ones(1, 4)), expected)
    model = attach(Shared(), Apet(Placement(add={"one.weight": None})))
    scatter(model)
    expected = model(torch.ones(1, 4))
    assert torch.equal(merge(model)(torch.ones(1, 4)), expected)


def test_a_head_s_weight_is_the_head_s_under_every_name(tmp_path):
    model = insert(made("llama"), 100, heads=["lm_head"])
    assert count(model) == 100 + 60 * 32
    assert not any("embed_tokens" in name for name in tunables(model))
    scatter(model)
    with torch.no_grad():
        model.lm_head.weight.add_(0.1)
    again = load(made("llama"), save(model, tmp_path / "theta.safetensors"))
    assert torch.equal(still(again), still(model))


def test_values_keep_their_type(tmp_path):
    model = insert(made("bert"), 50, seed=3).double()
    scatter(model)
    theta = [value / 3 for value in tunables(model).values()]
    with torch.no_grad():
        for parameter, value in zip(tunables(model).values(), theta, strict=True):
            parameter.copy_(value)
    file = save(model, tmp_path / "theta.safetensors")
    again = load(made("bert", torch.float64), file)
    for parameter, value in zip(tunables(again).values(), theta, strict=True):
        assert torch.equal(parameter, value)


def test_a_file_without_one_value_is_refused_before_anything_is_changed(tmp_path):
    file = save(insert(made("bert"), 50), tmp_path / "theta.safetensors")
    with safe_open(file, "pt") as opened:
        metadata, values = opened.metadata(), opened.get_tensor("values")
    for tensors in ({"values": values[:-1]}, {}):
        save_file(tensors, file, metadata)
        base = made("bert")
        with pytest.raises(ValueError, match=r"theta.safetensors has .*expected \(50,\).*again"):
            load(base, file)
        untouched(base)


def untouched(model):
    assert not hasattr(model, "apet") and all(p.requires_grad for p in model.parameters())
    assert not any("apet" in name for name in model.state_dict())


NAME = "bert.encoder.layer.0.output.dense.weight"


@pytest.mark.parametrize(
    "index", [[3, 1], [1, 1], [-1, 2], [0, 32 * 64], [[1, 2]], [0.0, 1.0], [True, False]]
)
def test_positions_that_the_gradient_would_get_wrong_are_refused(index):
    model = made("bert")
    with pytest.raises(ValueError, match=f"{NAME} in Placement.add .*from 0 to 2047.*unique"):
        attach(model, Apet(Placement(add={NAME: torch.tensor(index)})))
    untouched(model)


@every_model
def test_saved_as_values_and_a_seed(name, tmp_path):
    model = insert(made(name), 700, seed=4)
    scatter(model)
    file = save(model, tmp_path / "deep" / "theta.safetensors")
    assert file.stat().st_size < 4 * 700 + 1000
    again = load(made(name), file)
    assert torch.equal(still(again), still(model))
    other = MODELS[name]()
    with pytest.raises(ValueError, match="other base weights"):
        load(other, file)


@pytest.mark.parametrize("heads", [["classifier"], []])
def test_what_the_base_s_files_lack_is_in_the_file(heads, tmp_path):
    """A pooler and a classifier that are drawn anew in each build, as bge-small's are."""

    def build(seed):
        model = made("bert")
        random = {n: p for n, p in model.named_parameters() if "pooler" in n or "classifier" in n}
        torch.manual_seed(seed)
        for parameter in random.values():
            torch.nn.init.normal_(parameter)
        model.at_random = frozenset(random)
        return model

    model = insert(build(1), 700, seed=4, heads=heads)
    scatter(model)
    file = save(model, tmp_path / "theta.safetensors")
    again = load(build(2), file)
    assert torch.equal(still(again), still(model))
    plain = build(2)
    del plain.at_random
    third = load(plain, save(again, tmp_path / "again.safetensors"))
    assert torch.equal(still(third), still(model))
    model.at_random = frozenset()
    before = save(model, tmp_path / "before.safetensors")  # the pooler only in the base's hash
    assert torch.equal(still(load(build(1), before)), still(model))
    with pytest.raises(ValueError, match="other base weights"):
        load(build(2), before)


def test_a_damaged_file_is_said(tmp_path):
    (tmp_path / "theta.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="theta.safetensors cannot be read as a safetensors file"):
        load(made("bert"), tmp_path / "theta.safetensors")


def test_another_model_s_positions_are_refused(tmp_path):
    model = insert(made("bert"), 700, seed=4)
    file = save(model, tmp_path / "theta.safetensors")
    with pytest.raises(ValueError, match="positions"):
        load(made("gpt2"), file)


def test_copies_and_pickles():
    model = insert(made("bert"), 500, seed=6)
    scatter(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(still(again), still(model))
        assert count(again) == 500


def test_bitfit_is_add():
    ours = attach(made("bert"), Apet(bitfit(made("bert"), heads=["classifier"]), 0))
    theirs = tune(made("bert"), "bitfit")
    classifier = sum(p.numel() for n, p in theirs.named_parameters() if n == "classifier.bias")
    assert count(ours) == count(theirs) - classifier
    same_steps(ours, theirs)


def test_a_new_bias_is_added_to_a_layer_s_output_and_to_a_norm_s(tmp_path):
    """The released code's BitFit of T5, whose output layer shares the embedding's weight here."""
    ends = ["SelfAttention.q", "wo", "layer_norm", "final_layer_norm", "lm_head"]
    placement = bitfit(made("t5"), layers=ends)
    model = attach(made("t5"), Apet(placement))
    assert count(model) == 4 * 32 + 4 * 32 + (4 + 6 + 2) * 32 + 60
    assert bitfit(made("t5"), ["lm_head"], ends).bias == placement.bias[:-1]
    assert torch.equal(still(model), still(made("t5")))
    output(model).square().sum().backward()
    assert all(parameter.grad.any() for parameter in tunables(model).values())
    scatter(model)
    changed = still(model)
    theirs = made("t5")  # the same by hooks
    for name in placement.bias:
        bias = model.get_submodule(name).apet_bias
        theirs.get_submodule(name).register_forward_hook(lambda _m, _x, y, bias=bias: y + bias)
    torch.testing.assert_close(still(theirs), changed)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(still(again), changed)
    save(model, tmp_path / "theta.safetensors")
    loaded = load(made("t5"), tmp_path / "theta.safetensors", placement)
    assert torch.equal(still(loaded), changed)
    assert torch.equal(still(strip(model)), still(made("t5")))


def test_bitfit_knows_the_bias_of_a_fused_projection():
    """nn.MultiheadAttention calls its own in_proj_bias."""
    torch.manual_seed(0)
    base = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    ours = attach(copy.deepcopy(base), Apet(bitfit(base), 0))
    theirs = tune(copy.deepcopy(base), "bitfit")
    assert count(ours) == count(theirs) == 3 * 8 + 8
    x = torch.randn(2, 3, 8, dtype=torch.double)
    for model in (ours, theirs):
        model(x, x, x)[0].square().sum().backward()
    grads = [
        torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad])
        for model in (ours, theirs)
    ]
    torch.testing.assert_close(*(grad.sort().values for grad in grads))


def test_a_new_bias_does_not_replace_one():
    model = made("bert")
    name = "bert.encoder.layer.0.output.dense"
    with pytest.raises(
        ValueError, match=f"{name} has a bias already.*{name}.bias in Placement.add"
    ):
        attach(model, Apet(Placement(bias=(name,))))
    assert all(p.requires_grad for p in model.parameters())


def same_steps(ours, theirs):
    """Both trained for three steps of SGD compute the same."""
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if name.startswith("classifier"):
                parameter.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(output(model), torch.tensor([0, 1, 2])).backward()
            optimizer.step()
    assert not torch.allclose(output(ours), output(made("bert")), atol=1e-4)
    torch.testing.assert_close(output(ours), output(theirs), atol=1e-5, rtol=1e-5)


def lora(model, targets, rank, scale=1.0):
    """Rank-one terms, `rank` of them at every target."""
    shapes = {n: shape_of(m) for n, m in linear_layers(model).items() if n.endswith(targets)}
    terms = {name: (rank * inputs, rank * outputs) for name, (outputs, inputs) in shapes.items()}
    return Placement(concat=terms, scale=scale)


def adapter(model, targets, width):
    """Neurons after the targets, `width` of them, and a bias behind them."""
    outputs = {n: shape_of(m)[0] for n, m in linear_layers(model).items() if n.endswith(targets)}
    return Placement(plug={n: (width * out, width, width * out, out) for n, out in outputs.items()})


def test_lora_is_concat():
    targets = ("query", "value")
    model = made("bert")
    ours = attach(model, Apet(lora(model, targets, rank=4, scale=8 / 4), 0))
    theirs = tune(made("bert"), "lora", rank=4, targets=targets, alpha=8)
    assert count(ours) == count(theirs) == 2 * 2 * 4 * (32 + 32)
    layers = dict(theirs.named_modules())
    with torch.no_grad():
        for name in ours.apet.placement.concat:
            w3, _ = ours.get_submodule(name).terms()
            layers[name].lora_A["default"].weight.copy_(w3)
    same_steps(ours, theirs)
    trained = still(ours)
    torch.testing.assert_close(still(merge(ours)), trained)


def test_vera_is_concat_of_the_same_rank_and_not_the_other_way_round():
    """Λ_b B Λ_d A = W_4ᵀ W_3ᵀ with W_3 = (d ⊙ A)ᵀ and W_4 = (b ⊙ B)ᵀ (rows scaled by d and b)."""
    targets, rank, generator = ("query", "value"), 4, torch.Generator().manual_seed(3)
    theirs = add_vera(made("bert", torch.float64), rank, targets)
    layers = layers_of(theirs)
    ours = attach(made("bert", torch.float64), Apet(lora(made("bert"), targets, rank=rank), 0))
    # in each of 4 layers (32 → 32): out + r numbers against r · (in + out)
    assert count(theirs) == 4 * (32 + rank) and count(ours) == 4 * rank * (32 + 32)
    ours.double()
    with torch.no_grad():
        for name, layer in layers.items():
            [piece] = layer.slices
            for vector in layer.vectors(piece):
                vector.copy_(torch.randn(vector.shape, generator=generator))
            b, d = (vector.double() for vector in layer.vectors(piece))
            a, outer = layer.matrices(piece, b, torch.float64)
            term = ours.get_submodule(name)
            term.apet_w3.copy_((d[:, None] * a).flatten())
            term.apet_w4.copy_((b[:, None] * outer).T.flatten())
    assert not torch.allclose(still(theirs), still(made("bert", torch.float64)))
    torch.testing.assert_close(still(ours), still(theirs), rtol=1e-12, atol=1e-12)

    def outside(delta, a):
        """How much of an update reads directions of the input that A does not have."""
        return (delta - delta @ torch.linalg.pinv(a) @ a).norm() / delta.norm()

    scatter(ours)
    for name, layer in layers.items():
        [piece] = layer.slices
        a, _ = layer.matrices(piece, still(theirs), torch.float64)
        w3, w4 = ours.get_submodule(name).terms()
        assert outside(layer.delta(piece, torch.float64), a) < 1e-12
        assert outside(w4.T @ w3, a) > 0.5  # no b and d of this A give it


def test_adapters_are_plug():
    targets = ("attention.output.dense", "output.dense")
    model = made("bert")
    ours = attach(model, Apet(adapter(model, targets, width=5), 0))
    theirs = tune(made("bert"), "adapter_p", rank=5)  # behind the feed-forward part only
    both = tune(made("bert"), "adapter_h", rank=5)
    for parameter_name, parameter in both.named_parameters():
        parameter.requires_grad_(".adapter." in parameter_name)
    assert count(ours) == count(both) == 2 * 2 * (2 * 32 * 5 + 5 + 32)
    assert count(theirs) * 2 == count(ours)
    with torch.no_grad():
        for name in ours.apet.placement.plug:
            both.get_submodule(f"{name}.adapter.down").weight.copy_(
                ours.get_submodule(name).neurons()[0]
            )
            both.get_submodule(f"{name}.adapter.down").bias.zero_()
    same_steps(ours, both)


def test_a_decoder_with_a_classifier_takes_no_prompt():
    """It would read the padding, and its answers depend on the batch."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "pad_token_id": 0}
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes))
    with pytest.raises(ValueError, match="would classify by padding.*LabelWordTuning"):
        add_prompt(model, 4, 0)


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_an_answer_by_positions_takes_no_prompt(name):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForQuestionAnswering")(config)
    with pytest.raises(ValueError, match=f"{name}ForQuestionAnswering answers with positions"):
        attach(model, Apet(prompt(4)))
    untouched(model)


@pytest.mark.parametrize("tokens", [-1, 2.0])
def test_a_prompt_s_length_is_a_whole_number(tokens):
    model = made("bert")
    with pytest.raises(ValueError, match=f"a prompt of {tokens} tokens is not possible"):
        attach(model, Apet(prompt(tokens)))
    untouched(model)


def test_a_prompted_model_returns_no_tuple():
    model = attach(made("bert"), Apet(prompt(4)))
    with pytest.raises(ValueError, match="leave out return_dict=False"):
        model(torch.ones(1, 3, dtype=torch.long), return_dict=False)


def test_every_output_by_token_is_cut():
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(BertConfig(vocab_size=60, **BERT))
    attach(model, Apet(prompt(4)))
    assert model(torch.ones(1, 3, dtype=torch.long)).prediction_logits.shape == (1, 3, 60)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_prompt_before_embedded_input(name):
    model = attach(made(name), Apet(prompt(4)))
    ids = torch.randint(60, (2, 6), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids[:, :2]} if name == "t5" else {}
    more["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        expected = model(input_ids=ids, **more).logits
        given = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=given, **more).logits, expected)


def test_a_prompt_begins_as_the_model_embeds_tokens():
    """Gemma 3 scales its embeddings."""
    config = transformers.Gemma3TextConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = attach(transformers.Gemma3ForCausalLM(config), Apet(prompt(5)))
    embedded = model.get_input_embeddings()(torch.arange(60))
    apart = (model.apet_prompt[:, None] - embedded).abs().amax(-1)
    assert apart.amin(1).max() == 0


def test_a_prompt_is_peft_s():
    import peft

    model = made("gpt2")
    ours = attach(copy.deepcopy(model), Apet(prompt(5), 0))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        theirs.prompt_encoder.default.embedding.weight.copy_(ours.apet_prompt)
    assert count(ours) == count(theirs) == 5 * 32
    ids = torch.randint(60, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    one = ours(input_ids=ids, attention_mask=mask, labels=ids)
    other = theirs(input_ids=ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(one.logits, other.logits[:, 5:])
    torch.testing.assert_close(one.loss, other.loss)
    assert torch.equal(ours(input_ids=ids).logits, one.logits)


def test_a_prompt_of_a_classifier_is_peft_s():
    """The pooler reads the first soft token, and not [CLS], in both."""
    import peft

    model = BertForSequenceClassification(BertConfig(vocab_size=60, **BERT)).eval()
    ours = attach(copy.deepcopy(model), Apet(prompt(5), 0))
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
    theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        theirs.prompt_encoder.default.embedding.weight.copy_(ours.apet_prompt)
    ids = torch.randint(60, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    given = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])}
    given["token_type_ids"] = (torch.arange(6) > 2).long().expand(2, -1)
    one, other = ours(**given), theirs(**given)
    torch.testing.assert_close(one.logits, other.logits)
    torch.testing.assert_close(one.loss, other.loss)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "t5"])
def test_a_prompted_model_generates_what_it_predicts(name):
    model = made(name)
    attach(model, Apet(prompt(4), 1))
    ids = torch.randint(2, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # padded on the left
    seen = model.generate(
        ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    with torch.no_grad():
        if name == "t5":
            logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=seen).logits
            assert torch.equal(logits[:, :-1].argmax(-1), seen[:, 1:])
            return
        longer = torch.cat([mask, mask.new_ones(2, 5)], 1)
        position_ids = (longer.cumsum(1) - 1).clamp(min=0)
        more = {} if name == "bloom" else {"position_ids": position_ids}
        logits = model(input_ids=seen, attention_mask=longer, **more).logits
    assert torch.equal(logits[:, 5:-1].argmax(-1), seen[:, 6:])


def test_a_prompt_s_positions_start_where_the_model_s_do():
    """RoBERTa's behind the padding token's index, whether the model counts or is given them."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.RobertaForMaskedLM(config).eval()
    attach(model, Apet(prompt(4), 1))
    ids = torch.arange(3, 9)[None]
    torch.testing.assert_close(model(ids, position_ids=ids - 1).logits, model(ids).logits)


def test_a_shared_parameter_is_tuned_once_at_every_place():
    model = made("llama", torch.float64)
    insert(model, 60 * 32 + 700, seed=0, operations=["add"])
    scatter(model)
    assert torch.equal(model.lm_head.tuned("weight"), model.model.embed_tokens.tuned("weight"))


@pytest.mark.parametrize("kind", ["concat", "plug"])
def test_layers_that_are_not_called_take_no_terms(kind):
    """EVA's attention reads the weight of its qkv, and adds a bias of its own."""
    sizes = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    model = timm.create_model("eva02_tiny_patch14_224", **sizes)
    counts = (24, 72) if kind == "concat" else (72, 1, 72, 0)
    with pytest.raises(ValueError, match="blocks.0.attn.qkv is read without calling the layer"):
        attach(model, Apet(Placement(**{kind: {"blocks.0.attn.qkv": counts}})))
    untouched(model)


def test_an_output_may_be_changed_in_place():
    """As SwinV2 changes its attention's."""
    model = insert(torch.nn.Sequential(torch.nn.Linear(4, 4)), 3, operations=["add"])
    model(torch.randn(2, 3, 4)).mul_(2).sum().backward()
    assert all(parameter.grad is not None for parameter in tunables(model).values())


def test_sampled_and_dense_gradients_agree():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(50, n, generator=generator, dtype=torch.float64) for n in (30, 40))
    index = torch.randperm(1200, generator=generator)[:1000].sort().values
    few = torch.cat([product_elements(left, right, 40, piece) for piece in index.split(20)])
    torch.testing.assert_close(few, (left.T @ right).flatten()[index])
    torch.testing.assert_close(product_elements(left, right, 40, index), few)
    left, right = left.bfloat16(), right.bfloat16()
    few = product_elements(left, right, 40, index[:20])
    assert few.dtype == torch.float32
    torch.testing.assert_close(few, (left.float().T @ right.float()).flatten()[index[:20]])


def test_elements_are_added_before_they_are_rounded():
    """256 + 1.001 is nearer to 258 than to 256, but 256 + 1, the addend in bfloat16, is not."""
    base, values = torch.full((2, 2), 256.0).bfloat16(), torch.tensor([1.001])
    for dtype in (torch.bfloat16, torch.float32):
        full = add_at(base.to(dtype), values, torch.tensor([3]), torch.bfloat16)
        assert full.flatten().tolist() == [256, 256, 256, 258]


def test_terms_and_neurons_of_a_layer_start_with_different_numbers():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    insert(model, 32, seed=0, operations=["concat", "plug"])
    w3, w5 = model[0].terms()[0], model[0].neurons()[0]
    assert w3.shape == w5.shape == (1, 8) and not (w3 == w5).any()


@pytest.mark.parametrize(
    ("budget", "operations"), [(25, ["add"]), (150, ["add", "concat", "plug"])]
)
@pytest.mark.parametrize("kind", [torch.nn.Linear, transformers.pytorch_utils.Conv1D])
def test_the_gradient_is_autograd_s(kind, budget, operations):
    torch.manual_seed(0)
    layer = kind(12, 20).double()
    model = torch.nn.Sequential(layer)
    insert(model, budget, seed=1, operations=operations)
    scatter(model)
    x = torch.randn(4, 5, *([20] if kind is not torch.nn.Linear else [12]), dtype=torch.float64)
    weights = torch.randn(4, 5, 12 if kind is not torch.nn.Linear else 20, dtype=torch.float64)

    def loss(values):
        theta = dict(zip(tunables(model), values, strict=True))
        return (torch.func.functional_call(model, theta, (x,)) * weights).sum()

    values = [p.detach().double().requires_grad_() for p in tunables(model).values()]
    assert torch.autograd.gradcheck(lambda *v: loss(v), values)


def test_initial_values_are_uniform_by_the_number_of_inputs():
    values = initial_values(0, "a layer", (500, 16))
    assert 0.249 < values.max() <= 1 / 4 and -1 / 4 <= values.min() < -0.249


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@pytest.mark.parametrize("kind", [torch.nn.Linear, transformers.pytorch_utils.Conv1D])
def test_the_pattern_of_the_sampled_elements_is_built_once(kind, through):
    torch.manual_seed(0)
    sizes = ((40, 30), (30, 20))
    model = torch.nn.Sequential(
        *(kind(*(s if kind is torch.nn.Linear else s[::-1])) for s in sizes)
    )
    insert(model, 40, seed=1, operations=["add"])
    assert not any("apet_starts" in name or "apet_columns" in name for name in model.state_dict())
    model = through(model)
    output = model(torch.randn(50, 40)).square().sum()
    with Operations() as seen:
        output.backward()
    assert seen.names.count("sparse_sampled_addmm.default") == 2
    again = [
        one for one in seen.names if one.split(".")[0] in ("searchsorted", "remainder", "arange")
    ]
    assert not again, again
    strip(model)
    assert not [name for name, _ in model.named_buffers()]


BAD = [
    ({"budget": 0}, "budget 0 is out of range"),
    ({"budget": 10**9}, "give a whole number from 1 to that"),
    ({"budget": 7.0}, "budget 7.0 is out of range"),
    ({"budget": "7"}, "budget '7' is out of range"),
    ({"budget": None}, "budget None is out of range"),
    ({"budget": True}, "budget True is out of range"),
    ({"budget": 5, "seed": -1}, "seed -1 is no whole number from 0 to"),
    ({"budget": 5, "seed": 1.5}, "seed 1.5 is no whole number from 0 to"),
    ({"budget": 5, "operations": ["prefix"]}, "expected one or more of add, concat, plug"),
    ({"budget": 5, "operations": []}, "expected one or more of"),
    ({"budget": 5, "heads": ["head"]}, "begins with one of bert"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_said_and_nothing_is_changed(arguments, message):
    model = made("bert")
    with pytest.raises(ValueError, match=message):
        insert(model, **arguments)
    assert count(model) == sum(p.numel() for p in model.parameters())


def test_an_operation_that_the_architecture_does_not_allow_is_said():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match=r"concat, plug cannot be inserted: use operations"):
        insert(model, 5)
    assert count(insert(model, 5, operations=["add"])) == 5
    model = made("vit")
    with pytest.raises(ValueError, match="embeds no tokens"):
        attach(model, Apet(prompt(3), 0))
    untouched(model)


def test_what_another_method_changed_is_refused():
    from lightning_modules.vera import add_vera

    model = add_vera(made("bert"), rank=4, targets=["query"])
    with pytest.raises(ValueError, match="merge and strip it first"):
        insert(model, 5)
    with pytest.raises(ValueError, match="strip"):
        insert(insert(made("bert"), 5), 5)


def test_heads_train_in_full_and_do_not_count():
    model = insert(made("bert"), 40, heads=["classifier"])
    assert count(model) == 40 + 3 * 32 + 3
    assert not any("classifier" in name for name in tunables(model))


def test_other_heads_are_refused_before_anything_is_changed(tmp_path):
    """Loading by names alone would leave a head of another structure untrained, in silence."""
    file = save(insert(made("bert"), 40, heads=["classifier"]), tmp_path / "theta.safetensors")
    base = made("bert")
    base.classifier = torch.nn.Sequential(base.classifier)
    with pytest.raises(ValueError, match="the head tensor classifier.0.bias has shape None"):
        load(base, file)
    assert not hasattr(base, "apet") and all(p.requires_grad for p in base.parameters())


def test_a_norm_that_trains_in_full_beside_its_elements_has_both_gradients():
    model = insert(torch.nn.Sequential(torch.nn.LayerNorm(8).double()), 5, operations=["add"])
    scatter(model)
    norm, inputs = model[0], torch.randn(3, 8, dtype=torch.float64)
    weights = torch.randn(3, 8, dtype=torch.float64)
    base = {name: norm._parameters[name].requires_grad_() for name in norm.apet_names}
    grads = torch.autograd.grad((model(inputs) * weights).sum(), list(base.values()))
    tuned = {name: norm.tuned(name).detach().requires_grad_() for name in ("weight", "bias")}
    plain = torch.nn.functional.layer_norm(inputs, (8,), tuned["weight"], tuned["bias"])
    expected = torch.autograd.grad((plain * weights).sum(), [tuned[name] for name in base])
    torch.testing.assert_close(grads, expected)


def test_an_embedding_adds_to_the_rows_that_are_read():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 6).double())
    table = model[0].weight.detach().clone()
    insert(model, 90, seed=1, operations=["add"])
    scatter(model)
    ids = torch.tensor([[3, 3, 9], [49, 0, 3]])
    whole = model[0].tuned("weight")
    assert not torch.equal(whole, table)
    assert torch.equal(model(ids), whole[ids])
    weights = torch.randn(2, 3, 6, dtype=torch.float64)
    [values] = tunables(model).values()
    [grad] = torch.autograd.grad((model(ids) * weights).sum(), values)
    [expected] = torch.autograd.grad((model[0].tuned("weight")[ids] * weights).sum(), values)
    torch.testing.assert_close(grad, expected)
    assert grad.count_nonzero() < 90
