"""Attaches a frozen teacher model to a LightningModule during fit, for distillation."""

from typing import Any

import lightning as L
from torch import nn


class FrozenTeacher(L.Callback):
    """Builds the teacher of a LightningModule when fit starts, and frees it when fit ends.

    The module must have `build_teacher()`, which returns a plain torch model with its weights
    loaded, and an attribute `teacher`, which is None outside of fit. The teacher is moved to the
    module's device in the trainer's precision and stays frozen and in eval mode, whatever the
    module's mode. It is not registered as a submodule, so it is absent from `parameters()`,
    `state_dict()`, checkpoints, the optimizer, DDP's buckets and FSDP's shards; each process holds
    a full copy. A resumed run builds it again from the same source as the first run.

    Raises:
        ValueError: when training starts, if the module has no `build_teacher`.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Build, freeze and attach the teacher.

        Raises:
            ValueError: if the module cannot build a teacher.
        """
        build: Any = getattr(pl_module, "build_teacher", None)
        if build is None:
            raise ValueError(
                f"{type(pl_module).__name__} has no build_teacher(): remove FrozenTeacher from "
                "trainer.callbacks, or define build_teacher() so that it returns the teacher"
            )
        teacher: nn.Module = build().requires_grad_(False).eval()
        teacher = trainer.precision_plugin.convert_module(teacher).to(pl_module.device)
        # not by nn.Module.__setattr__, which would register it as a submodule
        object.__setattr__(pl_module, "teacher", teacher)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Free the teacher's memory."""
        object.__setattr__(pl_module, "teacher", None)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Free the teacher's memory when training fails or is interrupted."""
        object.__setattr__(pl_module, "teacher", None)
