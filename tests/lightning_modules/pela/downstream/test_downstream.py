"""A low-rank model is a drop-in backbone; scores are over whole sets; checkpoints load alone."""

import math
import types

import lightning as L
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from datamodules import DetectionData, SegmentationData
from lightning_modules import standalone
from lightning_modules.pela import factorize, plan_of
from lightning_modules.pela.downstream import (
    Detection,
    Detector,
    Pyramid,
    Segmentation,
    Segmenter,
    build_backbone,
)
from lightning_modules.pela.downstream.detection import postprocess
from lightning_modules.pela.downstream.segmentation import (
    largest_class,
    segmentation_loss,
    slide,
)

VIT = "vit_tiny_patch16_224"
ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}
SWIN = ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, "depths": (1, 1, 1, 1)})
DETR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_queries": 6,
}  # fmt: skip


def images(count=2, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return timm.create_model(VIT, num_classes=5, **ARGS).eval()


@pytest.fixture(scope="module")
def dense(vit, tmp_path_factory):
    """The weights of a classifier, as Lightning saves them."""
    file = tmp_path_factory.mktemp("dense") / "last.ckpt"
    torch.save({"state_dict": {f"model.{k}": v for k, v in vit.state_dict().items()}}, file)
    return str(file)


@pytest.fixture(scope="module")
def repaired(dense, tmp_path_factory):
    """A low-rank classifier, as an export leaves it."""
    model = build_backbone(VIT, ARGS, init_from=dense)[0]
    folder = tmp_path_factory.mktemp("repaired") / "model"
    standalone.save(factorize(model, 3), folder)
    return str(folder)


def targets():
    """Two images, one of them empty."""
    square = {"seen": torch.tensor([32, 32]), "size": torch.tensor([32, 32])}
    box = {"boxes": torch.tensor([[0.5, 0.5, 0.2, 0.4]]), "class_labels": torch.tensor([1])}
    none = {"boxes": torch.zeros(0, 4), "class_labels": torch.zeros(0, dtype=torch.int64)}
    box, none = {**box, **square}, {**none, **square}
    return [box, none]


@pytest.mark.parametrize(
    ("backbone", "size", "sides"),
    [((VIT, ARGS), 32, [16, 8, 4, 2]), (SWIN, 64, [16, 8, 4, 2])],
    ids=["vit", "swin"],
)
@pytest.mark.parametrize("finest", [0, 1])
def test_four_levels_of_a_plain_and_a_hierarchical_model(backbone, size, sides, finest):
    pyramid = Pyramid(build_backbone(*backbone, ratio=2)[0], finest)
    maps = pyramid(images(size=size))
    assert [m.shape[-1] for m in maps] == [m.shape[-2] for m in maps] == sides[finest:]
    assert [m.shape[1] for m in maps] == pyramid.channels
    sum(m.square().mean() for m in maps).backward()
    assert all(p.grad is not None for p in pyramid.parameters())  # DDP would wait for it


def test_at_full_rank_the_maps_are_the_dense_ones(vit, dense):
    full = {n: min(m.in_features, m.out_features) for n, m in vit.named_modules() if fits(n, m)}
    torch.manual_seed(0)
    one = Pyramid(build_backbone(VIT, ARGS, init_from=dense)[0]).double()
    torch.manual_seed(0)
    other = Pyramid(build_backbone(VIT, ARGS, init_from=dense)[0]).double()
    factorize(other.backbone, ranks=full)
    for a, b in zip(one(images().double()), other(images().double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def fits(name, module):
    return type(module) is nn.Linear and "head" not in name


def test_a_vits_maps_are_its_blocks_outputs(vit, dense):
    pyramid = Pyramid(build_backbone(VIT, ARGS, init_from=dense)[0])
    expected = vit.forward_intermediates(images(), intermediates_only=True)[2]
    torch.testing.assert_close(pyramid(images())[2], pyramid.norms[2](expected))


def test_direct_and_repaired_backbones(dense, repaired):
    direct, plan = build_backbone(VIT, ARGS, init_from=dense, ratio=3)
    again, same = build_backbone(VIT, ARGS, init_from=repaired)
    assert plan == same == plan_of(direct)
    for name, value in direct.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value)
    assert build_backbone(VIT, ARGS, init_from=dense)[1] is None


def test_positions_are_interpolated_to_the_tasks_size(repaired):
    model, _ = build_backbone(VIT, {**ARGS, "img_size": 64}, init_from=repaired)
    assert model.pos_embed.shape == (1, 65, 32)


def test_backbones_that_do_not_fit_are_named(dense, repaired):
    with pytest.raises(ValueError, match="low-rank already, so ratio 2 would do nothing"):
        build_backbone(VIT, ARGS, init_from=repaired, ratio=2)
    _, plan = build_backbone(VIT, ARGS, init_from=repaired)
    assert build_backbone(VIT, ARGS, init_from=repaired, ranks=plan)[1] == plan
    with pytest.raises(ValueError, match="low-rank already, with ranks other than those given"):
        build_backbone(VIT, ARGS, init_from=repaired, ranks={**plan, "blocks.0.attn.qkv": 1})
    with pytest.raises(ValueError, match=r"does not fit .*: blocks.4"):
        build_backbone(VIT, {**ARGS, "depth": 6}, init_from=dense)
    with pytest.raises(ValueError, match="has no 4 feature maps"):
        Pyramid(timm.create_model(VIT, **{**ARGS, "depth": 3}))


def test_segmentation_loss_is_the_mean_over_labelled_pixels():
    main, auxiliary = torch.randn(2, 2, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(32).reshape(2, 4, 4) % 5
    labels[0, :2] = -100
    expected = F.cross_entropy(main, labels) + 0.4 * F.cross_entropy(auxiliary, labels)
    torch.testing.assert_close(segmentation_loss((main, auxiliary), labels, 0.4), expected)
    assert segmentation_loss((main, auxiliary), torch.full_like(labels, -100), 0.4) == 0


def test_segmenter_has_its_auxiliary_head_in_training_only():
    segmenter = Segmenter(Pyramid(build_backbone(VIT, ARGS)[0]), 5, channels=16)
    outputs = segmenter(images())
    assert [tuple(o.shape) for o in outputs] == [(2, 5, 32, 32)] * 2
    labels = torch.zeros(2, 32, 32, dtype=torch.int64)
    segmentation_loss(outputs, labels, 0.4).backward()
    assert all(p.grad is not None for p in segmenter.parameters())
    assert segmenter.eval()(images()).shape == (2, 5, 32, 32)


def test_miou_sums_the_whole_set_and_leaves_out_what_has_no_label(monkeypatch):
    module = Segmentation(num_classes=4, architecture=VIT, model_args=ARGS)
    logged = {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value}))
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(3, (3, 2, 8, 8), generator=generator)  # class 3 never occurs
    truth = torch.randint(3, (3, 2, 8, 8), generator=generator)
    truth[0, 0] = truth[2] = -100  # an image, and a batch that only fills up
    for predicted, labels in zip(found, truth, strict=True):
        each = iter(predicted)
        module.model = lambda _, each=each: F.one_hot(next(each), 4).permute(2, 0, 1)[None].float()
        module.score((list(images(size=8)), list(labels)))
    module.report("val")
    seen = truth != -100
    shares = []
    for kind in range(3):
        a, b = (found == kind) & seen, truth == kind
        shares.append(((a & b).sum() / (a | b).sum()).item())
    assert logged["val/miou"].item() == pytest.approx(sum(shares) / 3, abs=1e-6)
    right = (found == truth).sum() / seen.sum()
    assert logged["val/pixel_accuracy"].item() == pytest.approx(right.item(), abs=1e-6)


def test_scores_are_at_the_labels_own_size(monkeypatch):
    """By hand: an image of 2 x 2 pixels whose labels are 4 x 4 and 2 x 6."""
    module = Segmentation(num_classes=2, architecture=VIT, model_args=ARGS)
    logged = {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value}))
    # class 1 on the right: bilinear from 2 to 4 columns, the logits 0 | 4 become 0 1 3 4 against 2
    module.model = lambda x: torch.stack([torch.full_like(x[:, 0], 2.0), x[:, 0] * 4], dim=1)
    image = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).expand(3, 2, 2)
    four = torch.tensor([0, 0, 1, 1]).expand(4, 4).clone()
    four[0] = torch.tensor([1, 1, 1, -100])  # two of sixteen are wrong, one does not count
    # from 2 to 6 columns: 0 0 4/3 8/3 4 4
    six = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    assert [x.tolist() for x in module.predict_step(([image], [six]), 0)] == [
        [[0, 0, 0, 1, 1, 1]] * 2
    ]
    module.score(([image, image], [four, six]))
    module.report("val")
    # found 0: 8 + 6 pixels, of which 2 + 1 are 1; found 1: 7 + 6, all of them 1
    assert logged["val/miou"].item() == pytest.approx((11 / 14 + 13 / 16) / 2)
    assert logged["val/pixel_accuracy"].item() == pytest.approx(24 / 27)


@pytest.mark.parametrize(("height", "width"), [(6, 6), (6, 7), (6, 17), (17, 6), (6, 14)])
def test_sliding_averages_overlapping_squares(height, width):
    """mmsegmentation's loops, written out; logits that depend on where in its square a pixel is."""
    torch.manual_seed(0)
    weights = torch.randn(2, 6, 6)

    def model(squares):
        return squares.sum(1, keepdim=True) * weights

    image = torch.randn(3, height, width)
    total, count = torch.zeros(2, height, width), torch.zeros(height, width)
    crop, stride = 6, 4
    for row in range(max(height - crop + stride - 1, 0) // stride + 1):
        for column in range(max(width - crop + stride - 1, 0) // stride + 1):
            bottom, right = min(row * stride + crop, height), min(column * stride + crop, width)
            top, left = max(bottom - crop, 0), max(right - crop, 0)
            square = image[:, top:bottom, left:right]
            total[:, top:bottom, left:right] += model(square[None])[0]
            count[top:bottom, left:right] += 1
    torch.testing.assert_close(slide(model, image), total / count)


def test_batch_normalisation_that_nobody_would_synchronise_is_refused(monkeypatch):
    module = Segmentation(num_classes=4, architecture=VIT, model_args=ARGS)
    strategy = types.SimpleNamespace(_layer_sync="of trainer.sync_batchnorm")
    monkeypatch.setattr(type(module), "trainer", types.SimpleNamespace(strategy=strategy))
    module._device_mesh = "of FSDP2"
    with pytest.raises(ValueError, match="sync_batchnorm is true, which .* leaves out"):
        module.configure_model()


def test_detector_starts_with_rare_small_boxes_and_trains_every_parameter():
    detector = Detector(Pyramid(build_backbone(VIT, ARGS)[0], finest=1), 7, DETR)
    logits, boxes, loss = detector(images(), targets=targets())
    assert logits.shape == (2, 6, 7) and boxes.shape == (2, 6, 4)
    assert logits.sigmoid().mean().item() == pytest.approx(0.01, rel=0.5)
    torch.testing.assert_close(boxes[..., 2:], torch.full((2, 6, 2), 1 / (1 + math.exp(2))))
    loss.backward()
    assert all(p.grad is not None for p in detector.parameters())


def test_a_box_weighs_the_same_on_whichever_process_it_is(monkeypatch):
    pytest.importorskip("pycocotools")
    torch.manual_seed(0)
    module = Detection(num_classes=7, architecture=VIT, model_args=ARGS, detr=DETR)
    module.configure_model()
    module.eval()
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    box, none = targets()
    first, second = [box, none], [box, box]

    def gradient(*batches):
        module.zero_grad()
        for batch in batches:
            (module.training_step(batch, 0) / len(batches)).backward()  # as DDP does
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    both = images(4)
    monkeypatch.setattr(module, "all_gather", lambda boxes: boxes)
    whole = gradient((both, first + second, None))
    monkeypatch.setattr(module, "all_gather", lambda _: torch.tensor([1.0, 2.0]))
    apart = gradient((both[:2], first, None), (both[2:], second, None))
    torch.testing.assert_close(apart, whole, rtol=1e-4, atol=1e-6)


def test_postprocess_takes_the_best_pairs_and_gives_pixels():
    logits = torch.tensor([[[0.0, 3.0, -9.0], [2.0, -9.0, -9.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.2, 0.3, 0.2, 0.2]]])
    [found] = postprocess(logits, boxes, torch.tensor([[100, 50]]), most=3)
    torch.testing.assert_close(found["scores"], torch.tensor([3.0, 2.0, 0.0]).sigmoid())
    assert found["labels"].tolist() == [1, 0, 0]
    corners = torch.tensor([[20.0, 30, 30, 70], [5, 20, 15, 40], [20, 30, 30, 70]])
    torch.testing.assert_close(found["boxes"], corners)


def test_map_counts_each_box_once_and_forgives_crowds(monkeypatch):
    pytest.importorskip("pycocotools")
    module = Detection(num_classes=3, architecture=VIT, model_args=ARGS)
    logged = {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value}))
    data = DetectionData(source="generated", image_size=32, generate={"train": 2, "val": 9})
    for batch in data.val_dataloader():
        truths = [target["truth"] for target in batch[1]]
        right = [{k: t[k] for k in ("boxes", "labels")} for t in truths]  # crowds found as well
        monkeypatch.setattr(
            module,
            "detect",
            lambda _, right=right: [{**r, "scores": torch.ones(len(r["labels"]))} for r in right],
        )
        module.score(batch)
        module.score((*batch[:2], torch.full_like(batch[2], -100)))
    assert len(module.scores.groundtruth_labels) == 18  # and nine that hold nothing
    assert sum(map(len, module.scores.groundtruth_labels)) == sum(
        len(image.labels) for image in data.samples("val").images
    )
    assert any(crowd.any() for crowd in module.scores.groundtruth_crowds)
    module.report("val")
    assert logged["val/map"].item() == pytest.approx(1.0)
    assert {"val/map_50", "val/map_75", "val/map_small", "val/map_medium"} <= set(logged)


def fit(module, data, **settings):
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


@pytest.mark.parametrize("kind", [Segmentation, Detection])
def test_a_fine_tuned_checkpoint_loads_by_itself(kind, repaired, tmp_path):
    if kind is Detection:
        pytest.importorskip("pycocotools")
    task = {"channels": 16} if kind is Segmentation else {"detr": DETR}
    source = SegmentationData if kind is Segmentation else DetectionData
    data = source(source="generated", image_size=32, generate={"train": 4, "val": 2, "size": 32})
    module = kind(
        num_classes=data.num_classes, architecture=VIT, model_args=ARGS, init_from=repaired, **task
    )
    trainer = fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert set(trainer.callback_metrics) >= {
        "val/miou" if kind is Segmentation else "val/map", "train/loss"
    }  # fmt: skip
    again = kind.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert again.settings.ranks == module.settings.ranks is not None
    assert "init_from" not in again.hparams
    for name, value in module.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    predicted = trainer.predict(again, data)
    assert len(predicted) == 1

    other = kind(num_classes=9, architecture=VIT, model_args=ARGS, **task)
    with pytest.raises(ValueError, match="another model: its num_classes is"):
        other.on_load_checkpoint(torch.load(tmp_path / "last.ckpt", weights_only=True))


def test_the_backbone_learns_at_its_own_rate_and_nothing_is_left_out(monkeypatch):
    module = Segmentation(
        num_classes=4, architecture=VIT, model_args=ARGS, channels=16, lr=1.0, backbone_lr=0.1
    )
    module.configure_model()
    monkeypatch.setattr("lightning_modules.pela.downstream.module.training_steps", lambda _: 10)
    monkeypatch.setattr(type(module), "trainer", types.SimpleNamespace())
    optimizer = module.configure_optimizers()["optimizer"]
    rates = {
        id(p): (group["initial_lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(rates)
    for name, parameter in module.model.named_parameters():
        rate, decay = rates[id(parameter)]
        assert rate == (0.1 if name.startswith("pyramid.backbone") else 1.0), name
        vector = parameter.ndim < 2 or name.endswith(("pos_embed", "cls_token"))
        assert decay == (0.0 if vector else 0.05), name


@pytest.mark.parametrize("classes", [1, 5, 33])
def test_the_largest_class_is_found_a_few_classes_at_once(classes):
    logits = torch.randn(classes, 7, 9, generator=torch.Generator().manual_seed(0))
    whole = F.interpolate(logits[None], (20, 31), mode="bilinear")[0].argmax(0)
    assert torch.equal(largest_class(logits, (20, 31), at_once=4), whole)
    assert torch.equal(largest_class(torch.zeros(9, 2, 2), (3, 3), 4), torch.zeros(3, 3).long())
