"""Predictions of segmentation and detection: the same as validation's, as tables and pictures."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from datamodules.detection import DetectionData, write_coco
from datamodules.segmentation import SegmentationData, write_ade20k
from lightning_modules.pela.downstream import Detection, Segmentation
from recipes import cli
from recipes.ending import ending
from recipes.export import main as export
from recipes.predict import Predictor, main
from recipes.scenes import Part, colour, label_image, painted, parts_of_detections

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
KINDS = {
    "segmentation": (Segmentation, SegmentationData, write_ade20k, "images/validation"),
    "detection": (Detection, DetectionData, write_coco, "val2017"),
}


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """A kind, a checkpoint of its tiny preset, and scenes in the format of its data."""
    kind = request.param
    if kind == "detection":
        pytest.importorskip("pycocotools")
    folder = tmp_path_factory.mktemp(kind)
    run = cli.main(
        [
            *("fit", "-c", str(RECIPES / "pela" / f"{kind}.yaml"), "--preset", "tiny"),
            *("--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2"),
            '--data.generate={"train": 16, "val": 2}',
            *("--trainer.enable_progress_bar=false", "--trainer.logger=false"),
            f"--checkpoint.dirpath={folder}",
            f"--trainer.default_root_dir={folder}",
        ]
    )
    KINDS[kind][2](folder / "scenes", train=1, val=3, size=80, seed=5)
    (folder / "ending.txt").write_text(ending(run.trainer, run.model))
    return kind, folder / "last.ckpt", folder / "scenes"


def validated(kind, checkpoint, scenes):
    """What validation's `predict_step` finds in the scenes, which have labels there."""
    module, data_class, _, _ = KINDS[kind]
    data = data_class(root=str(scenes), image_size=64, batch_size=3)
    model = module.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    samples = data.samples("val")
    batch = samples.collate([samples[place] for place in range(len(samples))])
    with torch.no_grad():
        return model.predict_step(batch, 0), data.class_names


def test_what_is_found_is_what_validation_finds(trained, tmp_path, capsys):
    kind, checkpoint, scenes = trained
    expected, names = validated(*trained)
    folder = scenes / KINDS[kind][3]
    files = sorted(folder.iterdir())
    options = ["--threshold", "0.02"] if kind == "detection" else []
    command = ["--ckpt_path", str(checkpoint), str(folder), "--out", str(tmp_path)]
    main([*command, "--device", "cpu", "--batch_size", "2", *options])
    said = capsys.readouterr().out
    assert "3 predictions" in said and str(tmp_path / "pictures") in said.replace("\n", "")
    table = pd.read_csv(tmp_path / "predictions.csv")
    for file, found in zip(files, expected, strict=True):
        rows = table[table["input"] == str(file)]
        with Image.open(tmp_path / "pictures" / f"{file.name}.png") as copy:
            assert copy.size == Image.open(file).size
        if kind == "segmentation":
            assert rows["share"].sum() == pytest.approx(1, abs=1e-5)
            assert rows["share"].is_monotonic_decreasing
            with Image.open(tmp_path / "labels" / f"{file.name}.png") as labels:
                written = torch.from_numpy(np.array(labels)).long()
            assert torch.equal(written, found + 1)
            for row in rows.itertuples():
                of_class = (found == names.index(row.prediction)).float().mean()
                assert row.share == pytest.approx(of_class.item(), abs=1e-6)
        else:
            kept = found["scores"] >= 0.02
            assert kept.sum() > 0 and (table["score"] >= 0.02).all()
            assert rows["prediction"].tolist() == [names[k] for k in found["labels"][kept]]
            corners = torch.tensor(rows[["x1", "y1", "x2", "y2"]].to_numpy(copy=True)).float()
            torch.testing.assert_close(corners, found["boxes"][kept], atol=0.01, rtol=1e-3)
    assert (tmp_path / "labels").exists() == (kind == "segmentation")


def test_the_end_of_a_training_names_what_can_be_done(trained, tmp_path):
    _, checkpoint, _ = trained
    *_, last = checkpoint.with_name("ending.txt").read_text().splitlines()
    assert f"recipes predict --ckpt_path {checkpoint} PATH" in last  # and no export
    with pytest.raises(ValueError, match="is neither a timm nor a transformers model"):
        export([str(checkpoint), str(tmp_path / "out")])


def test_options_of_other_kinds_are_refused(trained):
    kind, checkpoint, _ = trained
    command = ["--ckpt_path", str(checkpoint), "a.jpg"]
    for flags in (["--top_k", "3"], ["--text", "x"]):
        with pytest.raises(ValueError, match=f"this checkpoint is for {kind}"):
            main([*command, *flags])
    with pytest.raises(ValueError, match=r"--threshold 2.0: expected a number from 0 to 1"):
        main([*command, "--threshold", "2"])


def test_another_seed_matters_where_it_drew_the_scenes(trained, tmp_path):
    kind, checkpoint, scenes = trained
    stage = ["validate", "-c", str(RECIPES / "pela" / f"{kind}.yaml"), "--preset", "tiny"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.logger=false"]
    quiet += [f"--trainer.default_root_dir={tmp_path}"]
    other = [*stage, *quiet, f"--ckpt_path={checkpoint}", "--seed_everything=1"]
    with pytest.raises(ValueError, match="run had seed 0 and this one has 1"):
        cli.main(other)
    run = cli.main([*other, "--data.source=folder", f"--data.root={scenes}"])
    [score] = [
        x for name, x in run.trainer.callback_metrics.items() if name in ("val/miou", "val/map")
    ]
    assert 0 <= score <= 1
    manifest = KINDS[kind][1](root=str(scenes)).manifest("val")
    assert manifest["examples"] == 3 and "members" not in manifest  # no seed drew them


@pytest.mark.parametrize("trained", ["detection"], indirect=True)
def test_a_picture_in_which_nothing_is_found_has_a_line(trained, tmp_path):
    _, checkpoint, _ = trained
    Image.new("RGB", (90, 60)).save(tmp_path / "black.jpg")
    command = ["--ckpt_path", str(checkpoint), str(tmp_path / "black.jpg")]
    main([*command, "--threshold", "1", "--out", str(tmp_path)])
    [row] = pd.read_csv(tmp_path / "predictions.csv").itertuples()
    assert row.input.endswith("black.jpg") and pd.isna(row.prediction)
    [prediction] = Predictor(checkpoint, threshold=1.0)([Image.new("RGB", (90, 60))])
    assert prediction.parts == [] and prediction.label == "" and prediction.probability is None


def test_objects_and_masks_are_painted_in():
    """Mask R-CNN has masks, too; the most certain object comes first."""
    masks = torch.zeros(2, 400, 600, dtype=torch.bool)
    masks[1, 100:200, 200:400] = True
    found = {
        "scores": torch.tensor([0.4, 0.9]),
        "labels": torch.tensor([0, 1]),
        "boxes": torch.tensor([[10.0, 10, 80, 80], [200, 100, 400, 200]]),
        "masks": masks,
    }
    assert [one.label for one in parts_of_detections(found, ["disc", "square"], 0.5)] == ["square"]
    parts = parts_of_detections(found, ["disc", "square"], 0.1)
    assert [one.score for one in parts] == pytest.approx([0.9, 0.4])
    image = Image.new("RGB", (600, 400))
    copy = painted(image, parts)
    assert image.getpixel((399, 199)) == (0, 0, 0)  # as it was
    assert copy.getpixel((250, 200)) == colour(1)  # the box's lower side
    inside = np.array(copy)[170, 360]
    np.testing.assert_allclose(inside, np.array(colour(1)) / 2, atol=1)
    assert copy.getpixel((500, 350)) == (0, 0, 0)


@pytest.mark.parametrize(("number", "mode"), [(254, "L"), (255, "I;16"), (900, "I;16")])
def test_labels_have_room_for_every_class(number, mode):
    pixels = torch.tensor([[True, False]])
    parts = [Part("a", 0, 0.5, pixels=~pixels), Part("b", number, 0.5, pixels=pixels)]
    labels = label_image(parts)
    assert labels.mode == mode and np.array(labels).tolist() == [[number + 1, 1]]
