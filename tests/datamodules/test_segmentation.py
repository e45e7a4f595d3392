"""ADE20K's form: labels move down by one, "other" counts nowhere, image and labels stay aligned."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from datamodules import SegmentationData
from datamodules.scenes import SHAPES, Square
from datamodules.segmentation import read_classes, write_ade20k


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_ade20k(tmp_path_factory.mktemp("ade"), train=6, val=5, size=48)


def data(folder, **settings):
    settings = {"image_size": 32, "batch_size": 2, "mean": (0, 0, 0), "std": (1, 1, 1)} | settings
    return SegmentationData(root=str(folder), **settings)


def test_files_are_as_the_benchmark_has_them(folder):
    assert data(folder).class_names == ["wall", *SHAPES]
    assert (folder / "objectInfo150.txt").read_text().startswith("Idx\tRatio\tTrain\tVal\tStuff\t")
    with Image.open(folder / "annotations/training/ADE_train_00000001.png") as labels:
        assert labels.mode == "L" and set(np.unique(labels)) <= {0, 1, 2, 3, 4}
    again = write_ade20k(folder.parent / "again", train=6, val=5, size=48)
    for name in ("images/validation/ADE_valid_00000005.jpg", "objectInfo150.txt"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()


def test_pictures_of_every_format_are_used(tmp_path):
    folder = write_ade20k(tmp_path, train=3, val=1, size=24)
    images = folder / "images" / "training"
    for number, ending in ((1, "png"), (2, "jpeg")):
        file = images / f"ADE_train_{number:08d}.jpg"
        Image.open(file).save(file.with_suffix(f".{ending}"))
        file.unlink()
    samples = data(folder).samples("train")
    assert [image.suffix for image, _ in samples.pairs] == [".png", ".jpeg", ".jpg"]
    assert all(samples[place][0].shape == (3, 32, 32) for place in range(3))


def test_zero_is_ignored_and_classes_move_down(folder):
    samples = data(folder).samples("val")
    _, labels = samples.read(0)
    raw = torch.tensor(np.array(Image.open(samples.pairs[0][1]), dtype=np.int64))
    assert torch.equal(labels[raw > 0], raw[raw > 0].int() - 1)
    assert (labels[raw == 0] == -100).all() and (raw == 0).any()


def test_evaluation_resizes_the_shorter_side_and_leaves_the_labels_alone(folder):
    shapes = set()
    for index in range(5):
        samples = data(folder).samples("val")
        image, labels = samples[index]
        file = Image.open(samples.pairs[index][0])
        short = min(file.size)
        assert image.shape == (3, *(side * 32 // short for side in (file.height, file.width)))
        assert min(image.shape[1:]) == 32
        assert labels.shape == (file.height, file.width) and labels.dtype == torch.int64
        assert type(image) is type(labels) is torch.Tensor
        assert torch.equal(labels, samples.read(index)[1].long())
        assert torch.equal(image, samples[index][0])  # nothing random
        shapes.add(tuple(image.shape))
    assert len(shapes) > 1
    images, labels = next(iter(data(folder, eval_batch_size=5).val_dataloader()))
    assert [len(images), len(labels)] == [5, 5] and isinstance(images, list)


def test_training_moves_image_and_labels_alike(folder):
    """Shapes are bright and the wall is dark, wherever the crop has put them."""
    samples = data(folder, image_size=64).samples("train")
    samples.transform.transforms = [
        t for t in samples.transform.transforms if "Photometric" not in type(t).__name__
    ]
    torch.manual_seed(0)
    views = [samples[0] for _ in range(8)]
    assert not torch.equal(views[0][1], views[1][1])
    for image, labels in views:
        brightness = image.mean(0)
        if (labels > 0).any():
            assert brightness[labels > 0].mean() > 0.4
        assert brightness[labels == 0].mean() < 0.3
        assert {-100, *range(4)} >= set(labels.unique().tolist())


def test_batches_and_what_fills_the_last_one(folder):
    module = data(folder, batch_size=4)
    images, labels = next(iter(module.train_dataloader()))
    assert images.shape == (4, 3, 32, 32) and labels.shape == (4, 32, 32)
    filled = module.loader(module.samples("val")).dataset[0, 0, False][1]
    assert (filled == -100).all()


def test_generated_data_need_no_folder():
    module = SegmentationData(
        source="generated", image_size=16, generate={"train": 2, "val": 1, "size": 24}
    )
    assert module.num_classes == 4
    assert len(module.samples("train")) == 2 and len(module.samples("test")) == 1


def test_square_takes_boxes_along():
    box = tv_tensors.BoundingBoxes([[10, 0, 40, 20]], format="XYXY", canvas_size=(20, 40))
    image, moved = Square(20, 0)(tv_tensors.Image(torch.zeros(3, 20, 40)), box)
    assert image.shape == (3, 20, 20) and moved.tolist() == [[5, 0, 20, 10]]


def test_what_is_wrong_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        data(tmp_path / "nowhere").samples("train")
    with pytest.raises(FileNotFoundError, match="objectInfo150.txt is missing"):
        read_classes(tmp_path / "objectInfo150.txt")
    with pytest.raises(ValueError, match="source is 'web'"):
        SegmentationData(source="web")

    broken = write_ade20k(tmp_path / "broken", train=2, val=1, size=24)
    label = broken / "annotations/training/ADE_train_00000001.png"
    size = Image.open(label).size
    Image.new("L", size, 9).save(label)
    with pytest.raises(ValueError, match="has the label 9, expected 0 to 4"):
        data(broken).samples("train")[0]
    Image.new("RGB", size).save(label)
    with pytest.raises(ValueError, match="has 3 channels, expected the number of a class for each"):
        data(broken).samples("train")[0]
    Image.new("L", (5, 5), 1).save(label)
    with pytest.raises(ValueError, match=r"of shape \(5, 5\) and its image of height"):
        data(broken).samples("train")[0]
    Image.fromarray(np.full(size[::-1], 40_000, np.uint16)).save(label)
    with pytest.raises(ValueError, match="has the label 40000, expected 0 to 4"):
        data(broken).samples("train")[0]
    label.write_bytes(label.read_bytes()[:60])
    with pytest.raises(OSError, match="ADE_train_00000001.png cannot be read as labels"):
        data(broken).samples("train")[0]
    picture = broken / "images/training/ADE_train_00000002.jpg"
    picture = picture.rename(picture.with_suffix(".JPG"))
    assert data(broken).samples("train").pairs[1][0] == picture
    label.unlink()
    with pytest.raises(FileNotFoundError, match="ADE_train_00000001.png is missing, the annot"):
        data(broken).samples("train")
    with pytest.raises(FileNotFoundError, match="validation has no images .known are .jpg, "):
        (broken / "images/validation/ADE_valid_00000001.jpg").unlink()
        data(broken).samples("val")
    (broken / "objectInfo150.txt").write_text("Idx\tName\n1\twall\n")
    with pytest.raises(ValueError, match="one class only, 'wall', expected .* give the background"):
        data(broken).num_classes  # noqa: B018
    (broken / "objectInfo150.txt").write_text("Idx\tName\n1\twall\n3\tsky\n")
    with pytest.raises(ValueError, match="line 3: the class's number is '3', expected 2"):
        read_classes(broken / "objectInfo150.txt")
    (broken / "objectInfo150.txt").write_text("Idx\tName\n1\twall\n\n")
    with pytest.raises(ValueError, match="line 3: the class's number is '', expected 2 and, after"):
        read_classes(broken / "objectInfo150.txt")


def test_labels_of_too_many_pixels_are_named(tmp_path, monkeypatch):
    broken = write_ade20k(tmp_path / "broken", train=1, val=1, size=24)
    Image.new("L", (200, 200)).save(broken / "annotations/training/ADE_train_00000001.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    with pytest.raises(OSError, match="00000001.png cannot be read as labels .*exceeds limit"):
        data(broken).samples("train")[0]
