"""Draws the granularity that each training step optimises (MatFormer, Eq. 2)."""

import os
import random
from typing import Any

import lightning as L

from lightning_modules.matformer.nest import nesting_of, set_granularity


class GranularitySampling(L.Callback):
    """Sets a random granularity before every training step.

    The draw depends on (seed, global step) alone: all processes agree without communication, a
    resumed run draws what the uninterrupted run would have drawn, and the micro-batches of one
    accumulated step share a granularity. The global random number generators are not touched.

    Args:
        probabilities: one for each granularity, smallest first, summing to 1; uniform when null
            (MatFormer, arXiv 2310.07707, Eq. 2 and Table 6).
        per_layer: draw each layer's granularity independently (the OFA baseline, Appendix B.4).
        seed: seed of the draws; null for that of seed_everything (0 if it was not called).

    Raises:
        ValueError: when training starts, if the probabilities do not fit the model.
    """

    def __init__(
        self,
        probabilities: list[float] | None = None,
        per_layer: bool = False,
        seed: int | None = None,
    ):
        self.probabilities = probabilities
        self.per_layer = per_layer
        self.seed = seed

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the probabilities against the model.

        Raises:
            ValueError: if there is not one probability for each granularity.
        """
        names = nesting_of(pl_module.model).names  # type: ignore[arg-type]
        p = self.probabilities
        if p is not None and (len(p) != len(names) or min(p) < 0 or abs(sum(p) - 1) > 1e-6):
            raise ValueError(
                f"probabilities {p} must be {len(names)} numbers, one each for {', '.join(names)}, "
                "not negative and summing to 1"
            )

    def draw(self, step: int, granularities: int, layers: int) -> list[int]:
        """The granularity index of each layer at the optimizer step number `step`."""
        # seed_everything stores its seed in the environment, so that all processes read the same
        seed = os.environ.get("PL_GLOBAL_SEED", 0) if self.seed is None else self.seed
        generator = random.Random(f"{seed} {step}")
        count = layers if self.per_layer else 1
        chosen = generator.choices(range(granularities), weights=self.probabilities, k=count)
        return chosen if self.per_layer else chosen * layers

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the granularity drawn for this step."""
        nesting = nesting_of(pl_module.model)  # type: ignore[arg-type]
        chosen = self.draw(trainer.global_step, len(nesting.names), len(nesting.layers))
        set_granularity(pl_module.model, chosen)  # type: ignore[arg-type]
