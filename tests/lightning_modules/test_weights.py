"""Weights are read into models of other image sizes, and known again by their fingerprints."""

import argparse
import copy

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from lightning_modules.weights import fingerprint, load_completely, load_weights, read_state_dict

SMALL = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}


def vit(img_size, **changes):
    return timm.create_model("vit_tiny_patch16_224", img_size=img_size, **{**SMALL, **changes})


@pytest.mark.parametrize("changes", [{}, {"no_embed_class": True}, {"reg_tokens": 2}], ids=str)
def test_position_embeddings_are_resampled_as_timm_does(tmp_path, changes):
    source, model = vit(8, **changes), vit((16, 12), **changes)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    report = load_weights(model, tmp_path / "weights.pt")
    expected = checkpoint_filter_fn(source.state_dict(), model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert len(report.resampled) == 1 and report.resampled[0].startswith("pos_embed (1, ")
    assert "pos_embed" in report.loaded
    assert not (report.missing or report.unexpected or report.reshaped)
    assert "1 resampled: pos_embed" in str(report)


def test_position_embeddings_of_another_width_stay_as_they_were(tmp_path):
    source, model = vit(8, embed_dim=24), vit(16)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    before = model.pos_embed.clone()
    report = load_weights(model, tmp_path / "weights.pt")  # the head's bias still fits
    assert report.loaded == ["head.bias"] and not report.resampled
    assert any(name.startswith("pos_embed") for name in report.reshaped)
    assert torch.equal(model.pos_embed, before)


class Tied(nn.Module):
    """An output layer that shares the embedding's weight, as language models have it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_what_is_tied_is_not_missing(tmp_path):
    source, model = Tied(), Tied()
    torch.save({"embedding.weight": source.embedding.weight.data}, tmp_path / "weights.pt")
    assert load_weights(model, tmp_path / "weights.pt").missing == []
    assert torch.equal(model.head.weight, source.embedding.weight)


def test_a_prefix_that_is_the_model_s_own_stays(tmp_path):
    """Of a Llama with tied embeddings all names begin with "model."; a checkpoint's get it."""
    state = {"model.norm.weight": torch.ones(2)}
    save_file(state, tmp_path / "model.safetensors")
    assert read_state_dict(tmp_path).keys() == state.keys()
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    assert read_state_dict(tmp_path / "last.ckpt").keys() == {"norm.weight"}


@pytest.mark.parametrize(
    "wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "model._orig_mod."]
)
def test_a_file_of_another_trainer_is_read(tmp_path, wrapper):
    """timm's: with the arguments beside the weights, wrapped by DDP, by torch.compile, by both."""
    state = vit(8).state_dict()
    content = {"state_dict": {f"{wrapper}{name}": value for name, value in state.items()}}
    torch.save({**content, "args": argparse.Namespace(lr=0.1)}, tmp_path / "last.pth.tar")
    report = load_weights(vit(8), tmp_path / "last.pth.tar")
    assert set(report.loaded) == set(state) and not report.missing


def test_what_must_be_complete(tmp_path):
    model = vit(8)
    state = {n: v for n, v in vit(8).state_dict().items() if not n.startswith("blocks.0.attn")}
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(
        ValueError, match="not fit VisionTransformer: blocks.0.attn.proj.bias, .*; x"
    ):
        load_completely(model, tmp_path / "weights.pt", "x")
    load_completely(model, tmp_path / "weights.pt", "x", optional=["blocks.0.attn"])
    load_completely(model, tmp_path / "weights.pt", "x", required="norm.")


def test_files_that_are_no_weights(tmp_path):
    whole = tmp_path / "whole.pt"
    torch.save(vit(8).state_dict(), whole)
    files = {
        "text.ckpt": b"epoch 3: accuracy 0.7\n",
        "empty.pt": b"",
        "cut.ckpt": whole.read_bytes()[:-200],
        "text.safetensors": b"no tensors",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read as weights .*write it again"):
            read_state_dict(tmp_path / name)
    torch.save(vit(8), tmp_path / "module.pt")  # pickled code
    with pytest.raises(ValueError, match="nothing but plain types"):
        read_state_dict(tmp_path / "module.pt")


def test_a_student_begins_where_the_original_does():
    original = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    student = copy.deepcopy(original)
    assert fingerprint(student.state_dict()) == fingerprint(original.state_dict())
    with torch.no_grad():
        student[0].weight[0, 0] = torch.nextafter(
            student[0].weight[0, 0], torch.tensor(9.0).bfloat16()
        )
    assert fingerprint(student.state_dict()) != fingerprint(original.state_dict())


def test_a_fingerprint_knows_names_shapes_and_types():
    values = torch.arange(4.0)
    states = [
        {"a": values},
        {"b": values},
        {"a": values.reshape(2, 2)},
        {"a": values.view(torch.int32)},
    ]
    assert len({fingerprint(state) for state in states}) == 4
    two = {"a": values, "b": values + 1}
    assert fingerprint(two) == fingerprint(dict(reversed(two.items())))
    assert fingerprint({"a": values.reshape(2, 2).T}) != fingerprint({"a": values.reshape(2, 2)})
