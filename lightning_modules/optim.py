"""Parameter groups and learning-rate schedules that several methods share."""

import math
import warnings
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from transformers.optimization import get_scheduler


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decay_vectors: bool = False,
    never: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Two groups: parameters that decay, and those that do not.

    Args:
        model: its parameters with requires_grad are taken; what its `no_weight_decay()` names, if
            it has one (timm's do), counts as a vector.
        weight_decay: AdamW's decoupled decay, per unit of learning rate.
        decay_vectors: also decay biases, norms and other one-dimensional parameters.
        never: names of further parameters that count as vectors.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    never = {*never, *getattr(model, "no_weight_decay", set)()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spare = not decay_vectors and (parameter.ndim < 2 or name in never)
            (kept if spare else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    momentum: float = 0.9,
) -> Optimizer:
    """AdamW or SGD with momentum.

    Raises:
        ValueError: for any other name.
    """
    if name == "adamw":
        # On a CPU the fused step takes a tenth of the default's time; elsewhere the default is as
        # good, and a fused one cannot have its gradients clipped under 16-mixed.
        on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
        optimizer = AdamW(groups, lr=lr, betas=betas, fused=on_cpu or None)
        # A fused step can undo a gradient scaler's factor, and by this flag Lightning refuses to
        # clip before it. On a CPU there is no scaler, under bf16-mixed neither.
        optimizer._step_supports_amp_scaling = False
        return optimizer
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=momentum)
    raise ValueError(f"unknown optimizer {name!r}: expected 'adamw' or 'sgd'")


def training_steps(trainer: Any) -> int:
    """Optimizer steps of the whole run, for use in `configure_optimizers`.

    Lightning 2.6 builds the training loader to estimate them. On resume that comes before it has
    read where in the epoch the checkpoint lies, and the loader would never hear of it: so the
    loader is dropped and built again when training starts.

    Args:
        trainer: the Lightning Trainer.

    Raises:
        ValueError: if the run has no end.
    """
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps):
        raise ValueError(
            f"max_epochs is {trainer.max_epochs} and max_steps {trainer.max_steps}, but the "
            "learning rate's schedule needs an end: set trainer.max_steps or trainer.max_epochs"
        )
    trainer.fit_loop._combined_loader = None
    return int(steps)


def with_schedule(
    optimizer: Optimizer,
    schedule: str,
    warmup_steps: float,
    total_steps: int,
    schedule_args: dict[str, Any] | None = None,
) -> Any:
    """The optimizer with a learning rate that changes every step, as Lightning takes it.

    Args:
        optimizer: its `lr` is the peak.
        schedule: a name of transformers' get_scheduler: "cosine", "linear",
            "constant_with_warmup", …
        warmup_steps: optimizer steps of linear warm-up from 0, or a share of all if below 1.
        total_steps: optimizer steps of the whole run.
        schedule_args: further arguments of that schedule, such as {"min_lr_rate": 0.1}.
    """
    warmup = round(warmup_steps * total_steps if warmup_steps < 1 else warmup_steps)
    if warmup >= total_steps > 0:
        warnings.warn(
            f"the learning rate warms up for {warmup} steps of {total_steps} and never reaches its "
            "peak: lower the warm-up, or train longer",
            stacklevel=2,
        )
    scheduler = get_scheduler(schedule, optimizer, warmup, total_steps, schedule_args)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
    }
