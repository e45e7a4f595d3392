"""The baselines that see fewer patches: MaskAlign in the repair, and token merging (ToMe)."""

import copy

import pytest
import torch

from lightning_modules.albef import Grounding, Repair, Retrieval
from lightning_modules.pela.baselines import visible_alignment
from lightning_modules.pela.tome import add_tome
from tests.lightning_modules.albef.test_model import SIZES, small

# 16 patches for the two blocks of the image encoder
SIZES_16 = {**SIZES, "vision_args": {**SIZES["vision_args"], "patch_size": 4}}


def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_maskalign_trains_the_image_encoder_alone():
    student = small(**SIZES_16)
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        for parameter in teacher.visual_encoder.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    seen = []
    for model in (student, teacher):
        model.visual_encoder.blocks[1].register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].shape[1])
        )
    encoders = student.visual_encoder, teacher.visual_encoder
    loss = visible_alignment(*encoders, images(), student.encode_image, teacher.encode_image)
    assert seen == [1 + 5, 1 + 16]  # 30 % of the patches, and all
    loss.backward()
    trained = {name.split(".")[0] for name, p in student.named_parameters() if p.grad is not None}
    assert trained == {"visual_encoder"}
    assert student.encode_image(images()).shape[1] == 17  # as before


def test_momentum_merges_its_own_tokens():
    """It keeps the sizes of its tokens apart from the online model's."""
    module = Retrieval(sizes=SIZES_16, queue_size=6, merged_tokens=3)
    module.configure_model()
    online, average = module.model, module.momentum.model
    plain = small("retrieval", **SIZES_16)
    plain.load_state_dict(online.state_dict())
    add_tome(plain.visual_encoder, 3)
    expected = plain.encode_image(images())
    assert expected.shape[1] == 17 - 2 * 3
    half = online.eval().visual_encoder.blocks[0](online.visual_encoder.patch_embed(images()))
    assert half.shape[1] < 17  # the online model stops between its blocks
    torch.testing.assert_close(average.encode_image(images()), expected)
    torch.testing.assert_close(online.encode_image(images()), expected)
    one, other = (model.visual_encoder.blocks[0].merging for model in (online, average))
    assert one is not other and one is online.visual_encoder.blocks[1].merging


def test_merged_tokens_are_refused_where_all_patches_are_needed():
    with pytest.raises(ValueError, match="merged_tokens is 3: grounding needs a heat map"):
        Grounding(sizes=SIZES_16, queue_size=6, merged_tokens=3)
    with pytest.raises(ValueError, match="merged_tokens is 3: the repair compares all patches"):
        Repair(sizes=SIZES_16, queue_size=6, merged_tokens=3)


def test_a_phrase_without_candidate_boxes_counts_as_wrong():
    module = Grounding(sizes=SIZES_16, queue_size=6)
    module.heat = lambda batch: torch.ones(1, 4, 4)
    box = torch.tensor([0.0, 0.0, 8.0, 8.0])
    batch = {"labels": torch.tensor([0]), "size": torch.tensor([16, 16]), "box": box}
    module.score({**batch, "candidates": torch.tensor(())})
    module.score({**batch, "candidates": box[None]})
    assert module.accuracy.compute() == 0.5


def test_merged_tokens_travel_with_a_checkpoint(tmp_path):
    module = Retrieval(sizes=SIZES_16, queue_size=6, merged_tokens=3)
    module.configure_model()
    file = tmp_path / "last.ckpt"
    torch.save(
        {
            "state_dict": module.state_dict(),
            "hyper_parameters": dict(module.hparams),
            "pytorch-lightning_version": "2.5.0",
        },
        file,
    )
    loaded = Retrieval.load_from_checkpoint(file)
    assert loaded.model.encode_image(images()).shape[1] == 17 - 2 * 3

    other = Retrieval(sizes=SIZES_16, queue_size=6, merged_tokens=2)
    with pytest.raises(ValueError, match="another model: its merged_tokens is 3, this run's is 2"):
        other.on_load_checkpoint(torch.load(file, weights_only=True))
