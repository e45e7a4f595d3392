"""Parameter groups, optimizers and learning-rate schedules that several methods share."""

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
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
    """The trainable parameters in up to two groups: with weight decay, and without.

    Biases, norms and other one-dimensional parameters do not decay, nor do those that the model
    names in `no_weight_decay()` (a method of timm's models) or that `never` names.

    Args:
        model: its parameters with requires_grad are taken.
        weight_decay: AdamW's decoupled decay, per unit of learning rate.
        decay_vectors: decay all parameters, those above included.
        never: names of further parameters without decay.

    Returns:
        The groups that are not empty, as torch's optimizers take them.
    """
    with_decay: list[nn.Parameter] = []
    without: list[nn.Parameter] = []
    never = {*never, *getattr(model, "no_weight_decay", set)()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = not decay_vectors and (parameter.ndim < 2 or name in never)
            (without if exempt else with_decay).append(parameter)
    groups = [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def head_parameters(model: nn.Module, heads: Collection[str]) -> set[nn.Parameter]:
    """The parameters of the modules with these names, those that others share included.

    Names of no module are ignored.
    """
    return {
        parameter
        for name, module in model.named_modules()
        if name in heads
        for parameter in module.parameters()
    }


def split_groups(
    groups: Sequence[Mapping[str, Any]],
    heads: Collection[nn.Parameter],
    of_body: Mapping[str, Any],
    of_heads: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Split parameter groups so that the heads have settings of their own, such as "lr".

    Args:
        groups: from `parameter_groups`.
        heads: parameters, from `head_parameters`.
        of_body: settings that the optimizer has for the other parameters.
        of_heads: the same settings for the heads.

    Returns:
        The groups that are not empty.
    """
    return [
        {**group, **settings, "params": params}
        for group in groups
        for settings, in_heads in ((of_body, False), (of_heads, True))
        if (params := [p for p in group["params"] if (p in heads) == in_heads])
    ]


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
        # On a CPU the fused step takes a tenth of the default's time. Elsewhere the default is as
        # fast, and gradients cannot be clipped before a fused step under 16-mixed.
        on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
        optimizer = AdamW(groups, lr=lr, betas=betas, fused=on_cpu or None)
        # Lightning refuses gradient clipping where this flag is set, because a fused step can
        # unscale gradients itself. There is no gradient scaler on a CPU or under bf16-mixed.
        optimizer._step_supports_amp_scaling = False
        return optimizer
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=momentum)
    raise ValueError(f"unknown optimizer {name!r}: expected 'adamw' or 'sgd'")


def training_steps(trainer: Any) -> int:
    """Optimizer steps of the full run, for use in `configure_optimizers`.

    Lightning 2.6 builds the training loader to estimate them. When a run resumes, that happens
    before the checkpoint's position in the epoch is restored, and a loader built that early never
    receives it. So the loader is dropped here, and Lightning builds it again when training starts.

    Args:
        trainer: the Lightning Trainer.

    Raises:
        ValueError: if neither max_steps nor max_epochs ends the run.
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
    """The optimizer and its schedule, stepped every optimizer step, as Lightning takes them.

    Args:
        optimizer: its `lr` is the peak learning rate.
        schedule: a name of transformers' get_scheduler: "cosine", "linear",
            "constant_with_warmup", …
        warmup_steps: optimizer steps of linear warm-up from 0, or a share of all if below 1.
        total_steps: optimizer steps of the full run.
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
