"""Makes the random numbers of a resumed run equal those of the uninterrupted one."""

import random
from typing import Any

import lightning as L
import numpy as np
import torch


class SeedEveryStep(L.Callback):
    """Seeds python's, numpy's and torch's generators before every training batch.

    All randomness within a batch (dropout, stochastic depth, mixup, masks) then depends only on
    (seed, batches seen, rank), so an interrupted and resumed run equals the uninterrupted one,
    and no two processes or batches share their noise.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed the generators for this batch."""
        batches_seen = trainer.fit_loop.epoch_loop.total_batch_idx
        entropy = (self.seed, batches_seen, trainer.global_rank)
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
