"""Leaving the trained adapter behind, which is a thousand times smaller than a checkpoint."""

import logging
from pathlib import Path
from typing import Any

import lightning as L

from lightning_modules.vera.adapter import save_adapter

log = logging.getLogger("lightning_modules")


class SaveAdapter(L.Callback):
    """Writes a VeRA adapter when training ends: kilobytes, to be read by `load_adapter`.

    A model of another method is left alone.

    Args:
        folder: where to; `adapter` in the run's folder when null.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write it. All ranks take part, because a sharded vector has to be gathered."""
        model: Any = pl_module.model
        if not hasattr(model, "vera"):
            log.info("SaveAdapter: %s has no VeRA adapter to save", type(pl_module).__name__)
            return
        folder = Path(self.folder or Path(trainer.default_root_dir) / "adapter")
        save_adapter(model, folder)
