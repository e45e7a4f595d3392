"""A teacher: a frozen model beside the one that trains."""

from typing import Any

import lightning as L
from torch import nn


class FrozenTeacher(L.Callback):
    """Gives a module its teacher while it trains.

    The module has `build_teacher()`, which returns a plain torch model with its weights loaded,
    and a plain attribute `teacher`, None outside of fit. The teacher is put on the module's
    device in the trainer's precision, without gradients and in eval mode, whatever the module's
    mode. It is no submodule: not in `parameters()`, `state_dict()`, checkpoints, the optimizer,
    DDP's buckets or FSDP's shards; each process holds a whole one. A resumed run builds it anew,
    from where the first run did.

    Raises:
        ValueError: when training starts, if the module does not know how to build a teacher.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Build, freeze and attach the teacher."""
        build: Any = getattr(pl_module, "build_teacher", None)
        if build is None:
            raise ValueError(
                f"{type(pl_module).__name__} has no build_teacher(): remove FrozenTeacher from "
                "trainer.callbacks, or give the module one that returns the teacher"
            )
        teacher: nn.Module = build().requires_grad_(False).eval()
        teacher = trainer.precision_plugin.convert_module(teacher).to(pl_module.device)
        # past nn.Module.__setattr__, which would make it a submodule
        object.__setattr__(pl_module, "teacher", teacher)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the teacher go."""
        object.__setattr__(pl_module, "teacher", None)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Let the teacher go when training breaks off, too."""
        object.__setattr__(pl_module, "teacher", None)
