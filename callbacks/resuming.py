"""Makes a resumed run continue as the uninterrupted one, or refuses to resume it."""

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

KEY = "samples_per_step"  # in a checkpoint
# settings that torch restores with the optimizer, whatever this run's are
RESTORED = ("optimizer", "lr", "head_lr", "backbone_lr", "betas", "momentum", "weight_decay")


class Resuming(L.Callback):
    """Resumes only with as many samples per optimizer step, and at the right epoch.

    Batch sizes are per device, so on another number of devices an epoch would have another number
    of steps, and the learning rate's schedule would end early or begin again. A learning rate of
    this run would have no effect, since the checkpoint's optimizer has its own.
    """

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the number of samples per optimizer step."""
        checkpoint[KEY] = samples_per_step(trainer)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse another number of samples per optimizer step, or settings of the optimizer.

        Raises:
            ValueError: naming both numbers, or the setting and both values.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved, ours = checkpoint.get("hyper_parameters", {}), pl_module.hparams
        for name in RESTORED:
            if name in saved and name in ours and saved[name] != ours[name]:
                raise ValueError(
                    f"model.{name} is {ours[name]}, but the checkpoint's run had {saved[name]}, "
                    "which stays in force where it continues: set that, or start a new run from "
                    "its weights with model.init_from"
                )
        _reopen_epoch(checkpoint.get("loops", {}).get("fit_loop", {}))
        before, now = checkpoint.get(KEY), samples_per_step(trainer)
        if before and now and before != now:
            raise ValueError(
                f"the checkpoint's run had {before} samples in an optimizer step and this run has "
                f"{now} ({trainer.world_size} devices), which would change its learning rates: set "
                "data.batch_size, which is per device, or trainer.accumulate_grad_batches so that "
                f"there are {before}, or start a new run from its weights with model.init_from"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the next epoch if the checkpoint is of the end of one.

        With max_steps, Lightning 2.6 would first run one batch more as the epoch that has ended.
        """
        loop = trainer.fit_loop
        if loop.restarted_on_epoch_end:
            loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            # not the property, which stays true under max_steps
            loop._restarting = loop.epoch_loop.restarting = False


def _reopen_epoch(loop: dict[str, Any]) -> None:
    """Correct the state of Lightning's fit loop, if max_steps has ended the run inside an epoch.

    Lightning counts that epoch as complete; a run with more steps would leave out its rest.
    """
    loaders = loop.get("state_dict", {}).get("combined_loader", [])
    counts = loop.get("epoch_progress", {})
    inside = any(isinstance(one, dict) and one.get("batches") for one in loaders)
    if inside and counts["current"]["processed"] == counts["current"]["started"]:
        for part in counts.values():
            part["processed"] = part["completed"] = part["started"] - 1


def samples_per_step(trainer: L.Trainer) -> int | None:
    """Training samples in an optimizer step, on all devices; None if the data do not tell."""
    batch_size = getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
    if batch_size is None:
        return None
    return batch_size * trainer.world_size * trainer.accumulate_grad_batches
