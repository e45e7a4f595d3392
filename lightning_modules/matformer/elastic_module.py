"""The base class for training nested models of images and of text."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_modules.evaluation import Evaluation
from lightning_modules.matformer.consistency import SubmodelMetrics
from lightning_modules.matformer.joint import joint_losses
from lightning_modules.matformer.nest import nesting_of, set_granularity
from lightning_modules.weights import refuse_another_model


class ElasticModule(Evaluation, L.LightningModule):
    """The base class of MatViT and MatLM.

    A subclass saves the hyperparameters `fractions`, `joint`, `split_batch` and
    `eval_granularities`, builds `model` and `metrics` in `configure_model`, and implements `loss`
    and `score_submodels`.

    Args:
        fractions: of `nest`; None for a plain model.
        joint: "mean" or "sum" of all granularities' losses in each step; None for one granularity.
        split_batch: with `joint`, give each granularity its own piece of the batch.

    Attributes:
        monitored: the metric that is also logged, for the largest submodel, without its label.
        identity: hyperparameters in which a checkpoint must equal the run that loads it.

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
        """The saved hyperparameters of the subclass."""
        return self.hparams

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch at the granularity that is set; a subclass implements it."""
        raise NotImplementedError

    def score_submodels(self, batch: Any) -> None:
        """Add a batch to the metrics of every submodel; a subclass implements it."""
        raise NotImplementedError

    @property
    def submodels(self) -> dict[str, list[int] | None]:
        """The submodels that validation scores, by label; the first is the largest one.

        Each is a list with one granularity index per layer; None stands for a plain model.
        """
        if self.settings.fractions is None:
            return {"all": None}
        nesting = nesting_of(self.model)
        uniform = [nesting.resolve(name) for name in reversed(nesting.names)]
        extra = [nesting.resolve(mix) for mix in self.settings.eval_granularities or []]
        return {nesting.label(chosen): chosen for chosen in uniform + extra}

    def submodel(self, chosen: list[int] | None, inputs: Tensor) -> Tensor:
        """Logits of one of `submodels`; its granularity stays set."""
        if chosen is not None:
            set_granularity(self.model, chosen)
        return self(inputs)

    def training_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """MatFormer's Eq. 2 for the granularity that is set, or all granularities jointly.

        Raises:
            ValueError: if `split_batch` is set and a batch has fewer examples than granularities.
        """
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
            # not torch.chunk, which may return fewer pieces
            parts = inputs.tensor_split(count), targets.tensor_split(count)
            pieces = list(zip(*parts, strict=True))
        total = torch.stack(joint_losses(self.model, lambda i: self.loss(*pieces[i]))).sum()
        return total / count if self.settings.joint == "mean" else total

    def averages(self) -> dict[str, dict[str, Tensor]]:
        """The metrics of each submodel, by label and name."""
        assert self.metrics is not None
        return self.metrics.compute()

    def score(self, batch: Any) -> None:
        """Score every submodel on the same batch."""
        self.score_submodels(batch)
        if self.settings.fractions is not None:
            set_granularity(self.model, nesting_of(self.model).names[-1])

    def report(self, stage: str) -> None:
        """Log `stage/loss_XL`, `stage/loss_S`, …, and the largest's `stage/<monitored>`."""
        assert self.metrics is not None
        for place, (label, values) in enumerate(self.averages().items()):
            suffix = "" if label == "all" else f"_{label}"
            if suffix and place == 0:  # a name for `monitor` that does not depend on the labels
                self.log(f"{stage}/{self.monitored}", values[self.monitored])
            for name, value in values.items():
                shown = name == self.monitored and "*" not in label
                self.log(f"{stage}/{name}{suffix}", value, prog_bar=shown)
        self.metrics.reset()

    def configure_callbacks(self) -> list[L.Callback]:
        """GranularitySampling, unless trainer.callbacks has one or no granularity is sampled.

        Raises:
            ValueError: if trainer.callbacks has one although `joint` trains all granularities.
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
        """Refuse the checkpoint of another model before its tensors are loaded.

        Raises:
            ValueError: naming the hyperparameter that differs.
        """
        refuse_another_model(checkpoint, self.hparams, self.identity)
