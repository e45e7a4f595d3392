"""The lines printed after a training: its checkpoints, and the commands that use them."""

from pathlib import Path
from typing import Any

import lightning as L

from callbacks.adapter import SaveAdapter, best_checkpoint
from recipes.predict import has_answers


def ending(trainer: L.Trainer, module: L.LightningModule) -> str:
    """The last and the best checkpoint, the best score, and the commands that use them.

    Args:
        trainer: after `fit`.
        module: the trained module.
    """
    folders = [Path(one.dirpath) for one in trainer.checkpoint_callbacks if one.dirpath]  # type: ignore[attr-defined]
    last = next((f / "last.ckpt" for f in folders if (f / "last.ckpt").is_file()), None)
    best = best_checkpoint(trainer)
    lines = [] if last is None else [f"last checkpoint: {last}"]
    for callback in trainer.checkpoint_callbacks:
        one: Any = callback
        if best is not None and Path(getattr(one, "best_model_path", "")) == best:
            lines.append(f"best checkpoint: {best} ({one.monitor} {one.best_model_score:.4g})")
            break
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for one in callbacks:
        if isinstance(one, SaveAdapter) and hasattr(module.model, "vera"):
            folder = one.folder or Path(trainer.default_root_dir) / "adapter"
            lines.append(f"adapter:         {folder}")
    if chosen := best or last:
        if chosen.is_relative_to(Path.cwd()):
            chosen = chosen.relative_to(Path.cwd())  # as short as it can be typed
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not (hasattr(data, "describe") and has_answers(type(module), data.describe())):
            return "\n".join(lines)
        lines += [
            f"to predict:      python -m recipes predict --ckpt_path {chosen} PATH",
            f"to export:       python -m recipes export {chosen} FOLDER",
        ]
    return "\n".join(lines)
