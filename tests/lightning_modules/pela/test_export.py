"""Exported files compute what the model computes, at any batch size, with the low-rank products."""

import onnx
import pytest
import timm
import torch
from torch import nn

from lightning_modules.pela import export, factorize, plan_of
from lightning_modules.pela.export import to_onnx, to_program
from lightning_modules.pela.tome import add_tome


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return factorize(vit()).eval()


def vit(depth=1):
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": depth, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=12, **settings)


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_onnx_keeps_the_factors(model, images, tmp_path):
    file = to_onnx(model.train(), tmp_path / "new" / "model.onnx", images)
    assert model.training  # the model itself is left as it was
    graph = onnx.load(file).graph
    shapes = {frozenset(tensor.dims) for tensor in graph.initializer if len(tensor.dims) == 2}
    ranks = plan_of(model)
    assert frozenset({ranks["blocks.0.mlp.fc1"], 128}) in shapes
    assert frozenset({32, 128}) not in shapes  # what the dense layer would have
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param  # a name, not a number


def test_program_runs_at_a_batch_size_it_was_not_traced_with(model, images, tmp_path):
    file = to_program(model, tmp_path / "model.pt2", images)
    many = images.repeat(4, 1, 1, 1)
    found = torch.export.load(file).module()(many)
    torch.testing.assert_close(found, model.eval()(many), rtol=1e-5, atol=1e-5)


def test_a_file_that_differs_is_refused(model, images, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.export, "load", lambda file: Wrong())
    with pytest.raises(RuntimeError, match="model.pt2 differs from the model by"):
        to_program(model, tmp_path / "model.pt2", images)


class Wrong:
    def module(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 12))


def test_one_image_would_fix_the_batch_size(model, images, tmp_path):
    for write in (export.to_onnx, export.to_program):
        with pytest.raises(ValueError, match="expected at least 2 images"):
            write(model, tmp_path / "model", images[:1])


def test_a_model_that_merges_tokens_has_one_of_the_two_forms(images, tmp_path):
    merging = add_tome(vit(depth=2), 3)
    with pytest.raises(ValueError, match=r"blocks.0 merges tokens.*--to pt2 \(or to_program\)"):
        to_onnx(merging, tmp_path / "model.onnx", images)
    assert to_program(merging, tmp_path / "model.pt2", images).is_file()
