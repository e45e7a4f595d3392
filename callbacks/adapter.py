"""Saves the trained VeRA adapter, which is a thousand times smaller than a checkpoint."""

import logging
from pathlib import Path
from typing import Any

import lightning as L

from lightning_modules.vera.adapter import adapted_model, save_adapter

log = logging.getLogger("lightning_modules")


class SaveAdapter(L.Callback):
    """Writes a VeRA adapter of some kilobytes when training has ended, for `load_adapter` to read.

    The adapter comes from the best checkpoint where a checkpoint callback has a `monitor`, and
    from the last step otherwise. Its manifest names the base model, the tokenizer and the classes.
    For a model without VeRA nothing is written, and the log says so; nor in a `fast_dev_run`.

    Args:
        folder: destination; null for `adapter` in the run's folder, or beside the checkpoints if
            these are kept elsewhere.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder
        self.saved: Path | None = None  # the folder, once it is written

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the adapter. All ranks take part, because a sharded vector has to be gathered."""
        model = adapted_model(pl_module)
        if not hasattr(model, "vera"):
            log.info("SaveAdapter: %s has no VeRA adapter to save", type(pl_module).__name__)
            return
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        callback = best_checkpoint(trainer)
        best = Path(callback.best_model_path) if callback else None
        if best is not None and best.is_dir():
            log.warning("SaveAdapter: %s is sharded; the adapter is that of the last step", best)
            best = None
        folder = Path(self.folder) if self.folder else run_folder(trainer) / "adapter"
        about = describe(pl_module, trainer)
        self.saved = save_adapter(model, folder, checkpoint=best, about=about)
        log.info("SaveAdapter: wrote %s, of %s", folder, best or "the last step")


def run_folder(trainer: L.Trainer) -> Path:
    """Where a training leaves its files; the checkpoints' folder if that is somewhere else.

    The current folder, which every run without a `default_root_dir` has, is no run's own.
    """
    root = Path(trainer.default_root_dir).resolve()
    kept = getattr(trainer.checkpoint_callback, "dirpath", None)
    if kept is None or (Path(kept).resolve().is_relative_to(root) and root != Path.cwd()):
        return root
    return Path(kept)


def best_checkpoint(trainer: L.Trainer) -> Any:
    """The callback that wrote the best checkpoint by its `monitor`; None if there is none yet.

    Its `best_model_path` is a file or, where the checkpoint is sharded, a folder.
    """
    for callback in trainer.checkpoint_callbacks:
        path = getattr(callback, "best_model_path", "")  # empty before the first save
        if getattr(callback, "monitor", None) and path and Path(path).exists():
            return callback
    return None


def describe(pl_module: L.LightningModule, trainer: L.Trainer) -> dict[str, Any]:
    """Metadata needed to use an adapter: base model, tokenizer and class names."""
    data = getattr(trainer, "datamodule", None)
    return {
        "base": pl_module.hparams.get("architecture"),
        "base_init_from": getattr(pl_module, "init_from", None),
        "tokenizer": getattr(data, "tokenizer_name", None),
        "classes": list(getattr(data, "class_names", None) or []),
    }
