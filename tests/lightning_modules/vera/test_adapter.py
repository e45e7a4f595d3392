"""A saved adapter is kilobytes, gives back the same model, and refuses any other."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lightning_modules.backbones import build_text
from lightning_modules.vera import add_vera, load_adapter, merge, save_adapter
from lightning_modules.vera.adapter import adapted_model
from lightning_modules.vera.projections import Projections
from lightning_modules.vera.vera import projections_of, vectors_of

SETTINGS = {"rank": 8, "targets": ["query", "qkv:0of3,2of3"], "heads": ["head"], "seed": 5}


class Toy(nn.Module):
    def __init__(self, width=12, classes=3):
        super().__init__()
        self.query, self.qkv = nn.Linear(width, width), nn.Linear(width, 3 * width)
        self.head = nn.Sequential(nn.Linear(3 * width, classes), nn.BatchNorm1d(classes))

    def forward(self, x):
        return self.head(self.qkv(self.query(x).tanh()))


def toy(seed=0, **sizes):
    torch.manual_seed(seed)
    return Toy(**sizes).eval()


def trained(**arguments):
    """An adapted model whose vectors and head have moved."""
    model = add_vera(toy(), **(SETTINGS | arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    if arguments.get("heads", 1):
        model.head[1].running_mean += 1
    return model


X = torch.linspace(-1, 1, 48).view(4, 12)


def test_the_adapted_part_of_a_module_is_found_whatever_its_name():
    """By the callback that saves an adapter, and by predict, which puts another in its place."""

    class Part(nn.Module):
        @property
        def tuned_model(self):
            return self.model[0]

    own, whole, part = nn.Module(), nn.Module(), Part()
    assert adapted_model(own) is None
    own.net, own.model = nn.Sequential(trained()), toy()
    whole.model, part.model = toy(), nn.Sequential(toy())
    assert adapted_model(own) is own.net[0]
    assert adapted_model(whole) is whole.model and adapted_model(part) is part.model[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"heads": []},
        {"train": ["b"], "init": "kaiming_normal"},
        {"shared": False},
    ],
)
def test_round_trip(tmp_path, arguments):
    model = trained(**arguments)
    folder = save_adapter(model, tmp_path / "new" / "adapter")
    loaded = load_adapter(toy(), folder)
    assert torch.equal(loaded(X), model(X))
    assert loaded.vera == model.vera
    flags = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (model, loaded)]
    assert flags[0] == flags[1]
    again = load_adapter(add_vera(toy(), **(SETTINGS | arguments)), folder)
    assert torch.equal(again(X), model(X))


def test_a_merged_model_saves_the_same(tmp_path):
    model = trained()
    first = save_adapter(model, tmp_path / "1")
    second = save_adapter(merge(model), tmp_path / "2")
    for name in ("manifest.json", "adapter.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    with pytest.raises(ValueError, match="merged into the weights of this Toy: call unmerge"):
        load_adapter(model, first)


@pytest.fixture
def without_pooler(tmp_path):
    """A folder of a BERT without the pooler that its classifier reads, as bge-small's is."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def from_files(folder, seed):
    """The classifier of a folder; what the folder lacks is drawn from the seed."""
    torch.manual_seed(seed)
    return build_text(str(folder), "classification", {}, pretrained=True).eval()


IDS = torch.arange(3, 13).view(2, 5)


@pytest.mark.parametrize("targets", [["query", "value"], ["all-linear"]])
def test_what_the_base_s_files_lack_is_in_the_adapter(tmp_path, without_pooler, targets):
    """A pooler, which is another one in every build, and with all-linear is adapted too."""
    model = add_vera(from_files(without_pooler, 1), 4, targets, heads=["classifier"])
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter)
    logits = model(IDS).logits
    folder = save_adapter(model, tmp_path / "adapter")
    assert "head.bert.pooler.dense.weight" in load_file(folder / "adapter.safetensors")
    by_hand = AutoModelForSequenceClassification.from_pretrained(without_pooler).eval()
    for base in (from_files(without_pooler, 2), by_hand):
        load_adapter(base, folder)
        assert torch.equal(base(IDS).logits, logits)
        again = save_adapter(merge(base), tmp_path / "again")
        for name in ("manifest.json", "adapter.safetensors"):
            assert (again / name).read_bytes() == (folder / name).read_bytes()
    other = from_files(without_pooler, 1)
    torch.nn.init.normal_(other.bert.embeddings.word_embeddings.weight)
    with pytest.raises(ValueError, match="was trained on another base"):
        load_adapter(other, folder)


def test_files_of_before_load_and_those_of_other_bases_are_as_before(tmp_path, without_pooler):
    model = add_vera(from_files(without_pooler, 1), 4, ["query"], heads=["classifier"])
    model.at_random = frozenset()  # so the pooler is only in the base's hash
    folder = save_adapter(model, tmp_path / "before")
    same = load_adapter(from_files(without_pooler, 1), folder)
    assert torch.equal(same(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="was trained on another base"):
        load_adapter(from_files(without_pooler, 2), folder)
    toys = [trained(), trained()]
    toys[1].load_state_dict(toys[0].state_dict())
    toys[1].at_random = frozenset({"head.0.weight", "head.0.bias"})  # a new head, which trains
    one, other = (save_adapter(toy, tmp_path / str(i)) for i, toy in enumerate(toys))
    for name in ("manifest.json", "adapter.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_size_for_roberta_base(tmp_path):
    """Its attention is RoBERTa-base's; only what is not adapted is smaller here."""
    config = RobertaConfig(
        vocab_size=9, intermediate_size=4, max_position_embeddings=4, num_hidden_layers=12
    )
    assert config.hidden_size == 768
    model = add_vera(RobertaForSequenceClassification(config), 1024, ["query", "value"])
    folder = save_adapter(model, tmp_path)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 43_008 * 4 + 4096


def test_matrices_can_be_written(tmp_path):
    model = trained()
    folder = save_adapter(model, tmp_path, projections=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    tensors = load_file(folder / "adapter.safetensors")
    tensors["A"] = tensors["A"] + 1  # a generator that drew others
    given = Projections(8, 12, 12, given=(tensors["A"], tensors["B"]))
    manifest["projections_sha256"] = given.sha256()
    save_file(tensors, folder / "adapter.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    loaded = load_adapter(toy(), folder)
    assert not torch.allclose(loaded(X), model(X))
    again = load_adapter(toy(), save_adapter(loaded, tmp_path / "again"))
    assert torch.equal(again(X), loaded(X))
    unique = trained(shared=False)
    with pytest.raises(ValueError, match="3 pairs of projections are not shared"):
        save_adapter(unique, tmp_path / "unique", projections=True)


def test_a_changed_generator_is_noticed(tmp_path, monkeypatch):
    folder = save_adapter(trained(), tmp_path)
    draw = Projections._draw
    monkeypatch.setattr(Projections, "_draw", lambda self: tuple(m + 1e-3 for m in draw(self)))
    model = toy()
    with pytest.raises(ValueError, match="seed 5 gives other matrices A and B in torch"):
        load_adapter(model, folder)
    untouched(model)


def untouched(model):
    assert not hasattr(model, "vera")
    assert [type(m) for m in model.modules()] == [type(m) for m in Toy().modules()]
    assert list(model.state_dict()) == list(Toy().state_dict())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda: toy(seed=1), "was trained on another base: the frozen parameters of this Toy"),
        (lambda: toy(width=6), "is of another base: query has"),
        (lambda: toy(classes=4), "head.0.* has shape .* build the model with the adapter's number"),
        (lambda: nn.Sequential(nn.Linear(12, 12)), "Sequential has no layer query"),
    ],
)
def test_another_base(tmp_path, base, message):
    folder, model = save_adapter(trained(), tmp_path), base()
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder)
    assert not hasattr(model, "vera") and all(p.requires_grad for p in model.parameters())


def test_the_same_base_in_another_type(tmp_path):
    folder = save_adapter(trained(), tmp_path)
    with pytest.raises(ValueError, match="another base"):
        load_adapter(toy().double(), folder)
    model = load_adapter(toy().double(), folder, check_base=False)
    torch.testing.assert_close(model(X.double()).float(), trained()(X))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 4}, "has rank 8, but the model has 4"),
        ({"seed": 0}, "has seed 5, but the model has 0"),
        ({"init": "uniform"}, "has init 'kaiming_uniform', but the model has 'uniform'"),
        ({"shared": False}, "has shared True, but the model has False"),
        ({"targets": "query"}, "has other targets than the model: qkv:0of3, qkv:2of3 differ"),
    ],
)
def test_another_adaptation(tmp_path, arguments, message):
    folder, model = save_adapter(trained(), tmp_path), trained(**arguments)
    before = model(X)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder)
    assert torch.equal(model(X), before)


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="no manifest.json in"):
        load_adapter(toy(), tmp_path)
    folder = save_adapter(trained(), tmp_path)
    file = folder / "manifest.json"
    text = file.read_text()
    for content, message in (
        ("{", "not readable JSON"),
        ("[]", "has format None, expected VeRA's 1"),
        (text.replace('"format": 1', '"format": 9'), "has format 9, expected VeRA's 1"),
        (text.replace('"rank": 8', '"rank": 9'), "d in .* has shape"),
        (text.replace('"seed"', '"seeds"'), "lacks seed"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_adapter(toy(), folder)
    (folder / "adapter.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no adapter.safetensors in"):
        load_adapter(toy(), folder)


def test_shards_are_put_together(tmp_path):
    """FSDP2 on one process: what is saved is the plain model's adapter."""
    from torch.distributed.fsdp import fully_shard

    plain = save_adapter(trained(), tmp_path / "plain")
    model = trained()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(model.qkv, mesh=mesh)
        fully_shard(model, mesh=mesh)
        y = model(X)
        y.sum().backward()
        torch.testing.assert_close(y, trained()(X))
        folder = save_adapter(model, tmp_path / "sharded")
    finally:
        torch.distributed.destroy_process_group()
    for name in ("manifest.json", "adapter.safetensors"):
        assert (folder / name).read_bytes() == (plain / name).read_bytes()


def test_vectors_are_named_by_layer(tmp_path):
    model = trained()
    assert list(vectors_of(model)) == ["query", "qkv:0of3", "qkv:2of3"]
    assert len(projections_of(model)) == 1
