"""Validation and test, which score the same batches in the same way under two names."""

from typing import Any


class Evaluation:
    """The hooks of validation and test for a LightningModule, which names this class first.

    The module gathers scores in torchmetrics, whose `compute` is over all processes, and leaves
    out the padding that gives all of them equally many examples (label IGNORED): a batch may hold
    nothing else.
    """

    def score(self, batch: Any) -> None:
        """Add a batch to the metrics; a module implements it."""
        raise NotImplementedError

    def report(self, stage: str) -> None:
        """Log the metrics as `stage/…`, "val" or "test", and reset them; a module implements it."""
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Score a batch."""
        self.score(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Score a batch."""
        self.score(batch)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics under `val/`."""
        self.report("val")

    def on_test_epoch_end(self) -> None:
        """Log the metrics under `test/`."""
        self.report("test")
