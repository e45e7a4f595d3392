"""The usual methods: what each trains, to the parameter, and that each starts as the base."""

import copy
import re

import pytest
import timm
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_modules.pela import factorize
from lightning_modules.tuning import Tuning, trainable, tune

METHODS = Tuning.__args__
ADDING = ("lora", "lora_fa", "randlora", "adapter_h", "adapter_l", "adapter_p", "adapter_d")
TARGETS = {"bert": ["query", "value"], "gpt2": ["c_attn"], "vit": ["qkv"]}


def bert():
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.5,
    )  # fmt: skip
    return BertForSequenceClassification(config), torch.arange(2, 12).view(2, 5)


def gpt2():
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=4, n_head=2, n_positions=16)
    return GPT2LMHeadModel(config), torch.arange(2, 12).view(2, 5)


def vit():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=4, num_heads=2,
        num_classes=3,
    )  # fmt: skip
    return model, torch.randn(2, 3, 16, 16)


FAMILIES = {"bert": bert, "gpt2": gpt2, "vit": vit}


def logits(model, inputs):
    output = model(inputs)
    return output if torch.is_tensor(output) else output.logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ADDING)
def test_what_is_added_starts_as_the_base_and_learns(family, method):
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    base = logits(model, inputs)
    tune(model, method, rank=2, targets=TARGETS[family])
    model.double()
    torch.testing.assert_close(logits(model, inputs), base, rtol=0, atol=1e-12)
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):  # the second step reaches what the zeros of the first shut off
        optimizer.zero_grad()
        logits(model, inputs).square().sum().backward()
        optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(trainable(model))


def roberta_base():
    """In the shape of RoBERTa-base, without memory."""
    with torch.device("meta"):
        return RobertaForSequenceClassification(
            RobertaConfig(vocab_size=50265, type_vocab_size=1, max_position_embeddings=514)
        )


D, LAYERS, R = 768, 12, 8
HEAD = D * D + D + D * 2 + 2
NORMS = (2 * LAYERS + 1) * 2 * D
ADAPTER = 2 * D * R + R + D


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("head", 0),
        # embeddings' norm; q, k, v, output, both norms, and the two of the feed-forward part
        ("bitfit", D + LAYERS * (4 * D + 2 * D + 3072 + D)),
        ("lora", 2 * LAYERS * 2 * D * R),
        ("lora_fa", 2 * LAYERS * D * R),
        ("adapter_h", 2 * LAYERS * ADAPTER + NORMS),
        ("adapter_l", LAYERS * (ADAPTER + 2 * D)),
        ("adapter_p", LAYERS * ADAPTER),
        ("adapter_d", LAYERS * ADAPTER + NORMS),
    ],
)
def test_counts_of_roberta_base(method, expected):
    model = roberta_base()
    whole = sum(p.numel() for p in model.parameters())
    tune(model, method, ["classifier"], R, ["query", "value"])
    assert sum(p.numel() for p in trainable(model).values()) == expected + HEAD
    assert tune(roberta_base(), "full") and whole > expected


def test_norms_and_a_pooler_can_be_left_out():
    model, _ = bert()
    norms = sum(p.numel() for n, p in model.named_parameters() if "LayerNorm" in n)
    model.bert.pooler = torch.nn.Linear(16, 16)
    counts = {
        (method, value): sum(
            p.numel()
            for p in trainable(tune(copy.deepcopy(model), method, **{key: value})).values()
        )
        for method, key in (("adapter_h", "norms"), ("adapter_d", "norms"), ("bitfit", "pooler"))
        for value in (True, False)
    }
    assert counts["adapter_h", True] - counts["adapter_h", False] == norms
    assert counts["adapter_d", True] - counts["adapter_d", False] == norms
    assert counts["bitfit", True] - counts["bitfit", False] == 16


def llama():
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def t5():
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


# of four layers: the norms before attention and feed-forward part and the last one; T5's decoder
# has one more before cross-attention, and no adapter there
@pytest.mark.parametrize(
    ("build", "norms", "adapters"), [(llama, 2 * 4 + 1, 8), (t5, (2 * 4 + 1) + (3 * 4 + 1), 16)]
)
def test_rms_norms_train_and_every_stack_has_adapters_in_its_upper_half(build, norms, adapters):
    size = 2 * 16 * 2 + 2 + 16
    for method, count in (("adapter_h", adapters), ("adapter_d", adapters // 2)):
        for trained in (True, False):
            model = tune(build(), method, rank=2, norms=trained)
            tuned = sum(p.numel() for p in trainable(model).values())
            assert tuned == count * size + trained * norms * 16
    adapted = {tuple(re.split(r"\.(\d+)\.", n)[:2]) for n in trainable(model) if ".adapter." in n}
    stacks = ["model.layers"] if build is llama else ["encoder.block", "decoder.block"]
    assert adapted == {(stack, layer) for stack in stacks for layer in "23"}


@pytest.mark.parametrize("method", ["lora", "lora_fa"])
def test_lora_drops_entries_of_its_input_while_it_trains(method):
    model, inputs = bert()
    tune(model, method, rank=2, targets=TARGETS["bert"], dropout=0.5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it starts at zero, which hides the dropout
            torch.nn.init.ones_(parameter)
    model.train()
    assert not torch.equal(logits(model, inputs), logits(model, inputs))
    model.eval()
    assert torch.equal(logits(model, inputs), logits(model, inputs))


def test_vblora_mixes_its_factors_of_one_bank():
    """2 (rank) · 16/8 (pieces) · 2 (factors) · 6 (logits) a layer, and the bank once."""
    model, inputs = bert()
    tune(model, "vblora", ["classifier"], 2, ["query", "value"], vectors=6, vector_length=8)
    parameters = trainable(model)
    head = sum(p.numel() for p in model.classifier.parameters())
    assert sum(p.numel() for p in parameters.values()) == 8 * (2 * 2 * 2 * 6) + 6 * 8 + head
    assert len([name for name in parameters if "vector_bank" in name]) == 1
    logits(model.train(), inputs).square().sum().backward()
    assert all(p.grad is not None for p in parameters.values())


def test_full_trains_everything():
    model, _ = bert()
    model.requires_grad_(False)
    assert set(trainable(tune(model, "full"))) == {name for name, _ in model.named_parameters()}


def test_an_adapted_model_can_be_copied():
    model, inputs = bert()
    tune(model.eval(), "adapter_p", rank=2)
    torch.nn.init.normal_(model.bert.encoder.layer[0].output.dense.adapter.up.weight)
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(model.bert.encoder.layer[0].output.dense.adapter.up.weight)
    assert not torch.equal(logits(twin, inputs), logits(model, inputs))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "prefix"}, "unknown method 'prefix': expected one of full, head"),
        ({"method": "lora", "rank": 0}, "rank 0 is not a whole number of at least 1"),
        ({"method": "head", "heads": ["score"]}, "begins with one of bert, dropout, classifier"),
        ({"method": "lora", "targets": ["c_attn"]}, "c_attn"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        tune(bert()[0], **arguments)


def test_adapters_are_behind_both_factors_of_a_low_rank_layer():
    model, inputs = vit()
    factorize(model.eval(), 2.0)
    before = model(inputs)
    tune(model, "adapter_h", rank=2)
    assert torch.equal(model(inputs), before)
    assert sum("adapter" in name for name in trainable(model)) == 2 * 4 * 4
    torch.nn.init.normal_(model.blocks[0].mlp.fc2.v.adapter.up.weight)
    assert not torch.equal(model(inputs), before)


def test_adapters_of_a_model_in_sixteen_bits():
    model, inputs = bert()
    before = logits(model.eval().bfloat16(), inputs)
    tune(model, "adapter_h", rank=2)
    after = logits(model, inputs)
    assert after.dtype == torch.bfloat16 and torch.equal(after, before)
    after.sum().backward()
    assert all(p.grad is not None for p in trainable(model).values())


def test_a_model_without_places_for_adapters():
    with pytest.raises(ValueError, match="Sequential has no place for adapters"):
        tune(torch.nn.Sequential(torch.nn.Linear(2, 2)), "adapter_h")
    with pytest.raises(ValueError, match="neither biases nor linear layers"):
        tune(torch.nn.Sequential(torch.nn.Embedding(2, 2)), "bitfit")


def test_apet_and_prompts_are_tuned_like_the_rest():
    model, _ = bert()
    head = sum(p.numel() for p in model.classifier.parameters())
    sizes = {"apet": {"budget": 33, "seed": 1, "operations": ["add"]}, "prompt": {"seed": 1}}
    for method, arguments in sizes.items():
        tuned = tune(copy.deepcopy(model), method, ["classifier"], 5, **arguments)
        count = sum(p.numel() for p in trainable(tuned).values()) - head
        assert count == {"apet": 33, "prompt": 5 * 16}[method]


def test_bitfit_gives_biases_to_a_model_without_any():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False))
    assert [p.numel() for p in trainable(tune(model, "bitfit")).values()] == [3]

    def with_norm():
        return torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.RMSNorm(3))

    model = tune(with_norm(), "bitfit", layers=["1"])
    assert {name: p.numel() for name, p in trainable(model).items()} == {"1.apet_bias": 3}
    with pytest.raises(
        ValueError, match="no linear layer or norm of Sequential ends in q: .* 0, 1"
    ):
        tune(with_norm(), "bitfit", layers=["1", "q"])
