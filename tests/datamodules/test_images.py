"""Every image reader on small made-up folders, what it says of bad ones, and the real sets."""

import cpu_torchvision  # noqa: F401

import hashlib
import os
import pickle
import shutil
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from PIL import Image, ImageOps
from timm.data.auto_augment import AugmentOp

from datamodules.cub import CUBData
from datamodules.digits import DigitsData, PairedDigitsData
from datamodules.image_folders import ImageFolderData
from datamodules.imagenet import SOLUTION, ImageNetData
from datamodules.images import in_rgb, read_image
from datamodules.torchvision_sets import SOURCES, TorchvisionData


def draw(path: Path, mode: str = "RGB", size: tuple[int, int] = (12, 10), value: int = 9) -> Path:
    """Writes a picture; its first pixel tells `value`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), value, np.uint8)).convert(mode).save(path)
    return path


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """train and val with the classes a (6 and 2 images) and b (4 and 3), and files to ignore."""
    for part, counts in {"train": {"a": 6, "b": 4}, "val": {"a": 2, "b": 3}}.items():
        for name, count in counts.items():
            for number in range(count):
                draw(tmp_path / part / name / f"{number}.{'JPEG' if number % 2 else 'png'}")
        (tmp_path / part / "classes.tsv").write_text("0\ta\n")
        (tmp_path / part / ".hidden").mkdir()
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    return tmp_path


def folder_data(root: Path, **kwargs) -> ImageFolderData:
    return ImageFolderData(
        root=str(root), **{"image_size": 8, "batch_size": 2, "augmentation": "light", **kwargs}
    )


def test_pictures_of_formats_that_are_not_read_are_counted(folders):
    draw(folders / "train" / "a" / "7.gif")
    draw(folders / "train" / "b" / "8.GIF")
    (folders / "train" / "b" / "phone.heic").write_bytes(b"x")
    with pytest.warns(UserWarning, match="left out: 2 .gif, 1 .heic, such as .*/a/7.gif; to"):
        assert len(folder_data(folders).train_set) == 10


def labels(images) -> list[int]:
    return [label for _, label in images.items]


# Reading.


@pytest.mark.parametrize(
    ("mode", "ending"),
    [("L", "png"), ("P", "png"), ("RGBA", "png"), ("CMYK", "jpg"), ("1", "png"), ("L", "JPEG")],
)
def test_every_mode_becomes_rgb(mode, ending, tmp_path):
    image = read_image(draw(tmp_path / f"image.{ending}", mode, value=255))
    assert image.mode == "RGB"
    assert image.size == (12, 10)
    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_keep_their_contrast(tmp_path):
    pixels = np.array([[0, 256], [32768, 65535]], np.uint16)
    Image.fromarray(pixels).save(tmp_path / "deep.png")
    assert np.asarray(read_image(tmp_path / "deep.png"))[..., 0].tolist() == [[0, 1], [128, 255]]
    Image.fromarray(pixels.astype(np.float32)).save(tmp_path / "deep.tiff")
    with pytest.raises(OSError, match=r"deep.tiff cannot be read .*\(its mode F does not define"):
        read_image(tmp_path / "deep.tiff")


def test_a_picture_is_turned_as_its_camera_says(tmp_path):
    upright = Image.new("RGB", (20, 30), "white")
    upright.paste("red", (0, 0, 20, 8))  # on top
    exif = Image.Exif()
    exif[0x0112] = 6  # to be seen, turn it a quarter clockwise
    upright.rotate(90, expand=True).save(tmp_path / "phone.jpg", exif=exif, quality=95)
    image = read_image(tmp_path / "phone.jpg")
    assert image.size == (20, 30)
    assert image.getpixel((10, 2))[1] < 50 and image.getpixel((10, 25))[1] > 200
    with Image.open(tmp_path / "phone.jpg") as given:  # as Predictor is given one
        assert in_rgb(given).size == (20, 30)


def test_broken_exif_data_do_not_hide_the_picture(tmp_path, monkeypatch):
    draw(tmp_path / "image.jpg")

    def broken(image):
        raise TypeError("bad operand type for abs(): 'bytes'")  # as Pillow 12 raises

    monkeypatch.setattr(ImageOps, "exif_transpose", broken)
    assert read_image(tmp_path / "image.jpg").size == (12, 10)


def test_a_broken_file_is_named(folders):
    for path in (folders / "train/a").glob("*.JPEG"):
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(OSError, match=r"train/a/\d.JPEG cannot be read as an image"):
        list(folder_data(folders, augmentation="none").train_dataloader())
    (folders / "train/a/0.png").write_bytes(b"text")
    with pytest.raises(OSError, match="0.png cannot be read .* replace or remove it"):
        read_image(folders / "train/a/0.png")
    with pytest.raises(OSError, match="absent.png cannot be read"):
        read_image(folders / "absent.png")


def test_an_image_of_too_many_pixels_is_named(tmp_path, monkeypatch):
    """Pillow's own error for it is none of the usual three."""
    draw(tmp_path / "poster.png", size=(30, 20))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(OSError, match=r"poster.png cannot be read .*\(Image size \(600 pixels\)"):
        read_image(tmp_path / "poster.png")


# Folders.


def test_folders(folders):
    data = folder_data(folders)
    assert data.num_classes == 2  # before any setup, as the command line links it
    assert data.class_names == ["a", "b"]
    assert labels(data.train_set) == [0] * 6 + [1] * 4
    assert labels(data.val_set) == [0] * 2 + [1] * 3
    assert data.test_set is data.val_set
    x, label = next(iter(data.train_dataloader()))
    assert x.shape == (2, 3, 8, 8)
    assert x.dtype == torch.float32
    assert label.dtype == torch.int64
    assert sum(len(x) for x, _ in data.val_dataloader()) == 5


def test_a_name_below_recipes_data(folders, monkeypatch):
    monkeypatch.setenv("RECIPES_DATA", str(folders.parent))
    assert len(ImageFolderData(name=folders.name).train_set) == 10
    monkeypatch.delenv("RECIPES_DATA")
    with pytest.raises(ValueError, match=r"set --data.root, or RECIPES_DATA"):
        ImageFolderData(name=folders.name).setup()


def test_without_parts_each_class_is_split(folders):
    data = folder_data(folders / "train", val_fraction=0.5)
    assert (labels(data.train_set), labels(data.val_set)) == ([0] * 3 + [1] * 2,) * 2
    sources = {source for images in (data.train_set, data.val_set) for source, _ in images.items}
    assert len(sources) == 10
    same = folder_data(folders / "train", val_fraction=0.5)
    other = folder_data(folders / "train", val_fraction=0.5, seed=1)
    assert same.val_set.items == data.val_set.items
    assert other.val_set.items != data.val_set.items


def test_without_a_val_folder_and_with_a_test_folder(folders):
    data = folder_data(folders, val=None, test="val", val_fraction=0.5)
    counts = [len(images) for images in (data.train_set, data.val_set, data.test_set)]
    assert counts == [5, 5, 5]
    assert not set(data.val_set.items) & set(data.test_set.items)


def test_a_mistyped_val_folder_holds_out_no_training_images(folders):
    with pytest.raises(FileNotFoundError, match="vall is not a folder"):
        folder_data(folders, val="vall").setup()


def test_a_name_that_is_not_utf8_has_a_place_in_the_manifest(folders):
    old = folders / "val" / "b" / os.fsdecode(b"caf\xe9.png")  # of an archive from Windows
    draw(folders / "val" / "b" / "new.png").rename(old)
    assert folder_data(folders).manifest("val")["examples"] == 6


def test_a_split_is_the_seeds(folders, cub, tmp_path, monkeypatch):
    def split(seed, part, **kwargs):
        return folder_data(folders, seed=seed, **kwargs).manifest(part)

    few = {"per_class": 2}
    assert split(0, "train", **few) == split(0, "train", **few)
    assert split(0, "train", **few)["sha256"] != split(1, "train", **few)["sha256"]
    lines = split(0, "train", **few)["members"]
    assert len(lines) == 4 and lines[0].startswith("train/a/") and lines[0].endswith("\ta")
    # nothing was drawn: the data say who is in it
    whole = split(0, "val", **few)
    assert whole == split(1, "val") and whole["examples"] == 5 and "members" not in whole
    expected = "".join(f"{line}\n" for line in folder_data(folders).members("val")[0])
    assert whole["sha256"] == hashlib.sha256(expected.encode()).hexdigest()
    # where the root lies does not matter
    moved = shutil.copytree(folders, tmp_path / "elsewhere", ignore=lambda *_: ["elsewhere"])
    assert folder_data(moved, **few).manifest("train") == split(0, "train", **few)

    held_out = [folder_data(folders / "train", val_fraction=0.5, seed=seed) for seed in (0, 1)]
    for part in ("train", "val", "test"):
        one, other = (data.manifest(part) for data in held_out)
        assert one["examples"] == other["examples"] == len(one["members"])
        assert one["sha256"] != other["sha256"]

    assert CUBData(root=str(cub)).members("train")[0][0].startswith("CUB_200_2011/images/")
    digits = DigitsData(seed=1)
    assert len(set(digits.manifest("train")["members"])) > 1200
    write_cifar10(tmp_path / "cifar", monkeypatch)
    cifar = TorchvisionData("CIFAR10", root=str(tmp_path / "cifar"), val_fraction=0.4)
    assert {
        line.split("\t")[0] for part in ("train", "val") for line in cifar.members(part)[0]
    } == {str(place) for place in range(len(cifar.train_set) + len(cifar.val_set))}


def test_classes_and_few_shot(folders):
    data = folder_data(folders, classes=[1], per_class=3)
    assert data.class_names == ["b"]
    assert labels(data.train_set) == [0] * 3
    assert labels(data.val_set) == [0] * 3
    assert all("/b/" in source for source, _ in data.train_set.items)
    assert labels(folder_data(folders, classes=[1, 0], per_class=5).train_set).count(0) == 4
    for classes in ([2], [0, 0], [-1]):
        with pytest.raises(ValueError, match=r"expected different numbers from 0 to 1"):
            folder_data(folders, classes=classes).setup()


def test_unlabelled_images_lie_anywhere(tmp_path):
    for name in ("one.png", "some/two.png", "some/more/three.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    data = folder_data(tmp_path, labelled=False, val_fraction=0.34)
    data.setup()
    assert len(data.train_set) == 2 and len(data.val_set) == 1 and data.class_names == ["image"]
    (tmp_path / "void").mkdir()
    with pytest.raises(FileNotFoundError, match=r"void has no images .* in no folder below it"):
        folder_data(tmp_path / "void", labelled=False).setup()


def test_bad_folders_are_named(folders, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent is not a folder, .* --data.root"):
        folder_data(folders / "absent").setup()
    with pytest.raises(FileNotFoundError, match=r"absent is not a folder, .* --data.train"):
        folder_data(folders, train="absent").setup()
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        folder_data(folders, test="absent").setup()
    (folders / "void").mkdir()
    with pytest.raises(FileNotFoundError, match=r"void holds no class folders"):
        folder_data(folders / "void").setup()
    (folders / "train/c").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train/c has no images .* remove the folder"):
        folder_data(folders).setup()
    (folders / "train/c").rmdir()
    draw(folders / "val/stranger/0.png")
    with pytest.raises(ValueError, match=r"val has the class 'stranger', .* 2 training classes"):
        folder_data(folders).setup()


def test_folders_that_no_part_uses_are_said(folders):
    (folders / "val").rename(folders / "valid")
    with pytest.warns(UserWarning, match="the folders 'valid', which no part uses: name it in"):
        folder_data(folders).setup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder_data(folders, val="valid").setup()


def test_an_empty_val_folder_is_named(folders):
    (folders / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match="bare has no images: add some, or remove the fold"):
        folder_data(folders, val="bare").setup()


def test_a_part_without_images_is_named(folders):
    data = folder_data(folders / "train", val_fraction=0)
    assert len(data.train_set) == 10
    with pytest.raises(ValueError, match=r"The val part of .* has no images"):
        data.val_dataloader()


# What is done to an image.


def tensors(data, epoch: int = 0) -> torch.Tensor:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return torch.cat([x for x, _ in loader])


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    """16 images of noise, of two sizes."""
    rng = np.random.default_rng(0)
    for number in range(16):
        path = tmp_path / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = (24, 16) if number < 8 else (16, 16)
        Image.fromarray(rng.integers(256, size=(*size, 3), dtype=np.uint8)).save(path)
    return tmp_path


TIMM = {
    "augmentation": "timm",
    "auto_augment": "rand-m9-n2",
    "random_erasing": 0.5,
    "image_size": 16,
}


@pytest.mark.parametrize("kwargs", [TIMM, {"augmentation": "light"}, {"augmentation": "none"}])
def test_augmentation_depends_on_seed_and_epoch_only(kwargs, noisy):
    first = tensors(folder_data(noisy, **kwargs))
    torch.rand(3), np.random.rand(3)
    assert torch.equal(first, tensors(folder_data(noisy, **kwargs, num_workers=2)))
    assert torch.equal(first, tensors(folder_data(noisy, **kwargs, cache=True)))
    assert not torch.equal(first, tensors(folder_data(noisy, **kwargs), epoch=1))
    assert not torch.equal(first, tensors(folder_data(noisy, **kwargs, seed=1)))


def test_none_is_what_evaluation_sees(noisy):
    data = folder_data(noisy, augmentation="none", val="train")
    images = [data.train_set[place][0] for place in range(16)]
    assert torch.equal(torch.stack(images), torch.cat([x for x, _ in data.val_dataloader()]))
    assert -1 <= torch.stack(images).min() < -0.3
    assert 1 >= torch.stack(images).max() > 0.3


def test_centre_crop(tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[2:6, 2:6] = 255
    (tmp_path / "train/a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "train/a/0.png")
    data = folder_data(
        tmp_path, image_size=4, crop_pct=0.5, val_fraction=1.0, mean=(0, 0, 0), std=(1, 1, 1)
    )
    assert data.val_set[0][0].unique().tolist() == [1.0]


def test_flip_can_be_left_out(noisy):
    kwargs = {"augmentation": "light", "image_size": 4, "val": "train"}  # padding of 4 // 8 = 0
    data = folder_data(noisy, **kwargs, hflip=0.0)
    flipped = folder_data(noisy, **kwargs, hflip=1.0)
    for place in range(3):
        plain = data.val_set[place][0]
        assert torch.equal(data.train_set[place][0], plain)
        assert torch.equal(flipped.train_set[place][0], plain.flip(-1))


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="augmentation is 'strong', expected timm, light or none"):
        ImageFolderData(augmentation="strong")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="val_fraction is 5"):
        ImageFolderData(val_fraction=5)
    with pytest.raises(ValueError, match="per_class is -1, expected 1 or more, or null"):
        ImageFolderData(per_class=-1)  # which would keep all but one image of each class


class Labels(L.LightningModule):
    """Keeps the labels it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.training_labels: list[torch.Tensor] = []
        self.other_labels: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        self.training_labels.append(batch[1])
        return self.layer(batch[0].mean().view(1)).sum()

    def validation_step(self, batch, batch_idx):
        self.other_labels.append(batch[1])

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(**kwargs) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=1,
        **kwargs,
    )


@pytest.mark.parametrize(
    "kwargs", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 1.0, "cutmix": 1.0}], ids=str
)
def test_mixing_makes_soft_targets_while_training_only(kwargs, noisy):
    data = folder_data(noisy, val="train", label_smoothing=0.1, **kwargs)
    module = Labels()
    trainer().fit(module, datamodule=data)
    soft = torch.cat(module.training_labels)
    assert soft.shape == (16, 2)
    assert torch.allclose(soft.sum(1), torch.ones(16))
    assert soft.min() >= 0.05 - 1e-6
    assert {label.dtype for label in module.other_labels} == {torch.int64}


def test_label_smoothing_alone(noisy):
    module = Labels()
    trainer().fit(module, datamodule=folder_data(noisy, label_smoothing=0.2, per_class=1))
    (soft,) = module.training_labels
    assert torch.allclose(soft.sort(dim=0).values, torch.tensor([[0.1, 0.1], [0.9, 0.9]]))


def test_mixing_an_odd_batch_is_named(noisy):
    with pytest.raises(ValueError, match="batch has 3 images and mixup needs an even number"):
        trainer().fit(Labels(), datamodule=folder_data(noisy, mixup=1.0, batch_size=3))


def test_test_and_predict(folders):
    data, module = folder_data(folders), Labels()
    trainer().test(module, datamodule=data, verbose=False)
    predicted = trainer().predict(module, datamodule=data)
    assert (
        torch.cat(predicted).tolist()
        == torch.cat(module.other_labels).tolist()
        == labels(data.val_set)
    )


def test_two_ranks_count_each_image_once(folders, monkeypatch):
    data = folder_data(folders)
    seen = []
    for rank in range(2):
        data.trainer = trainer()
        monkeypatch.setattr(
            L.Trainer, "distributed_sampler_kwargs", {"num_replicas": 2, "rank": rank}
        )
        seen += [label for _, batch in data.val_dataloader() for label in batch.tolist()]
    assert len(seen) == 6
    assert sorted(label for label in seen if label != -100) == labels(data.val_set)


def test_sets_can_be_sent_to_workers(folders, cub):
    for data in (folder_data(folders), CUBData(root=str(cub)), PairedDigitsData()):
        data.trainer = trainer()  # what a worker must not get
        assert len(pickle.loads(pickle.dumps(data.train_set))) == len(data.train_set)


def test_the_command_line_knows_all_arguments():
    for cls in (
        ImageFolderData,
        ImageNetData,
        CUBData,
        TorchvisionData,
        DigitsData,
        PairedDigitsData,
    ):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, "data")
        given = ["--data.image_size=16", "--data.mean=[0,0,0]", "--data.classes=[1,0]"]
        given += ["--data.dataset=CIFAR10"] * (cls is TorchvisionData)
        data = parser.instantiate(parser.parse_args(given)).data
        assert (data.image_size, data.mean, data.classes) == (16, (0.0, 0.0, 0.0), [1, 0])


# ImageNet.


def test_imagenet_in_class_folders(tmp_path):
    for part in ("train", "val"):
        for wnid in ("n02", "n01"):
            draw(tmp_path / part / wnid / "0.JPEG")
    data = ImageNetData(root=str(tmp_path))
    assert data.class_names == ["n01", "n02"]
    assert labels(data.val_set) == [0, 1]


def test_imagenet_as_kaggle_has_it(tmp_path):
    base = tmp_path / "ILSVRC/Data/CLS-LOC"
    for wnid in ("n01", "n02"):
        draw(base / "train" / wnid / "0.JPEG")
    for number in (1, 2, 3):
        draw(base / "val" / f"ILSVRC2012_val_{number}.JPEG")
    data = ImageNetData(root=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"{SOLUTION} is missing"):
        data.setup()
    lines = [f"ILSVRC2012_val_{i},n0{2 if i == 2 else 1} 1 2 3 4 n01 5 6 7 8" for i in (3, 1, 2)]
    solution = tmp_path / SOLUTION
    solution.write_text("\n".join(["ImageId,PredictionString", *lines]))
    assert labels(data.val_set) == [0, 0, 1]
    assert data.val_set.items[2][0].endswith("val_2.JPEG")

    solution.write_text(solution.read_text().replace("val_2,n02", "val_2,n09"))
    with pytest.raises(ValueError, match=rf"{SOLUTION}, line 4: 'n09' is not a wnid"):
        ImageNetData(root=str(tmp_path)).setup()
    solution.write_text("ImageId,PredictionString\nILSVRC2012_val_7,n01 1 2 3 4\n")
    with pytest.raises(FileNotFoundError, match=r"val_7.JPEG is missing, but .* line 2"):
        ImageNetData(root=str(tmp_path)).setup()


# CUB.


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    """Four birds of two classes, inside CUB_200_2011 as the archive unpacks."""
    base = tmp_path / "cub" / "CUB_200_2011"
    names = [f"00{1 + number // 2}.Bird/{number}.jpg" for number in range(4)]
    for name in names:
        draw(base / "images" / name, size=(40, 30))
    tables = {
        "images.txt": names,
        "classes.txt": ["001.Bird", "002.Bird"],
        "image_class_labels.txt": [1, 1, 2, 2],
        "train_test_split.txt": [1, 0, 1, 0],
        "bounding_boxes.txt": ["5.0 6.0 20.0 10.0"] * 4,
    }
    for table, values in tables.items():
        lines = [f"{number} {value}\n" for number, value in enumerate(values, start=1)]
        (base / table).write_text("".join(lines))
    return base.parent


def test_cub(cub):
    data = CUBData(root=str(cub), image_size=8)
    assert data.class_names == ["001.Bird", "002.Bird"]
    assert labels(data.train_set) == labels(data.test_set) == [0, 1]
    assert data.val_set is data.test_set
    assert data.read(data.train_set.items[0][0]).size == (40, 30)
    cropped = CUBData(root=str(cub / "CUB_200_2011"), crop_to_box=True)
    assert cropped.read(cropped.train_set.items[0][0]).size == (20, 10)


@pytest.mark.parametrize(
    ("table", "old", "new", "complaint"),
    [
        ("image_class_labels.txt", "3 2", "3 7", r"line 3, '3 7': .*class 7 is not in classes.txt"),
        ("image_class_labels.txt", "3 2", "3 two", r"line 3, '3 two'"),
        ("image_class_labels.txt", "3 2\n", "", r"has no line for image 3"),
        ("image_class_labels.txt", "3 2", "9 2", r"line 3, .*id 9 is not in images.txt"),
        ("train_test_split.txt", "2 0", "2 x", r"line 2, .*'x' is neither 0 nor 1"),
        ("train_test_split.txt", "2 0", "1 0", r"line 2, .*id 1 comes twice"),
        ("bounding_boxes.txt", "4 5.0 6.0", "4 5.0", r"line 4, .*not enough values"),
        ("bounding_boxes.txt", "20.0", "0.0", r"line 1, .*empty"),
        ("classes.txt", "2 002", "5 002", r"classes.txt numbers its classes otherwise"),
        ("images.txt", "4 002.Bird/3", "4 002.Bird/8", r"8.jpg is missing, but .* image 4"),
    ],
)
def test_a_wrong_line_of_cub_is_named(table, old, new, complaint, cub):
    path = cub / "CUB_200_2011" / table
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises((ValueError, FileNotFoundError), match=complaint) as error:
        CUBData(root=str(cub), crop_to_box=True).setup()
    assert table in str(error.value)


def test_a_missing_table_of_cub_is_named(cub):
    (cub / "CUB_200_2011/classes.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"classes.txt is missing: set --data.root"):
        CUBData(root=str(cub)).setup()


# torchvision.


def write_cifar10(root: Path, monkeypatch) -> None:
    """Ten training and five test images in the official pickles, with torchvision's checks off."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, count in [(f"data_batch_{i}", 2) for i in range(1, 6)] + [("test_batch", 5)]:
        images = np.full((count, 3072), 7, np.uint8)
        entry = {"data": images, "labels": list(range(count))}
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)


def test_cifar10_of_torchvision(tmp_path, monkeypatch):
    write_cifar10(tmp_path, monkeypatch)
    data = TorchvisionData("CIFAR10", root=str(tmp_path), image_size=32, batch_size=5)
    assert data.class_names == list("abcdefghij")
    assert labels(data.train_set) == [0, 1] * 5
    assert data.val_set is data.test_set
    assert [x.shape for x, _ in data.test_dataloader()] == [(5, 3, 32, 32)]
    held_out = TorchvisionData("CIFAR10", root=str(tmp_path), val_fraction=0.4)
    counts = [len(s) for s in (held_out.train_set, held_out.val_set, held_out.test_set)]
    assert counts == [6, 4, 5]


def test_the_validation_part_may_train_too(tmp_path, monkeypatch):
    write_cifar10(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="train_on_val is true, but CIFAR10 has no validation"):
        TorchvisionData("CIFAR10", train_on_val=True)
    parts = SOURCES["CIFAR10"]
    monkeypatch.setitem(SOURCES, "CIFAR10", parts._replace(val=parts.test))
    apart = TorchvisionData("CIFAR10", root=str(tmp_path))
    together = TorchvisionData("CIFAR10", root=str(tmp_path), train_on_val=True)
    assert (len(apart.train_set), len(apart.val_set), len(apart.test_set)) == (10, 5, 5)
    assert (len(together.train_set), len(together.test_set)) == (15, 5)
    assert together.val_set is together.test_set


@pytest.mark.parametrize("dataset", ["CIFAR100", "DTD", "FGVCAircraft", "Flowers102", "Food101"])
def test_an_absent_torchvision_set_is_named(dataset, tmp_path):
    data = TorchvisionData(dataset, root=str(tmp_path))
    assert data.num_classes >= 47  # known before the download
    data.prepare_data()  # downloads nothing unless asked
    with pytest.raises(FileNotFoundError, match=rf"{dataset} .* not in .*--data.download true"):
        data.setup()


def test_an_unknown_torchvision_set_is_named():
    with pytest.raises(ValueError, match="dataset is 'MNIST', expected CIFAR10, CIFAR100"):
        TorchvisionData("MNIST")


# Real images.


def test_digits():
    data = DigitsData()
    assert data.num_classes == 10
    assert (len(data.train_set), len(data.val_set)) == (1298, 499)
    assert min(labels(data.val_set).count(digit) for digit in range(10)) >= 48
    image = data.read(data.val_set.items[0][0])
    assert (image.mode, image.size) == ("RGB", (8, 8))
    pixels = torch.cat([x for x, _ in data.val_dataloader()])
    assert pixels.shape == (499, 3, 8, 8)
    assert (pixels.min(), pixels.max()) == (-1, 1)  # 0 to 16 fills the range
    assert len(pixels.unique()) == 17  # nothing was resized


@pytest.mark.parametrize("augmentation", ["none", "light"])
def test_the_cache_holds_all_that_is_the_same_each_time(augmentation):
    kept, read = (DigitsData(augmentation=augmentation, cache=cache) for cache in (True, False))
    for _ in range(2):  # the second pass comes from the cache
        for (x, label), (y, truth) in zip(
            kept.train_dataloader(), read.train_dataloader(), strict=True
        ):
            assert torch.equal(x, y) and torch.equal(label, truth)
    assert isinstance(kept.train_set[0][0], torch.Tensor)
    assert isinstance(kept.val_dataloader().dataset.dataset._kept[0], torch.Tensor)
    kind = torch.Tensor if augmentation == "none" else Image.Image
    assert isinstance(kept.train_set._kept[0], kind)


def test_pairs_of_digits():
    data = PairedDigitsData(train_pairs=4000, val_pairs=1000)
    assert (data.num_classes, len(data.train_set), len(data.val_set)) == (10, 4000, 1000)
    assert data.train_set[0][0].shape == (3, 16, 16)
    digits, classes = DigitsData(), {}
    for part in ("train", "val"):
        known = {source.tobytes(): label for source, label in getattr(digits, f"{part}_set").items}
        for pixels, label in getattr(data, f"{part}_set").items:
            assert (pixels[::2] == pixels[1::2]).all()
            number = tuple(known[half.tobytes()] for half in (pixels[::2, :8], pixels[::2, 8:]))
            assert classes.setdefault(number, label) == label  # the same in both parts
    assert sorted(classes.values()) == sorted([*range(10)] * 10)
    fewer = PairedDigitsData(train_pairs=10, val_pairs=10)
    for part in ("train_set", "val_set"):
        both = zip(getattr(fewer, part).items, getattr(data, part).items, strict=False)
        assert all(np.array_equal(one, other) for (one, _), (other, _) in both)
    assert len(set(PairedDigitsData(seed=1).manifest("train")["members"])) > 25000


def test_tiny_imagenet(recipes_data):
    data = ImageFolderData(root=str(recipes_data), name="tiny_imagenet_50", image_size=64)
    assert (data.num_classes, len(data.train_set), len(data.val_set)) == (50, 10_000, 2_500)
    grey = next(
        (source, place)
        for place, (source, _) in enumerate(data.val_set.items)
        if Image.open(source).mode == "L"
    )
    assert read_image(grey[0]).mode == "RGB"
    assert data.val_set[grey[1]][0].shape == (3, 64, 64)


def test_cifar10_folders(recipes_data):
    data = ImageFolderData(root=str(recipes_data), name="cifar10", image_size=32)
    assert (data.num_classes, len(data.train_set), len(data.val_set)) == (10, 8_000, 2_000)
    assert data.class_names[:2] == ["airplane", "automobile"]


def test_the_imagenet_sample(recipes_data):
    data = ImageFolderData(root=str(recipes_data), name="imagenet_1k_sample", val_fraction=1.0)
    assert (data.num_classes, len(data.val_set)) == (1000, 1000)
    assert labels(data.val_set) == list(range(1000))


def test_the_highest_level_of_posterize_is_black():
    """Pillow 13 refuses the 0 bits that timm asks for there."""
    image = Image.new("RGB", (4, 4), (200, 100, 50))
    for magnitude in (9, 10):
        found = AugmentOp("PosterizeIncreasing", prob=1.0, magnitude=magnitude)(image)
        assert found.size == image.size
    assert found.getextrema() == ((0, 0),) * 3


def test_validation_on_images_that_per_class_leaves_over(folders):
    """Two of a class train, one other validates, and the test part is the official one."""
    data = folder_data(folders, per_class=2, val_per_class=1)
    train, val, test = (
        [s for s, _ in part.items] for part in (data.train_set, data.val_set, data.test_set)
    )
    assert len(train) == 4 and len(val) == 2 and not set(train) & set(val)
    assert all("train" in str(source) for source in train + val)
    assert len(test) == 5 and all("val" in str(source) for source in test)
    with pytest.raises(ValueError, match="val_per_class is 1 with per_class None: expected 1 or m"):
        folder_data(folders, val_per_class=1)
    with pytest.raises(
        ValueError, match="per_class 6 takes every training image and leaves none f"
    ):
        folder_data(folders, per_class=6, val_per_class=1).setup()


def test_classes_with_too_few_images_to_validate_on_are_named(folders):
    data = folder_data(folders, per_class=3, val_per_class=2)
    said = "per_class 3 leaves fewer than val_per_class 2 images of 1 of 2 classes, .*: 'b'"
    with pytest.warns(UserWarning, match=said):
        data.setup()
    assert labels(data.val_set) == [0, 0, 1]
