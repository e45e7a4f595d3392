"""A batch whose rows use different adapters computes each row as its adapter alone does."""

from itertools import chain

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lightning_modules.vera import Adapters, add_vera, load_adapter, merge, save_adapter
from lightning_modules.vera.vera import layers_of, vectors_of

IDS = torch.arange(2, 26).view(4, 6)
ROWS = ["one", "two", None, "one"]


def roberta():
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=30,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=20,
        num_labels=3,
    )
    return RobertaForSequenceClassification(config).double().eval()


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=30,
        n_embd=24,
        n_layer=2,
        n_head=2,
        n_positions=30,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).double().eval()


CASES = {
    "roberta": (roberta, ["query", "value"], ["classifier"]),
    "gpt2": (gpt2, ["c_attn:q,v", "c_fc"], []),
}
every_case = pytest.mark.parametrize(("build", "targets", "heads"), CASES.values(), ids=CASES)


def write(folder, build, targets, heads, seeds=(1, 2), **arguments):
    """Adapters on disk, by name."""
    folders = {}
    settings = {"rank": 16, "targets": targets, "heads": heads} | arguments
    for name, seed in zip(("one", "two", "three"), seeds, strict=False):
        model = add_vera(build(), **settings)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.copy_(noise)
        folders[name] = save_adapter(model, folder / f"{name}{len(list(folder.iterdir()))}")
    return folders


def alone(build, folders, name):
    return build() if name is None else load_adapter(build(), folders[name])


@every_case
def test_forward(tmp_path, build, targets, heads):
    folders = write(tmp_path, build, targets, heads)
    # The model's own vectors and head are neither of the two, and the base's head is its own.
    adapters = Adapters(add_vera(build(), 16, targets, heads=heads), folders)
    for vector in chain(*vectors_of(adapters.model).values()):
        torch.nn.init.normal_(vector)
    with torch.no_grad():
        before = adapters.model(IDS).logits
        with adapters.rows(ROWS):
            mixed = adapters.model(IDS).logits
        for i, name in enumerate(ROWS):
            expected = alone(build, folders, name)(IDS[i : i + 1]).logits[0]
            torch.testing.assert_close(mixed[i], expected, rtol=0, atol=1e-10)
        assert not torch.allclose(mixed[0], before[0])
        assert torch.equal(adapters.model(IDS).logits, before)  # outside, all is as it was


def test_what_the_base_s_files_lack_differs_by_row(tmp_path):
    """RoBERTa's first layer of the classifier stands in for a pooler that each training draws."""

    def build(seed):
        model = roberta()
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.classifier.dense.weight, std=0.3)
        model.at_random = frozenset({"classifier.dense.weight", "classifier.dense.bias"})
        return model

    folders = {}
    for seed, name in enumerate(("one", "two")):
        model = add_vera(build(seed), 16, ["query"], heads=["classifier.out_proj"])
        folders[name] = save_adapter(model, tmp_path / name)
    adapters = Adapters(build(2), folders)
    with torch.no_grad(), adapters.rows(["one", "two", "one", "two"]):
        mixed = adapters.model(IDS).logits
    for i, name in enumerate(("one", "two", "one", "two")):
        expected = load_adapter(build(2), folders[name])(IDS[i : i + 1]).logits[0]
        torch.testing.assert_close(mixed[i], expected, rtol=0, atol=1e-10)
    adapted = add_vera(build(0), 16, ["classifier.dense"], heads=["classifier.out_proj"])
    with pytest.raises(ValueError, match="classifier.dense.* its module is adapted"):
        Adapters(build(1), {"one": save_adapter(adapted, tmp_path / "adapted")})


@pytest.mark.parametrize("copies", [1, 3])
def test_generation(tmp_path, copies):
    folders = write(tmp_path, *CASES["gpt2"])
    adapters = Adapters(gpt2(), folders)
    settings = {"max_new_tokens": 8, "num_beams": copies, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    with adapters.rows(ROWS, copies):
        mixed = adapters.model.generate(IDS, attention_mask=mask, **settings)
    outputs = set()
    for i, name in enumerate(ROWS):
        model, row = alone(gpt2, folders, name), slice(i, i + 1)
        expected = model.generate(IDS[row], attention_mask=mask[row], **settings)[0]
        padded = torch.zeros_like(mixed[i])  # rows that ended early are padded to the longest
        padded[: len(expected)] = expected
        assert torch.equal(mixed[i], padded)
        outputs.add(tuple(expected[6:].tolist()))
    assert len(outputs) > 1


def test_unknown_names_are_refused(tmp_path):
    folders = write(tmp_path, *CASES["gpt2"])
    adapters = Adapters(gpt2(), folders)
    assert adapters.names == ("one", "two")
    refused = pytest.raises(ValueError, match="unknown adapter 'tow': there are one, two")
    with refused, adapters.rows(["one", "tow"]):
        pass
    assert all(layer.rows is None for layer in layers_of(adapters.model).values())


def test_another_number_of_rows_is_refused(tmp_path):
    build, targets, heads = CASES["roberta"]
    adapters = Adapters(build(), write(tmp_path, build, targets, heads))
    named = pytest.raises(ValueError, match="named for 3 rows, but a layer got .* shape .4, 6, 24")
    with named, adapters.rows(["one", "two", None]):
        adapters.model(IDS)
    adapters.model(IDS)
    head = adapters.model.classifier
    with (
        pytest.raises(ValueError, match="the head classifier got an input"),
        adapters.rows(["one"]),
    ):
        head(torch.zeros(2, 1, 24).double())
    assert "forward" not in head.__dict__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 8}, "has rank 8, but the model has 16"),
        ({"seed": 1}, "has seed 1, but the model has 0"),
        ({"targets": "query"}, "other targets than the model"),
        ({"heads": []}, r"has heads \[\], but the model has \['classifier'\]"),
    ],
)
def test_strangers_are_refused(tmp_path, arguments, message):
    build, targets, heads = CASES["roberta"]
    adapters = Adapters(build(), write(tmp_path, build, targets, heads))
    settings = {"build": build, "targets": targets, "heads": heads, "seeds": (3,)}
    (stranger,) = write(tmp_path, **(settings | arguments)).values()
    with pytest.raises(ValueError, match=message):
        adapters.add("stranger", stranger)
    assert adapters.names == ("one", "two")


def test_each_adapter_s_base_is_compared(tmp_path):
    build, targets, heads = CASES["gpt2"]

    def another():
        model = build()
        torch.nn.init.normal_(model.transformer.wte.weight)
        return model

    adapters = Adapters(build(), write(tmp_path, build, targets, heads))
    (stranger,) = write(tmp_path, another, targets, heads, seeds=(3,)).values()
    with pytest.raises(ValueError, match="was trained on another base"):
        adapters.add("stranger", stranger)


def test_a_merged_model_takes_no_rows(tmp_path):
    adapters = Adapters(gpt2(), write(tmp_path, *CASES["gpt2"]))
    merge(adapters.model)
    with pytest.raises(RuntimeError, match="merged"), adapters.rows(ROWS):
        adapters.model(IDS)
