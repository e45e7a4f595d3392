"""Dense and compressed models side by side: build, score, look inside, and what a step costs."""

import statistics
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from datamodules.images import ImageData, ImageSet
from datamodules.loading import build_loader
from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.pela import PELA, Calibration, Features, factorize, plan_uniform
from lightning_modules.pela.checkpoint import save

CALIBRATION = 2048  # training images at most, for the second moments
STEPS = 10  # timed, after two that are not


def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(checkpoint: Path) -> PELA:
    """The module of a stage's checkpoint, ready to evaluate."""
    return PELA.load_from_checkpoint(checkpoint, map_location="cpu").to(device()).eval()


def build(config: Any, num_classes: int, **changes: Any) -> PELA:
    """A module as a stage would start it.

    Args:
        config: the stage, parsed.
        num_classes: of its data.
        changes: arguments of PELA that differ.
    """
    arguments = {**config.model.init_args.as_dict(), "num_classes": num_classes, **changes}
    module = PELA(**arguments)
    module.configure_model()
    return module.to(device()).eval()


@torch.no_grad()
def score(model: nn.Module, data: ImageData, what: str) -> dict[str, Any]:
    """Parameters, multiply-adds of one image, accuracy and loss on the validation images."""
    right, loss, count = 0, 0.0, 0
    for images, targets in track(data.val_dataloader(), description=what, transient=True):
        targets = targets.to(device())
        logits = model(images.to(device())).float()
        right += int((logits.argmax(-1) == targets).sum())
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        count += len(targets)
    return {**size(model, data), "accuracy": right / count, "loss": loss / count}


def size(model: nn.Module, data: ImageData) -> dict[str, int]:
    """Parameters and multiply-adds of one image."""
    macs = count_macs(model, (1, 3, data.image_size, data.image_size))
    return {"parameters": count_parameters(model), "macs": macs}


@torch.no_grad()
def similarity(model: nn.Module, loader: Iterable, what: str) -> list[float]:
    """How alike different images look to each block (Fig. 2).

    The mean cosine of two different images' features, over all pairs; an image's feature is the
    mean of the block's output over tokens. With unit vectors x_i it is
    (‖Σ x_i‖² − n) / (n (n − 1)).
    """
    sums: list[Tensor] = []
    count = 0
    with Features(model) as features:
        for images, _ in track(loader, description=what, transient=True):
            model(images.to(device()))
            vectors = [f.flatten(1, -2).double().mean(1) for f in features.take()]
            parts = [F.normalize(v, dim=-1).sum(0) for v in vectors]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
            count += len(images)
    return [float((total.square().sum() - count) / (count * (count - 1))) for total in sums]


def whiten(dense: nn.Module, ratio: float, skip: list[str], data: ImageData, folder: Path) -> Path:
    """Write the dense model's factors that fit the training images (uniform ranks) to a folder.

    Returns:
        The folder's weights.
    """
    chosen = range(0, len(data.train_set), -(-len(data.train_set) // CALIBRATION))
    images = ImageSet(data.train_set.items, data.read, *data.eval_transform())
    loader: DataLoader = build_loader(Subset(images, chosen), data.eval_batch_size, training=False)
    with torch.no_grad(), Calibration(dense, skip) as calibration:
        for batch, _ in track(loader, description="second moments", transient=True):
            dense(batch.to(device()))
    factorize(dense, ranks=plan_uniform(dense, ratio, skip), moments=calibration.moments())
    return save(dense, folder) / "model.safetensors"


def step_cost(module: PELA, data: ImageData) -> dict[str, float]:
    """Memory and time of one training step, without and with what grows with the batch (Table 8).

    On a GPU `peak` is what was allocated at most. On a CPU nothing reports that, so it is counted:
    weights, gradients and AdamW's two moments, the teacher's weights, and every tensor that the
    backward pass keeps.

    Args:
        module: at the start of its training, on the device.
        data: gives the batch.

    Returns:
        peak and fixed (without activations) in bytes, seconds, and the batch.
    """
    model = module.model
    assert model is not None
    if module.hparams["alpha"] or module.hparams["beta"]:
        teacher = module.build_teacher().requires_grad_(False).eval().to(device())
        object.__setattr__(module, "teacher", teacher)
    module.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    images, targets = (part.to(device()) for part in next(iter(data.train_dataloader())))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
            loss = module.training_step((images, targets), 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        with saved_tensors_hooks(keep, lambda tensor: tensor):
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
    watching = sum(p.nbytes for p in module.teacher.parameters()) if module.teacher else 0
    fixed = trained + watching
    peak = fixed + sum(kept.values())
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    return {
        "peak": peak,
        "fixed": fixed,
        "seconds": statistics.median(times),
        "batch": len(images),
    }
