"""Padding has no part in Deformable DETR; Mask R-CNN on a low-rank backbone.

torchvision's operators do not load beside a CPU build of torch: its suppression of overlapping
boxes is written out here, and its pooling is its own reference in Python.
"""

import importlib

import lightning as L
import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torchvision.ops import box_iou

from datamodules import DetectionData
from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.pela import low_rank_layers
from lightning_modules.pela.downstream import (
    Detection,
    Detector,
    MaskDetection,
    Pyramid,
    build_backbone,
)
from lightning_modules.pela.downstream.detection import pixel_mask
from lightning_modules.pela.downstream.mask_rcnn import in_pixels, regions
from lightning_modules.pela.downstream.pyramid import without_padding
from recipes.cli import parse
from recipes.pela import detection

VIT = "vit_tiny_patch16_224"
ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}
DETR = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_queries": 6,
}  # fmt: skip
FEW = {
    "rpn_pre_nms_top_n_train": 60, "rpn_pre_nms_top_n_test": 60, "rpn_post_nms_top_n_train": 30,
    "rpn_post_nms_top_n_test": 20, "box_batch_size_per_image": 16, "box_detections_per_img": 5,
}  # fmt: skip
FILE = detection.__file__.replace(".py", ".yaml")


def scattered(model):
    """With weights of which each matters."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@torch.no_grad()
def test_what_is_in_the_padding_changes_nothing():
    """The backbone's attention, the maps and the detector's attention: noise goes nowhere."""
    torch.manual_seed(1)
    detector = scattered(Detector(Pyramid(build_backbone(VIT, ARGS)[0], finest=1), 7, DETR))
    images, seen = torch.randn(3, 3, 32, 32), torch.tensor([[32, 16], [24, 32], [32, 32]])
    noisy = torch.where(pixel_mask(seen, (32, 32))[:, None], images, 5 * torch.randn_like(images))
    for one, other in zip(detector(images, seen)[:2], detector(noisy, seen)[:2], strict=True):
        torch.testing.assert_close(one, other)
    without = detector(images)[0]
    torch.testing.assert_close(detector(images, seen)[0][2], without[2])  # it has no padding
    assert not torch.allclose(detector(images, seen)[0][0], without[0], atol=1e-3)


class Local(nn.Module):
    """A pyramid whose maps say of each place what is there, and nothing else."""

    channels = (8, 8, 8)

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 8, kernel_size=1)

    def forward(self, images, seen):
        return [without_padding(self.mix(F.avg_pool2d(images, side)), seen) for side in (8, 16, 32)]


@torch.no_grad()
def test_how_much_padding_there_is_changes_nothing_either():
    """But for the statistics of its GroupNorms, which are taken out here."""
    detector = Detector(Local(), 7, DETR)
    for projection in detector.detr.model.input_proj:
        projection[1] = nn.Identity()
    scattered(detector)
    image = torch.randn(1, 3, 64, 64)
    alone = detector(image, torch.tensor([[64, 64]]))
    padded = detector(F.pad(image, (0, 64, 0, 64)), torch.tensor([[64, 64]]))
    torch.testing.assert_close(padded[0], alone[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded[1], alone[1], atol=1e-5, rtol=1e-5)
    unmasked = detector(F.pad(image, (0, 64, 0, 64)))
    assert not torch.allclose(unmasked[1], alone[1], atol=1e-3)


def test_boxes_come_back_to_where_they_are():
    """Targets go in and truths are scored in two units: a detector that finds them has mAP 1."""
    pytest.importorskip("pycocotools")
    data = DetectionData(source="generated", image_size=32, generate={"train": 2, "val": 6})
    module = Detection(num_classes=3, architecture=VIT, model_args=ARGS, detr=DETR)
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    for batch in data.val_dataloader():

        def answer(images, seen, batch=batch):
            counts = [len(target["boxes"]) for target in batch[1]]
            logits = torch.full((len(images), max(counts), 3), -20.0)
            boxes = torch.zeros(len(images), max(counts), 4)
            for i, target in enumerate(batch[1]):
                assert seen[i].tolist() == target["seen"].tolist()
                boxes[i, : counts[i]] = target["boxes"]
                logits[i, range(counts[i]), target["class_labels"]] = 20.0
            return logits, boxes, None

        module.model = answer
        module.score(batch)
    module.report("val")
    assert logged["val/map"].item() == pytest.approx(1.0)


@pytest.fixture
def operators(monkeypatch):
    """torchvision's, in Python, where they are not compiled."""
    if torchvision.extension._has_ops():
        return

    def nms(boxes, scores, threshold):
        kept = []
        for place in scores.argsort(descending=True).tolist():
            if not kept or box_iou(boxes[place][None], boxes[kept]).max() <= threshold:
                kept.append(place)
        return torch.tensor(kept, dtype=torch.int64)

    pooling = importlib.import_module("torchvision.ops.roi_align")
    monkeypatch.setattr(torchvision.ops.boxes, "nms", nms)
    monkeypatch.setattr(pooling, "_roi_align", pooling._roi_align.__wrapped__)


def mask_detection(**settings):
    pytest.importorskip("pycocotools")
    module = MaskDetection(
        num_classes=3, architecture=VIT, model_args=ARGS, ratio=3.0, rcnn=FEW, lr=1e-3, **settings
    )
    module.configure_model()
    return module


def generated(**settings):
    return DetectionData(
        source="generated", image_size=32, masks=True, generate={"train": 4, "val": 4}, **settings
    )


def test_mask_rcnn_learns_and_answers_in_pixels_of_the_originals(operators, monkeypatch):
    torch.manual_seed(0)
    data, module = generated(batch_size=2), mask_detection()
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    monkeypatch.setattr(module, "log_dict", lambda *_, **__: None)
    batch = next(iter(data.train_dataloader()))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        torch.manual_seed(0)  # which regions are drawn
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        if not losses:
            assert all(p.grad is not None for p in module.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
    assert len(low_rank_layers(module.model)) == 16
    module.eval()
    with torch.no_grad():
        found = module.detect(batch)
    assert any(len(one["boxes"]) for one in found)
    for one, target in zip(found, batch[1], strict=True):
        height, width = target["size"].tolist()
        corners = torch.tensor([width, height, width, height])
        assert (one["boxes"] >= 0).all() and (one["boxes"] <= corners + 0.01).all()
        assert one["masks"].shape == (len(one["boxes"]), height, width)
        assert set(one["labels"].tolist()) <= {0, 1, 2}


def test_what_is_found_is_put_where_it_is():
    """A box that is its whole mask, from a square of 32 to an original of 64 x 48, by hand."""
    target = {
        "boxes": torch.tensor([[0.5, 0.25, 0.5, 0.25]]),
        "class_labels": torch.tensor([2]),
        "masks": torch.ones(1, 32, 32, dtype=torch.bool),
    }
    seen, size = torch.tensor([[32, 24]]), torch.tensor([[64, 48]])
    [given] = regions([target], seen)
    assert given["boxes"].tolist() == [[6, 4, 18, 12]] and given["labels"].tolist() == [3]
    assert given["masks"].dtype == torch.uint8
    answer = {**given, "scores": torch.ones(1), "masks": torch.ones(1, 1, 28, 28)}
    [found] = in_pixels([answer], seen, size)
    assert found["boxes"].tolist() == [[12, 8, 36, 24]] and found["labels"].tolist() == [2]
    inside = torch.zeros(64, 48, dtype=torch.bool)
    inside[8:24, 12:36] = True
    assert (found["masks"][0] == inside).float().mean() > 0.96  # but for the border
    assert found["masks"][0][10:22, 14:34].all()


def test_scores_of_boxes_and_of_masks(monkeypatch):
    pytest.importorskip("pycocotools")
    module = MaskDetection(num_classes=3, architecture=VIT, model_args=ARGS)
    logged = {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value}))

    def truths(batch):
        names = ("boxes", "labels", "masks")
        for target in batch[1]:
            truth = target["truth"]
            yield {**{n: truth[n] for n in names}, "scores": torch.ones(len(truth["labels"]))}

    data = generated()
    for wrong in (False, True):
        for batch in data.val_dataloader():
            answers = list(truths(batch))
            if wrong:  # boxes are right and masks are empty
                answers = [{**one, "masks": one["masks"] & False} for one in answers]
            monkeypatch.setattr(module, "detect", lambda _, answers=answers: answers)
            module.score(batch)
        module.report("val")
        assert logged["val/map"].item() == pytest.approx(1.0)
        assert logged["val/mask_map"].item() == pytest.approx(0.0 if wrong else 1.0)
    assert {"val/map_50", "val/mask_map_75", "val/mask_map_large"} <= set(logged)


def test_mask_rcnn_says_what_it_lacks(monkeypatch):
    pytest.importorskip("pycocotools")
    module = MaskDetection(num_classes=3, architecture=VIT, model_args=ARGS)
    place = "lightning_modules.pela.downstream.detection_module._has_ops"
    monkeypatch.setattr(place, lambda: False)
    with pytest.raises(ValueError, match=r"compiled operators.*install the torchvision"):
        module.on_fit_start()
    monkeypatch.setattr(place, lambda: True)
    trainer = type("", (), {"datamodule": DetectionData(source="generated")})
    monkeypatch.setattr(MaskDetection, "trainer", trainer)
    with pytest.raises(ValueError, match="learns from masks: set --data.masks true"):
        module.on_fit_start()


def test_the_papers_preset_on_the_meta_device():
    pytest.importorskip("pycocotools")
    config = parse(FILE, "paper")
    assert config.trainer.max_epochs == 36 and config.data.init_args.batch_size * 8 == 16
    settings = config.model.init_args.as_dict()
    assert config.model.class_path.endswith("MaskDetection") and config.data.init_args.masks
    assert (settings["lr"], settings["weight_decay"]) == (1e-4, 0.05)
    assert (settings["ratio"], settings["skip"]) == (1.5, ["attn.proj"])
    sizes = {}
    for ratio in (None, settings["ratio"]):
        changed = {**settings, "num_classes": 80, "pretrained": False, "ratio": ratio}
        module = MaskDetection(**changed)
        with torch.device("meta"):
            module.configure_model()
        sizes[ratio] = count_parameters(module.model)
        side = config.data.init_args.image_size
        assert count_macs(module.counted(), (1, 3, side, side)) > 0
    # as between Swin-B's counts in papers/pela.md
    assert sizes[None] - sizes[1.5] == 87_768_224 - 62_164_128


@pytest.mark.gpu
def test_mask_rcnn_trains_on_a_gpu(tmp_path):
    """With torchvision's own operators, from the YAML's class to a checkpoint that answers."""
    data, module = generated(batch_size=2), mask_detection()
    trainer = L.Trainer(
        max_epochs=2, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    assert trainer.callback_metrics["train/loss"].isfinite()
    assert {"val/map", "val/mask_map"} <= set(trainer.callback_metrics)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = MaskDetection.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert len(trainer.predict(again, data)) == 2
