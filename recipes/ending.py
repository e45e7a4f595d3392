"""The lines printed after a training: its checkpoints, and the commands that use them."""

import shlex
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.adapter import SaveAdapter, best_checkpoint
from lightning_modules import albef
from lightning_modules.standalone import mergeable
from recipes.predict import SCENES, has_answers

# verbs of recipes.albef.use, with what they take; a Grounding is a Retrieval, too
ALBEF = (
    (albef.VQA, "ask", "PICTURE 'QUESTION'"),
    (albef.Entailment, "judge", "PICTURE 'SENTENCE'"),
    (albef.Grounding, "point", "PICTURE 'PHRASE'"),
    (albef.Retrieval, "search", "FOLDER 'SENTENCE'"),
)


def ending(trainer: L.Trainer, module: L.LightningModule) -> str:
    """The last and the best checkpoint, the best score, and the commands that use them.

    Args:
        trainer: after `fit`.
        module: the trained module.
    """
    chosen = last_checkpoint(trainer)
    lines = [] if chosen is None else [f"last checkpoint: {chosen}"]
    best = best_checkpoint(trainer)
    if best is not None:
        chosen = Path(best.best_model_path)
        # a resumed run in another folder knows the path of the best checkpoint and not its score
        known = best.best_model_score is not None
        score = f" ({best.monitor} {best.best_model_score:.4g})" if known else ""
        lines.append(f"best checkpoint: {chosen}{score}")
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for one in callbacks:
        if isinstance(one, SaveAdapter) and one.saved:
            lines.append(f"adapter:         {one.saved}")
    if chosen and chosen.is_file():  # a folder of shards resumes, but neither predicts nor exports
        if chosen.is_relative_to(Path.cwd()):
            chosen = chosen.relative_to(Path.cwd())  # as short as it can be typed
        lines += commands(trainer, module, chosen)
    return "\n".join(lines)


def commands(trainer: L.Trainer, module: L.LightningModule, checkpoint: Path) -> list[str]:
    """A line for each command that can use the checkpoint."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    path = shlex.quote(str(checkpoint))
    description = data.describe() if hasattr(data, "describe") else {}
    if description.get("kind") == "pictures and texts":
        uses = [(verb, what) for kind, verb, what in ALBEF if isinstance(module, kind)][:1]
        return [
            f"{f'to {verb}:':<16} python -m recipes.albef.use {verb} --ckpt_path {path} {what}"
            for verb, what in uses
        ]
    if not has_answers(type(module), description):
        return []
    lines = [f"to predict:      python -m recipes predict --ckpt_path {path} PATH"]
    if mergeable(module) and description["kind"] not in SCENES:  # no library has these models
        lines.append(f"to export:       python -m recipes export {path} FOLDER")
    return lines


class SayResume(L.Callback):
    """Prints how to continue a training that Ctrl-C or SIGTERM has ended."""

    @rank_zero_only
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Name the last checkpoint, or say that there is none."""
        by_user = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        if not by_user or trainer.state.fn != TrainerFn.FITTING:
            return
        last = last_checkpoint(trainer)
        if last is None:
            print("no checkpoint was written yet: the same command starts again")
        else:
            print(f"to continue:     the same command with --ckpt_path {shlex.quote(str(last))}")


def last_checkpoint(trainer: L.Trainer) -> Path | None:
    """last.ckpt, a file or (sharded) a folder; None before the first save."""
    folders = [Path(one.dirpath) for one in trainer.checkpoint_callbacks if one.dirpath]  # type: ignore[attr-defined]
    return next((f / "last.ckpt" for f in folders if (f / "last.ckpt").exists()), None)
