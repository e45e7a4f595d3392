"""Measurements of PELA's vision experiment, on dense and compressed models.

`m.settings` has `model` and `data`, the classes and arguments from which a stage's module and
DataModule are built, and the further keys that each function reads.
"""

import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from datamodules.images import ImageData, ImageSet
from datamodules.loading import build_loader
from lightning_modules.counting import count_macs, count_parameters, saved_for_backward
from lightning_modules.matformer import extract, importance, nest, reorder
from lightning_modules.pela import Classifier, Features, compress
from lightning_modules.pela.tome import add_tome
from lightning_modules.standalone import plain, save
from recipes.experiment import Measuring
from recipes.machine import OthersAtWork
from recipes.nodes import device
from recipes.records import instance_of, type_of
from recipes.results import Row

CALIBRATION = 2048  # training images, at most, for second moments and importance
STEPS = 10  # timed training steps, after two that are not timed


def measure_dense(m: Measuring) -> Iterator[Row]:
    """Scores and size of the dense model, and chance, repeated in each set of the table."""
    data, model = data_of(m), build(m).model
    scores = {**score(model, data), **size(model, data.image_size)}
    for name in m.settings["sets"]:
        yield from (Row("dense", metric, value, name) for metric, value in scores.items())
        yield Row("chance", "accuracy", 1 / data.num_classes, name)


def measure_start(m: Measuring) -> Iterator[Row]:
    """Scores and size of a compressed model before any training."""
    data = data_of(m)
    model = build(m, ratio=m.settings["ratio"], init_from=m.settings["init_from"]).model
    if m.settings["merged_tokens"]:
        add_tome(model, m.settings["merged_tokens"])
    for name, value in {**score(model, data), **size(model, data.image_size)}.items():
        if m.settings["row"] == "direct":
            yield Row("direct", name, value, m.settings["set"], m.settings["x"])
        if name == "accuracy" and m.settings["x"] is None:
            yield Row(m.settings["row"], "before", value, m.settings["set"])


def measure_trained(m: Measuring) -> Iterator[Row]:
    """Scores of a trained model in float32, its size, settings and shares of the gradient."""
    stage, data = m.stages["trained"], m.datamodule("trained")
    module = stage.module(device()).eval()
    scores = score(module.model, data)  # before `plain`, which merges LoRA in place
    values: dict[str, float] = {**scores, **size(plain(module.model), data.image_size)}
    settings = {name: module.settings.get(name) for name in ("lr", "alpha", "beta", "p", "epsilon")}
    values |= {name: float(value) for name, value in settings.items() if value is not None}
    values |= stage.shares
    where = m.settings["set"], m.settings["x"]
    yield from (Row(m.settings["row"], name, value, *where) for name, value in values.items())


def measure_nested(m: Measuring) -> Iterator[Row]:
    """The slice of a nested model that has as many parameters as the low-rank one."""
    module, data = m.stages["trained"].module(device()), m.datamodule("trained")
    model = extract(module.model, m.settings["slice"]).eval()
    values = {**score(model, data), **size(model, data.image_size), "lr": module.hparams["lr"]}
    yield from (Row("nested", name, value, m.settings["set"]) for name, value in values.items())


def measure_similarity(m: Measuring) -> Iterator[Row]:
    """Similarity of images' features by block: dense, low-rank and repaired model (Fig. 2)."""
    data = data_of(m)
    models = {
        "dense": build(m).model,
        "direct": build(m, ratio=m.settings["ratio"]).model,
        "both": m.model("trained"),
    }
    for row, model in models.items():
        values = similarity(model, data.val_dataloader())
        for block, value in enumerate(values, 1):
            yield Row(row, "similarity", value, m.settings["set"], block)


def measure_cost(m: Measuring) -> Iterator[Row]:
    """Memory and time of a training step: dense, low-rank, and of the repair (Table 8)."""
    plain, ratio = {"alpha": 0.0, "beta": 0.0}, m.settings["ratio"]
    changes = {
        "dense": plain,
        "low_rank": {**plain, "ratio": ratio},
        "repair": {"ratio": ratio, "beta": m.settings["beta"]},
    }
    for row, changed in changes.items():
        # one model at a time: the peak of a device's memory counts all that are there
        others, cost = OthersAtWork(), step_cost(build(m, **changed), data_of(m))
        for name, value in cost.items():
            valid = name != "seconds" or others.absent()
            yield Row(row, name, value if valid else None, m.settings["set"])


def measure_finetuning_cost(m: Measuring) -> Iterator[Row]:
    """The batch with which low-rank fine-tuning needs the memory of the dense fine-tuning."""
    data = data_of(m)
    dense, low_rank = (
        step_cost(build(m, init_from=m.settings[name]), data) for name in ("dense", "low_rank")
    )
    per_image = (low_rank["peak"] - low_rank["fixed"]) / low_rank["batch"]
    # an even number, which mixup needs
    larger = int((dense["peak"] - low_rank["fixed"]) / per_image) // 2 * 2
    yield Row("pela_plus", "fitting_batch", max(larger, data.batch_size), "other images")


def make_hub_weights(m: Measuring) -> Iterator[Row]:
    """Write the hub's weights as a file."""
    save_file(build(m, pretrained=True).model.state_dict(), m.folder / "model.safetensors")
    yield from ()


def make_start(m: Measuring) -> Iterator[Row]:
    """Write a low-rank model with these ranks and factors, no larger than plain low rank."""
    model = build(m).model
    compress(
        model,
        calibration_images(m),
        m.settings["ratio"],
        m.settings["ranks"],
        m.settings["factors"],
        m.settings["model"]["init_args"]["skip"],
    )
    save(model, m.folder / "low_rank")
    yield from ()


def make_sorted(m: Measuring) -> Iterator[Row]:
    """Write a model, or a slice, whose neurons are sorted by importance on training images."""
    model = build(m).model
    reorder(model, importance(model, calibration_images(m), "ffn"))
    part = extract(nest(model, m.settings["fractions"]), m.settings["slice"])
    save_file(part.state_dict(), m.folder / "model.safetensors")
    yield from ()


def make_low_rank_folder(m: Measuring) -> Iterator[Row]:
    """Write a repaired model as a folder whose load.py needs only timm."""
    model = m.model("trained")
    save(model, m.folder / "low_rank", m.datamodule("trained").class_names)
    yield from ()


def data_of(m: Measuring) -> ImageData:
    """The DataModule in the settings."""
    return instance_of(m.settings["data"], seed=m.seed)


def build(m: Measuring, **changes: Any) -> Any:
    """Build a stage's module with these changes to its arguments; the default is dense."""
    given = m.settings["model"]
    arguments = {
        **given["init_args"],
        "num_classes": data_of(m).num_classes,
        "pretrained": False,
        "init_from": m.settings.get("init_from"),
        "ratio": None,
        **changes,
    }
    kind = type_of(given)
    if kind is Classifier:
        arguments = {n: v for n, v in arguments.items() if n not in ("alpha", "beta")}
    module = kind(**arguments)
    module.configure_model()
    return module.to(device()).eval()


@torch.no_grad()
def score(model: nn.Module, data: ImageData) -> dict[str, float]:
    """Accuracy and loss on the validation images."""
    right, loss, count = 0, 0.0, 0
    for images, targets in data.val_dataloader():
        targets = targets.to(device())
        logits = model(images.to(device())).float()
        right += int((logits.argmax(-1) == targets).sum())
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        count += len(targets)
    return {"accuracy": right / count, "loss": loss / count}


def size(model: nn.Module, side: int) -> dict[str, float]:
    """Parameters, and multiply-adds of one image."""
    macs = count_macs(model, (1, 3, side, side))
    return {"parameters": count_parameters(model), "macs": macs}


def calibration_images(m: Measuring) -> Iterator[Tensor]:
    """Batches of evenly spread training images, transformed as for evaluation."""
    data = data_of(m)
    chosen = range(0, len(data.train_set), -(-len(data.train_set) // CALIBRATION))
    images = ImageSet(data.train_set.items, data.read, data.eval_transform())
    batch = data.eval_batch_size or data.batch_size
    loader: DataLoader = build_loader(Subset(images, chosen), batch, training=False)
    return (images for images, _ in loader)


@torch.no_grad()
def similarity(model: nn.Module, loader: Iterable) -> list[float]:
    """The similarity of different images' features, for each block.

    Similarity is the mean cosine over all pairs of images; an image's feature is the mean of the
    block's output over tokens. With unit vectors x_i it is (‖Σ x_i‖² − n) / (n (n − 1)).
    """
    sums: list[Tensor] = []
    count = 0
    with Features(model) as features:
        for images, _ in loader:
            model(images.to(device()))
            vectors = [f.flatten(1, -2).double().mean(1) for f in features.take()]
            parts = [F.normalize(v, dim=-1).sum(0) for v in vectors]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
            count += len(images)
    return [float((total.square().sum() - count) / (count * (count - 1))) for total in sums]


def step_cost(module: Any, data: ImageData) -> dict[str, float]:
    """Memory and time of one training step.

    On a GPU `peak` is the allocator's peak. On a CPU, which reports none, it is a sum: weights,
    gradients, AdamW's two moments, the teacher's weights, and all tensors saved for the backward
    pass.

    Args:
        module: at the start of its training, on the device.
        data: gives the batch.

    Returns:
        peak and fixed (the part that does not grow with the batch) in bytes, seconds, batch size.
    """
    model, teacher = module.model, None
    if module.settings.get("alpha") or module.settings.get("beta"):
        teacher = module.build_teacher().requires_grad_(False).eval().to(device())
        object.__setattr__(module, "teacher", teacher)
    module.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    images, targets = (part.to(device()) for part in next(iter(data.train_dataloader())))

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
            loss = module.training_step((images, targets), 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        with saved_for_backward(model) as saved_bytes:
            step()
        step()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    trained = sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters())
    fixed = trained + (sum(p.nbytes for p in teacher.parameters()) if teacher else 0)
    peak = fixed + sum(saved_bytes.values())
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    return {
        "peak": peak,
        "fixed": fixed,
        "seconds": statistics.median(times),
        "batch": len(images),
    }
