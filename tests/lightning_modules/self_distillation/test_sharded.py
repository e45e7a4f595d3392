"""FSDP2 on one process: outside of forward the parameters are DTensors."""

import copy

import pytest
import timm
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

from lightning_modules.backbones import shard
from lightning_modules.self_distillation import (
    MaskedAutoencoder,
    RecAdam,
    distance,
    distillation,
    mae_decoder,
    mars_project,
    mars_start,
    mask_patches,
    masked_autoencoding,
    weight_matching,
)
from lightning_modules.weights import fingerprint


@pytest.fixture
def mesh(tmp_path):
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    destroy_process_group()


def autoencoder():
    torch.manual_seed(0)
    settings = {"img_size": 12, "patch_size": 3, "embed_dim": 16, "depth": 2, "num_heads": 2}
    encoder = timm.create_model("vit_base_patch16_224.mae", num_classes=0, **settings)
    return MaskedAutoencoder(encoder, mae_decoder(encoder, 1, 12, 3)).double()


def loss_of(model, teacher):
    images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0)).double()
    mask = mask_patches(2, 16, 0.6, "bernoulli", torch.Generator().manual_seed(1))
    loss = masked_autoencoding(model, images, mask)
    return loss + distillation(model.encode(images), teacher)


def recadam(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return RecAdam(parameters, 1e-3, anneal_k=0.5, anneal_t0=2, pretrain_cof=300.0)


def train(model, optimizer, start, steps):
    teacher = torch.randn(2, 17, 16, generator=torch.Generator().manual_seed(2)).double()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, teacher)
        loss.backward()
        optimizer.step()
        mars_project(model, start, 0.02)
    return loss


@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # a Linear returns a view; none changes it
def test_it_trains_as_on_one_device(mesh):
    plain, sharded = autoencoder(), autoencoder()
    original = copy.deepcopy(plain)
    shard(sharded, mesh)
    register_fsdp_forward_method(sharded, "encode")
    start = mars_start(sharded)
    expected = train(plain, recadam(plain), mars_start(plain), 4)
    optimizer = recadam(sharded)
    train(sharded, optimizer, start, 2)

    # Resume as Lightning does: into a new optimizer, whose anchors are the trained weights.
    saved = get_optimizer_state_dict(sharded, optimizer)
    optimizer = recadam(sharded)
    set_optimizer_state_dict(sharded, optimizer, saved)
    loss = train(sharded, optimizer, start, 2)

    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    assert fingerprint(sharded.state_dict()) == fingerprint(plain.state_dict())
    gone = distance(sharded.state_dict(), original.state_dict())
    assert gone == distance(plain.state_dict(), original.state_dict()) > 0
    for norm in ("l2", "mars"):
        teacher = copy.deepcopy(original)
        expected = weight_matching(plain, teacher, norm)
        shard(teacher, mesh)
        penalty = weight_matching(sharded, teacher, norm)
        torch.testing.assert_close(penalty.full_tensor(), expected)
