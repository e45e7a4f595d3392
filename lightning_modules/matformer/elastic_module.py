"""What the trainings of nested models have in common, whatever the model is given."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_modules.matformer.consistency import SubmodelMetrics
from lightning_modules.matformer.joint import joint_losses
from lightning_modules.matformer.nest import nesting_of, set_granularity
from lightning_modules.weights import refuse_another_model


class ElasticModule(L.LightningModule):
    """The base of MatViT and MatLM.

    A subclass has the hyperparameters `fractions`, `joint`, `split_batch` and
    `eval_granularities`, builds `model` and `metrics` in `configure_model`, and writes `loss` and
    `score`.

    Attributes:
        monitored: the metric that the largest submodel reports under a name without its size.
        identity: hyperparameters that make the model what it is.

    Raises:
        ValueError: for `joint` without fractions, or `split_batch` without `joint`.
    """

    monitored = "loss"
    identity: tuple[str, ...] = ("architecture", "model_args", "fractions")

    def __init__(self, fractions: Any, joint: str | None, split_batch: bool) -> None:
        super().__init__()
        if split_batch and joint is None:
            raise ValueError("split_batch needs joint: 'mean' or 'sum'; there is nothing to split")
        if joint is not None and fractions is None:
            raise ValueError(f"joint: {joint} needs fractions; a plain model has one granularity")
        self.model: Any = None
        self.metrics: SubmodelMetrics | None = None

    @property
    def settings(self) -> Any:
        """The arguments of the subclass."""
        return self.hparams

    # What a subclass writes.

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of the granularity that is set."""
        raise NotImplementedError

    def score(self, batch: Any) -> None:
        """Add a batch to the metrics of every submodel."""
        raise NotImplementedError

    # What it then has.

    @property
    def submodels(self) -> dict[str, list[int] | None]:
        """What validation scores, by label; the largest comes first and is the reference."""
        if self.settings.fractions is None:
            return {"all": None}
        nesting = nesting_of(self.model)
        uniform = [nesting.resolve(name) for name in reversed(nesting.names)]
        extra = [nesting.resolve(mix) for mix in self.settings.eval_granularities or []]
        return {nesting.label(chosen): chosen for chosen in uniform + extra}

    def submodel(self, chosen: list[int] | None, inputs: Tensor) -> Tensor:
        """Logits of one of `submodels`, which is set from now on."""
        if chosen is not None:
            set_granularity(self.model, chosen)
        return self(inputs)

    def training_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """MatFormer's Eq. 2 for the granularity that is set, or all granularities jointly."""
        if self.settings.joint is None:
            return self.loss(inputs, targets)
        count = len(nesting_of(self.model).names)
        pieces = [(inputs, targets)] * count
        if self.settings.split_batch:
            if len(inputs) < count:
                raise ValueError(
                    f"a batch of {len(inputs)} cannot be split over {count} granularities: "
                    f"set data.batch_size to at least {count}"
                )
            # not chunk, which may return fewer pieces than it is asked for
            parts = inputs.tensor_split(count), targets.tensor_split(count)
            pieces = list(zip(*parts, strict=True))
        total = torch.stack(joint_losses(self.model, lambda i: self.loss(*pieces[i]))).sum()
        return total / count if self.settings.joint == "mean" else total

    def averages(self) -> dict[str, dict[str, Tensor]]:
        """What is reported of each submodel, by label."""
        assert self.metrics is not None
        return self.metrics.compute()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Score every submodel on the same batch."""
        self._score(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Score every submodel on the same batch."""
        self._score(batch)

    def _score(self, batch: Any) -> None:
        self.score(batch)
        if self.settings.fractions is not None:
            set_granularity(self.model, nesting_of(self.model).names[-1])

    def on_validation_epoch_end(self) -> None:
        """Report `val/loss_XL`, `val/loss_S`, …, and the largest one's as `val/<monitored>`."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Report `test/loss_XL` and the rest."""
        self._report("test")

    def _report(self, stage: str) -> None:
        assert self.metrics is not None
        for place, (label, values) in enumerate(self.averages().items()):
            suffix = "" if label == "all" else f"_{label}"
            if suffix and place == 0:  # the same name for any granularities, to be monitored
                self.log(f"{stage}/{self.monitored}", values[self.monitored])
            for name, value in values.items():
                shown = name == self.monitored and "*" not in label
                self.log(f"{stage}/{name}{suffix}", value, prog_bar=shown)
        self.metrics.reset()

    def configure_callbacks(self) -> list[L.Callback]:
        """The sampler of granularities, unless trainer.callbacks has one.

        Raises:
            ValueError: if there is one beside `joint`, which trains all granularities in each step.
        """
        from callbacks.granularity import GranularitySampling

        given = any(isinstance(c, GranularitySampling) for c in self.trainer.callbacks)  # type: ignore[attr-defined]
        if given and self.settings.joint is not None:
            raise ValueError(
                f"joint: {self.settings.joint} trains all granularities in each step: leave "
                "GranularitySampling out of trainer.callbacks"
            )
        sampled = self.settings.fractions is not None and self.settings.joint is None
        return [GranularitySampling()] if sampled and not given else []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are compared one by one.

        Raises:
            ValueError: naming what differs.
        """
        refuse_another_model(checkpoint, self.hparams, self.identity)
