"""COCO's form: gaps between categories, crowds, empty images, boxes that follow their image."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import DetectionData
from datamodules.detection import NUMBERS, area_of, read_coco, read_masks, write_coco
from datamodules.scenes import SHAPES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"), train=10, val=9, size=48)


def data(folder, **settings):
    settings = {"image_size": 64, "batch_size": 2, "mean": (0, 0, 0), "std": (1, 1, 1)} | settings
    return DetectionData(root=str(folder), **settings)


def test_the_reader_agrees_with_cocos_own(folder):
    mask, coco = (pytest.importorskip(f"pycocotools.{name}") for name in ("mask", "coco"))
    path = folder / "annotations" / "instances_val2017.json"
    theirs = coco.COCO(path)
    names, images = read_coco(folder, "val2017")
    assert names == list(SHAPES) and theirs.getCatIds() == list(NUMBERS)
    for number, image in zip(theirs.getImgIds(), images, strict=True):
        annotations = theirs.loadAnns(theirs.getAnnIds(number))
        assert len(image.boxes) == len(annotations)
        for row, annotation in enumerate(annotations):
            x, y, width, height = annotation["bbox"]
            assert image.boxes[row].tolist() == [x, y, x + width, y + height]
            assert NUMBERS[image.labels[row]] == annotation["category_id"]
            assert image.crowd[row] == annotation["iscrowd"]
            assert image.area[row] == annotation["area"]
    assert any((image.crowd == 1).any() for image in images)
    assert images[-1].boxes.shape == (0, 4)
    [crowd] = theirs.loadAnns(theirs.getAnnIds(iscrowd=1))[:1]  # its run lengths are a mask
    assert mask.area(theirs.annToRLE(crowd)) == crowd["area"]


def test_empty_images_and_crowds_do_not_train(folder):
    training, validation = data(folder).samples("train"), data(folder).samples("val")
    assert (len(training), len(validation)) == (9, 9)
    for _, target, _ in training:
        assert len(target["boxes"]) == len(target["class_labels"]) > 0
        assert len(target["boxes"]) == (target["truth"]["iscrowd"] == 0).sum()
    image, target, place = validation[8]
    assert target["boxes"].shape == (0, 4) and place == 8 and image.shape == (3, 64, 64)


def test_boxes_lie_on_their_shapes_in_every_view(folder):
    """Shapes are bright and the background is dark: inside a box is brighter than the image."""
    samples = data(folder).samples("train")
    torch.manual_seed(0)
    flipped = []
    for index in range(len(samples)):
        for _ in range(3):
            image, target, _ = samples[index]
            brightness = image.mean(0)
            sides = target["seen"].flip(0).repeat(2)
            for x, y, width, height in (target["boxes"] * sides).tolist():
                rows = slice(int(y - height / 4), int(y + height / 4))
                columns = slice(int(x - width / 4), int(x + width / 4))
                assert brightness[rows, columns].mean() > 0.42
            flipped.append(target["boxes"][0, 0].item())
    assert len(set(flipped)) > len(samples)


def test_evaluation_boxes_come_back_in_pixels(folder):
    for image in range(9):
        _, target, _ = data(folder).samples("val")[image]
        sides = target["size"].flip(0).repeat(2)
        centre, size = (target["boxes"] * sides).split(2, dim=1)
        corners = torch.cat([centre - size / 2, centre + size / 2], dim=1)
        truth = target["truth"]["boxes"][target["truth"]["iscrowd"] == 0]
        torch.testing.assert_close(corners, truth, atol=0.5, rtol=0)


def test_the_image_is_at_the_top_left_of_its_square_flipped_or_not(folder):
    for part in ("train", "val"):
        samples = data(folder, mean=(0.5, 0.5, 0.5)).samples(part)
        torch.manual_seed(0)
        shapes = set()
        for index in range(len(samples)):
            image, target, _ = samples[index]
            height, width = target["seen"].tolist()
            shapes.add((height, width))
            assert max(height, width) == 64 and target["size"].max() in (48, 64)
            padding = torch.ones(64, 64, dtype=torch.bool)
            padding[:height, :width] = False
            assert (image[:, padding].abs() < 0.01).all()  # the mean
            assert (image[:, ~padding].abs() > 0.01).float().mean() > 0.9
        assert len(shapes) == 3


def test_masks_follow_their_image(folder):
    """Generated masks are the boxes themselves: polygons; and run lengths of a crowd."""
    coco = pytest.importorskip("pycocotools.mask")
    samples = data(folder, masks=True).samples("train")
    torch.manual_seed(0)
    for index in range(len(samples)):
        _, target, _ = samples[index]
        height, width = target["size"].tolist()
        truth = target["truth"]
        assert truth["masks"].shape == (len(truth["boxes"]), height, width)
        assert truth["masks"].dtype == torch.bool
        sums = truth["masks"].sum((1, 2)).float()
        torch.testing.assert_close(sums, truth["area"], rtol=0.05, atol=0)
        assert target["masks"].shape == (len(target["boxes"]), 64, 64)
        sides = target["seen"].flip(0).repeat(2)
        for mask_, box in zip(target["masks"], target["boxes"] * sides, strict=True):
            rows, columns = mask_.nonzero().unbind(1)
            x, y, w, h = box.tolist()
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            expected = torch.tensor([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
            torch.testing.assert_close(torch.stack(found).float(), expected, atol=1.5, rtol=0)
    with pytest.raises(ValueError, match="has the mask None, expected polygons or run lengths"):
        read_masks([None], 4, 4)
    encoded = coco.encode(np.asfortranarray(np.eye(4, dtype=np.uint8)))
    assert torch.equal(read_masks([encoded], 4, 4)[0], torch.eye(4).bool())


def test_batches_and_what_fills_the_last_one(folder):
    module = data(folder, batch_size=4)
    images, targets, places = next(iter(module.val_dataloader()))
    assert images.shape == (4, 3, 64, 64) and len(targets) == 4 and places.tolist() == [0, 1, 2, 3]
    assert module.val_dataloader().dataset[0, 0, False][2] == -100


def test_generated_data_need_no_folder():
    module = DetectionData(source="generated", image_size=16, generate={"train": 3, "val": 2})
    assert module.class_names == list(SHAPES)
    assert len(module.samples("train")) == 2 and len(module.samples("test")) == 2


def test_boxes_are_cut_to_the_image_and_slivers_left_out(folder, tmp_path):
    copy = edited(folder, tmp_path)
    images = read_coco(copy, "val2017")[1]
    width, height = Image.open(images[0].file).size
    assert images[0].boxes.tolist() == [[0, 0, width, height]]


def edited(folder, to, **changes):
    """A copy of the validation part with one box over the edge, one sliver, and changes."""
    content = json.loads((folder / "annotations" / "instances_val2017.json").read_text())
    common = {"area": 1.0, "iscrowd": 0, "image_id": 1, "category_id": 90, "segmentation": []}
    content["annotations"] = [
        {"id": 1, "bbox": [-5.0, -5.0, 500.0, 500.0], **common, **changes},
        {"id": 2, "bbox": [3.0, 3.0, 0.5, 20.0], **common},
    ]
    (to / "annotations").mkdir(exist_ok=True)
    (to / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    if not (to / "val2017").exists():
        (to / "val2017").symlink_to(folder / "val2017")
    return to


def test_what_is_wrong_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="instances_train2017.json is missing"):
        data(edited(folder, tmp_path)).samples("train")
    with pytest.raises(ValueError, match="annotation 1 is of category 2, which"):
        read_coco(edited(folder, tmp_path, category_id=2), "val2017")
    with pytest.raises(ValueError, match="annotation 1 is of image 99, which"):
        read_coco(edited(folder, tmp_path, image_id=99), "val2017")
    path = tmp_path / "annotations" / "instances_val2017.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="instances_val2017.json: this is no JSON"):
        read_coco(tmp_path, "val2017")
    path.write_text("[]")
    with pytest.raises(ValueError, match="lacks images, annotations or categories"):
        read_coco(tmp_path, "val2017")
    copy = edited(folder, tmp_path)
    (copy / "val2017").unlink()
    with pytest.raises(FileNotFoundError, match="000000000001.jpg is missing, but"):
        read_coco(copy, "val2017")
    with pytest.raises(ValueError, match="source is 'web'"):
        DetectionData(source="web")


def test_entries_without_what_they_need_are_named(folder, tmp_path):
    for table, key in (("images", "width"), ("annotations", "bbox"), ("categories", "name")):
        path = edited(folder, tmp_path) / "annotations" / "instances_val2017.json"
        content = json.loads(path.read_text())
        del content[table][0][key]
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"{table}, entry 0 is .* expected one with .*{key}"):
            read_coco(tmp_path, "val2017")


@pytest.mark.parametrize(("table", "number"), [("images", 1), ("categories", 3)])
def test_ids_that_are_given_twice_are_named(folder, tmp_path, table, number):
    """Files that were merged have them: each image would get the boxes of both."""
    path = edited(folder, tmp_path) / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    content[table].append(next(one for one in content[table] if one["id"] == number))
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"two {table} have the id {number}, so .* its own id"):
        read_coco(tmp_path, "val2017")


def test_pictures_of_another_size_than_was_annotated_are_named(folder, tmp_path):
    copy = edited(folder, tmp_path)
    (copy / "val2017").unlink()
    (copy / "val2017").mkdir()
    for file in (folder / "val2017").glob("*.jpg"):
        Image.open(file).reduce(2).save(copy / "val2017" / file.name)
    with pytest.raises(ValueError, match=r"0001.jpg is of height \d+ .*, and its annotations of"):
        data(copy).samples("val")[0]


@pytest.mark.parametrize("box", [None, [1, 2, 3], "1 2 3 4", [1, 2, 3, None]])
def test_a_box_that_is_not_four_numbers_is_named(folder, tmp_path, box):
    with pytest.raises(ValueError, match="annotation 1 has the bbox .*, expected four numbers"):
        read_coco(edited(folder, tmp_path, bbox=box), "val2017")


def test_a_polygon_of_two_points_is_named():
    with pytest.raises(ValueError, match=r"the mask \[\[1, 2, 3, 4\]\], expected polygons"):
        read_masks([[[1, 2, 3, 4]]], 9, 9)


def test_annotations_may_leave_the_area_out(folder, tmp_path):
    _, images = read_coco(edited(folder, tmp_path, area=None, iscrowd=None), "val2017")
    assert images[0].crowd.tolist() == [0] and images[0].area.tolist() == [500 * 500]
    assert area_of({"bbox": [3, 4, 5, 6]}) == 30
    assert area_of({"bbox": [3, 4, 5, 6], "area": None}) == 30
    assert area_of({"bbox": [3, 4, 5, 6], "area": 7.5}) == 7.5
