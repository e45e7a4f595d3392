"""Low-rank weights give a dense model their ranks and their values, and decompose nothing."""

import pytest
import timm
import torch
from torch import nn

from lightning_modules.pela import factorize, plan_of
from lightning_modules.pela.checkpoint import start_from
from lightning_modules.standalone import save

NAME = "vit_tiny_patch16_224"
ARGUMENTS = {
    "num_classes": 12,
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
}


def vit():
    torch.manual_seed(0)
    return timm.create_model(NAME, **ARGUMENTS).eval()


def test_an_exported_folder_starts_a_dense_model(tmp_path):
    model = factorize(vit(), 2)
    folder = save(model, tmp_path / "low" / "rank")
    torch.manual_seed(5)
    again = timm.create_model(NAME, **ARGUMENTS).eval()
    ranks, report = start_from(again, folder)
    assert ranks == plan_of(model) == plan_of(again)
    assert not report.missing and not report.reshaped
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(again(x), model(x))


def test_dense_weights_leave_it_dense(tmp_path):
    dense, again = vit(), vit()
    ranks, _ = start_from(again, save(dense, tmp_path), ratio=2.0)
    assert ranks == {}
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(again(x), dense(x))


def test_a_layer_whose_name_begins_like_a_low_rank_one_may_start_anew(tmp_path):
    """`layers.10` is another layer than `layers.1`, whose weights the file must hold."""
    torch.manual_seed(0)
    wide = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(24, 24) for _ in range(11))})
    low_rank = factorize(wide, ranks={"layers.1": 4})
    kept = {n: v for n, v in low_rank.state_dict().items() if not n.startswith("layers.10.")}
    torch.save(kept, tmp_path / "weights.pt")
    again = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(24, 24) for _ in range(11))})
    ranks, report = start_from(again, tmp_path / "weights.pt")
    assert ranks == {"layers.1": 4}
    assert report.missing == ["layers.10.bias", "layers.10.weight"]
    lost = {n: v for n, v in kept.items() if n != "layers.1.v.weight"}
    torch.save(lost, tmp_path / "weights.pt")
    dense = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(24, 24) for _ in range(11))})
    with pytest.raises(ValueError, match=r"does not fit ModuleDict: layers\.1\.v\.weight"):
        start_from(dense, tmp_path / "weights.pt")
