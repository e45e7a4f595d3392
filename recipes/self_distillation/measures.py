"""Measurements of finished stages: scores of fine-tunings, distances and losses of adaptations."""

import json
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from datamodules.images import ImageSet
from lightning_modules.self_distillation import distance
from lightning_modules.self_distillation.mae_checkpoint import to_timm
from lightning_modules.weights import fingerprint, read_state_dict
from recipes.experiment import Measuring
from recipes.methods import silent_trainer
from recipes.records import Finished, type_of
from recipes.results import Row, write_atomically

ORIGINAL = "original.ckpt"


def write_original(m: Measuring) -> Iterator[Row]:
    """Write the initial weights (θ_init, φ_init) that a stage's settings name, with their hash."""
    arguments = dict(m.settings["model"])
    kind = pkgutil.resolve_name(arguments.pop("class"))
    L.seed_everything(0, verbose=False)  # a decoder that the weights lack is drawn at random
    built = kind(**arguments)
    built.configure_model()
    state = {f"model.{key}": value for key, value in built.model.state_dict().items()}
    torch.save({"state_dict": state, "start": built.start}, m.folder / ORIGINAL)
    yield from ()


def score(m: Measuring) -> Iterator[Row]:
    """Loss, accuracy and F1 on each part, generalisation gap, distance from θ_init (Section 5.2).

    If the setting `steps` is not None, only a point of Fig. 1's curve is measured. `split.json`
    records the data, the checkpoint and the examples of each part.
    """
    s, tuned = m.settings, m.stages["finetuning"]
    data = tuned.datamodule()
    checkpoint = checkpoint_of(tuned, s["select"])
    scores = scores_of_parts(tuned, checkpoint, parts(data, s["select"] == "best"))

    def row(metric: str, value: float | None, name: str = s["row"], x: float | None = None) -> Row:
        return Row(name, metric, value, s["set"], x)

    if s["steps"] is not None:
        for metric in ("accuracy", "f1"):
            yield row(metric, scores["test"][metric], x=s["steps"])
        return
    for part, values in scores.items():
        prefix = "" if part == "test" else f"{part}_"
        for metric, value in values.items():
            yield row(f"{prefix}{metric}", value)
    yield row("score", scores["test"][s["metric"]])
    yield row("gap", scores["test"]["loss"] - scores["train"]["loss"])
    moved = distance(encoder(checkpoint, s["kind"]), original_encoder(m))
    yield row("distance", moved)
    yield row("seconds", tuned.seconds)
    if s["rounds"] is not None:
        yield row("distance_by_round", moved, "after fine-tuning", s["rounds"])
    manifest = {part: data.manifest(part) for part in ("train", "val", "test")}
    for part, content in manifest.items():
        yield row(f"{part}_examples", content["examples"])
    if s["by_size"]:
        value = scores["test"][s["metric"]]
        yield Row(s["row"], "score_by_size", value, "", manifest["train"]["examples"])
    settings = tuned.settings.data
    arguments = {"data": settings.class_path, "settings": settings.init_args.as_dict()}
    text = json.dumps({**arguments, "parts": manifest, "checkpoint": str(checkpoint)}, indent=1)
    write_atomically(m.folder / "split.json", text + "\n")


def falls(m: Measuring) -> Iterator[Row]:
    """By how much each round t of self-distillation shortens ‖θ_init − θ‖ after fine-tuning.

    Settings: `rounds`, the number of rounds of each row. x is t; round 1 is compared with further
    pre-training.
    """
    s, original_weights = m.settings, original_encoder(m)
    distances = {
        made: distance(encoder(checkpoint, s["kind"]), original_weights)
        for row, made in s["rounds"].items()
        for checkpoint in [checkpoint_of(m.stages[row], s["select"])]
    }
    for made in sorted(set(distances) - {0}):
        if made - 1 in distances:
            value = distances[made - 1] - distances[made]
            yield Row("after fine-tuning", "distance_fall", value, s["set"], made)


def checkpoint_of(tuned: Finished, select: str) -> Path:
    """The checkpoint of a fine-tuning that is scored, the "last" or the "best"."""
    return tuned.best if select == "best" else tuned.checkpoint


def scores_of_parts(
    tuned: Finished, checkpoint: Path, loaders: dict[str, DataLoader]
) -> dict[str, dict[str, float]]:
    """Loss, accuracy, F1 and the number of classes predicted, on each part."""
    module = type_of(tuned.settings.model).load_from_checkpoint(checkpoint, map_location="cpu")
    trainer = silent_trainer(accelerator=tuned.settings.trainer.accelerator)
    scores = {}
    for part, loader in loaders.items():
        (values,) = trainer.test(module, loader, verbose=False)
        scores[part] = {key.removeprefix("test/"): value for key, value in values.items()}
    return scores


def parts(data: Any, validation: bool) -> dict[str, DataLoader]:
    """Loaders of the parts to score, by name.

    "train", with the transform of evaluation (of texts the first `eval_limit`, if that is set);
    "test"; "new", the test texts that are not also training texts, if some are; and with
    `validation` "val".
    """
    if hasattr(data, "train_set"):
        train = ImageSet(data.train_set.items, data.read, data.eval_transform())
        loaders = {"train": data.loader(train), "test": data.test_dataloader()}
    else:
        samples, test = data.samples("train"), data.samples("test")
        places = range(min(len(samples), data.eval_limit or len(samples)))
        loaders = {"train": subset(data, samples, places), "test": data.loader(test)}
        texts = {example.first for example in data.examples("train")}
        new = [i for i, example in enumerate(data.examples("test")) if example.first not in texts]
        if 0 < len(new) < len(test):
            loaders["new"] = subset(data, test, new)
    if validation:
        loaders["val"] = data.val_dataloader()
    return loaders


def subset(data: Any, samples: Any, places: Sequence[int]) -> DataLoader:
    """A loader of the samples at some places."""
    chosen: Any = Subset(samples, places)
    chosen.collate = samples.collate
    return data.loader(chosen)


def majority(m: Measuring) -> Iterator[Row]:
    """Accuracy and macro F1 of always predicting the largest training class.

    As for the other rows, F1 is the mean over the classes that are in the test part or predicted.
    """
    data, name = m.datamodule("finetuning"), m.settings["set"]
    labels = {part: labels_of(data, part) for part in ("train", "test")}
    most = torch.bincount(labels["train"]).argmax()
    share = float((labels["test"] == most).float().mean())
    yield Row("majority", "accuracy", share, name)
    classes = {*labels["test"].tolist(), int(most)}
    yield Row("majority", "f1", 2 * share / (1 + share) / len(classes), name)


def labels_of(data: Any, part: str) -> Tensor:
    """The classes of a part's examples."""
    if hasattr(data, "train_set"):
        labels = [label for _, label in getattr(data, f"{part}_set").items]
    else:
        labels = [example.label for example in data.examples(part)]
    return torch.tensor([int(label) for label in labels])


def trace(m: Measuring) -> Iterator[Row]:
    """An adaptation's distance from the original weights, and its training and held-out L_MAE.

    `begins_with_original` is 1 if its initial weights hash to those of the original checkpoint.
    `val_mae_by_share` has x = 1 at the last check of held-out L_MAE, and 0.5 at the one nearest to
    half-way.
    """
    s, stage = m.settings, m.stages["adaptation"]
    checkpoint = torch.load(stage.checkpoint, map_location="cpu", weights_only=True)
    original_hash = fingerprint(read_state_dict(original(m)))
    x = s["steps"]

    def row(metric: str, value: float | None, x: float | None = x) -> Row:
        return Row(s["row"], metric, value, s["set"], x)

    yield row("begins_with_original", float(checkpoint["start"] == original_hash))
    moved = distance(encoder(stage.checkpoint, s["kind"]), original_encoder(m))
    yield row("adaptation_distance", moved)
    yield row("adaptation_seconds", stage.seconds)
    yield row("updates", checkpoint["global_step"])
    history = stage.history
    for part in ("train", "val"):
        if values := history.get(f"{part}/mae"):
            # single training batches vary: the mean of the last tenth
            last = values[-max(1, len(values) // 10) :] if part == "train" else values[-1:]
            yield row(f"{part}_mae", sum(last) / len(last))
    if x is None:
        checks = history.get("val/mae", [])
        steps = check_steps(stage.settings.trainer, len(checks), checkpoint["global_step"])
        shares = [step / steps[-1] for step in steps]
        halfway = min(shares[:-1], key=lambda share: abs(share - 0.5), default=None)
        for value, step, share in zip(checks, steps, shares, strict=True):
            yield row("val_mae_by_steps", value, step)
            yield row("val_mae_by_share", value, 0.5 if share == halfway else share)
        if s["rounds"] is not None:
            yield Row("before fine-tuning", "distance_by_round", moved, s["set"], s["rounds"])


def check_steps(trainer: Any, count: int, updates: int) -> list[float]:
    """The updates after which a training was validated `count` times, by its trainer's settings."""
    if trainer.check_val_every_n_epoch is None:  # every so many batches
        interval = trainer.val_check_interval / trainer.accumulate_grad_batches
        return [interval * place for place in range(1, count + 1)]
    return [updates * place / count for place in range(1, count + 1)]


def original(m: Measuring) -> Path:
    """The checkpoint of the original weights."""
    node = m.stages["original"]
    written = node.folder / ORIGINAL
    return written if written.is_file() else node.checkpoint


def original_encoder(m: Measuring) -> dict[str, Tensor]:
    """The weights of the original encoder."""
    return encoder(original(m), m.settings["kind"])


def encoder(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """The encoder's weights in a checkpoint: a ViT's under timm's names, or those below a head."""
    state = read_state_dict(checkpoint)
    if kind == "images":
        return to_timm(state)
    base = next(name for name in state if "embeddings." in name).partition(".")[0]
    return {name: value for name, value in state.items() if name.startswith(f"{base}.")}
