"""The base class for fine-tuning with VeRA or a baseline.

VeRA (arXiv 2310.11454), Section 4: the classifier is trained in full with a separate learning rate,
there is no scale α, and the baselines (`lightning_modules.tuning`) are trained in the same way. The
subclasses in text_module.py, image_module.py and language_module.py build the model and turn a
batch into logits.
"""

import warnings
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from lightning_modules.backbones import shard
from lightning_modules.evaluation import Evaluation
from lightning_modules.optim import (
    build_optimizer,
    head_parameters,
    parameter_groups,
    split_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.tuning import PEFT, Tuning, trainable, tune
from lightning_modules.vera.method_args import ARGUMENTS, MethodArgs, complete
from lightning_modules.vera.scores import loss_of
from lightning_modules.vera.targets import query_and_value, resolve
from lightning_modules.vera.vera import add_vera
from lightning_modules.weights import (
    drawn_at_random,
    fingerprint,
    load_completely,
    load_weights,
    refuse_another_model,
)

NOT_MERGED = "give weights of this architecture; merge those of a run with adapters first"


class FineTuning(Evaluation, L.LightningModule):
    """The base class of `TextTuning`, `ImageTuning` and `LanguageTuning`.

    A subclass implements `build`, `default_heads`, `build_scores` and `outputs`.

    Args:
        architecture: name of the model: timm's, transformers', or a folder with config.json.
        model_args: further arguments of the model or values of its configuration.
        pretrained: start from the weights of that name.
        init_from: start from the weights of a checkpoint, state_dict or safetensors file. Neither
            this nor `pretrained` is saved in checkpoints, except with `adapter_only`.
        method: "vera", or a baseline of `lightning_modules.tuning.tune`.
        rank: of VeRA or LoRA, or the width of the bottleneck adapters.
        targets: layers that VeRA or LoRA adapts, or "all-linear" (see `add_vera`; LoRA adapts all
            of a fused projection); null for queries and values.
        method_args: the method's further arguments, see `MethodArgs`.
        heads: modules that are trained in full; null for those on top of the pre-trained model.
        lr: peak learning rate of all parameters but the heads'.
        head_lr: peak learning rate of the heads; `lr` when null.
        weight_decay: decoupled, per unit of learning rate.
        decay_vectors: decay biases, norms and VeRA's vectors too.
        warmup: optimizer steps of warm-up, or a share of all steps if below 1.
        schedule: "linear", "cosine", "constant_with_warmup", …
        label_smoothing: of the training loss.
        adapter_only: leave the frozen parameters out of checkpoints; a run that loads one reads the
            base from `pretrained` or `init_from` again.

    Raises:
        ValueError: for `adapter_only` without `pretrained` or `init_from`.
    """

    def __init__(
        self,
        architecture: str,
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        method: Tuning | Literal["vera"] = "vera",
        rank: int = 256,
        targets: list[str] | str | None = None,
        method_args: MethodArgs | None = None,
        heads: list[str] | None = None,
        lr: float = 4e-3,
        head_lr: float | None = None,
        weight_decay: float = 0.0,
        decay_vectors: bool = False,
        warmup: float = 0.06,
        schedule: str = "linear",
        label_smoothing: float = 0.0,
        adapter_only: bool = False,
    ):
        super().__init__()
        self.adapter_only = adapter_only
        if adapter_only and not (pretrained or init_from):
            raise ValueError(
                "model.adapter_only is true, but the base starts at random, so that no checkpoint "
                "could find it again: set model.pretrained or model.init_from"
            )
        # initial weights only: a checkpoint must load without downloading or needing these files
        self.save_hyperparameters(ignore=[] if adapter_only else ["init_from", "pretrained"])
        self.strict_loading = not adapter_only
        self.init_from, self.pretrained = init_from, pretrained
        self.model: nn.Module | None = None
        self.mean_loss = MeanMetric()
        self.scores = self.build_scores()

    def build(self) -> nn.Module:
        """The model before it is adapted; a subclass implements it."""
        raise NotImplementedError

    def default_heads(self, model: nn.Module) -> list[str]:
        """Names of the modules on top of the pre-trained model; a subclass implements it."""
        raise NotImplementedError

    def build_scores(self) -> MetricCollection:
        """The metrics besides the loss; a subclass implements it."""
        raise NotImplementedError

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (n, C) and targets (n,) of a batch without padding; a subclass implements it."""
        raise NotImplementedError

    @property
    def tuned_model(self) -> nn.Module:
        """What the method changes and whose modules `heads` names: `model`, or a part of it."""
        assert self.model is not None
        return self.model

    @property
    def heads(self) -> list[str]:
        """Names of the modules that are trained in full."""
        heads = self.hparams["heads"]
        return self.default_heads(self.tuned_model) if heads is None else heads

    def configure_model(self) -> None:
        """Build and adapt the model once, and shard it where the strategy asks."""
        if self.model is not None:
            return
        self.model = self.build()
        tuned = self.tuned_model
        if self.init_from is not None:
            if self.pretrained:
                load_weights(tuned, self.init_from)
            else:
                optional = [*self.heads, *self.default_heads(tuned)]
                given = load_completely(tuned, self.init_from, NOT_MERGED, optional=optional)
                lacking = [*given.missing, *(text.split()[0] for text in given.reshaped)]
                tuned.at_random = frozenset(lacking)  # type: ignore[assignment]
        self._adapt(tuned)
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh)

    def _adapt(self, model: nn.Module) -> None:
        """Apply the method to the model, in place.

        Raises:
            ValueError: if `method_args` has an argument of another method.
        """
        h: Any = self.hparams
        arguments = dict(h.method_args or {})
        known = ARGUMENTS.get(h.method, ())
        if unknown := sorted(arguments.keys() - known):
            raise ValueError(
                f"model.method_args has {unknown[0]!r}, which is no argument of method "
                f"{h.method!r}: expected {', '.join(known) or 'none'}"
            )
        if h.method == "apet" and "budget" not in arguments:
            raise ValueError("method apet needs model.method_args.budget, for example 1000")
        targets: Any = ()
        if h.method == "vera" or h.method in PEFT:
            targets = query_and_value(model) if h.targets is None else h.targets
        if h.method == "vera":
            add_vera(model, h.rank, targets, heads=self.heads, **arguments)
        else:
            # LoRA has no slices
            layers = list(resolve(model, targets, self.heads)) if targets else []
            tune(model, h.method, self.heads, h.rank, layers, **arguments)
        if not trainable(model):
            raise ValueError(
                f"method {h.method} trains nothing in this model: give model.heads, the names of "
                "modules to train"
            )

    def on_train_start(self) -> None:
        """Log the numbers of trainable parameters, `tuned` and `heads`."""
        in_heads = head_parameters(self.tuned_model, self.heads)
        sizes: dict[str, float] = {"tuned": 0, "heads": 0}
        for parameter in trainable(self.tuned_model).values():
            sizes["heads" if parameter in in_heads else "tuned"] += parameter.numel()
        if self.logger is not None:  # self.log would round them to float32
            self.logger.log_metrics(sizes, self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = loss_of(*self.outputs(batch), self.hparams["label_smoothing"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def score(self, batch: Any) -> None:
        """Add a batch to loss and metrics."""
        logits, targets = self.outputs(batch)
        if not len(targets):  # only padding that gives all ranks equally many examples
            return
        self.mean_loss.update(loss_of(logits, targets), len(targets))
        if len(self.scores):
            predictions = logits.argmax(-1) if logits.ndim == 2 else logits.float()
            self.scores.update(predictions, targets)

    def report(self, stage: str) -> None:
        """Log `stage/loss`, `stage/accuracy`, …."""
        self.log(f"{stage}/loss", self.mean_loss.compute())
        for name, value in self.scores.compute().items():
            self.log(f"{stage}/{name}", value.float(), prog_bar=True)
        self.mean_loss.reset()
        self.scores.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a separate learning rate for the heads, and its schedule."""
        h: Any = self.hparams
        head_lr = h.lr if h.head_lr is None else h.head_lr
        groups = split_groups(
            parameter_groups(self.tuned_model, h.weight_decay, h.decay_vectors),
            head_parameters(self.tuned_model, self.heads),
            {"lr": h.lr},
            {"lr": head_lr},
        )
        optimizer = build_optimizer("adamw", groups, h.lr)
        return with_schedule(optimizer, h.schedule, h.warmup, training_steps(self.trainer))

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's method, without its warning about the base that `adapter_only` leaves out."""
        with warnings.catch_warnings():  # on_load_checkpoint checks the names of `adapter_only`
            warnings.filterwarnings("ignore", message="Found keys that are in the model state dict")
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name what the base's files lack; replace the rest of the base by its SHA-256.

        The latter with `adapter_only`. The names are for whom saves the loaded model's adapter.
        """
        if random := drawn_at_random(self.tuned_model, self.heads):
            checkpoint["at_random"] = sorted(random)
        if self.adapter_only:
            base = self._base()
            checkpoint["base_sha256"] = fingerprint(base)
            for name in base:
                del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model or method, or of another base.

        Raises:
            ValueError: naming what differs.
        """
        names = ["architecture", "model_args", "num_classes", "method", "rank", "targets", "heads"]
        saved = dict(checkpoint.get("hyper_parameters", {}))
        ours = {**self.hparams, "method_args": complete(self.hparams)}
        saved["method_args"] = complete(saved)
        refuse_another_model({"hyper_parameters": saved}, ours, [*names, "method_args"])
        if random := checkpoint.get("at_random"):
            tuned = self.tuned_model
            tuned.at_random = {*getattr(tuned, "at_random", ()), *random}  # type: ignore[assignment]
        if not self.adapter_only:
            return
        base = self._base()
        expected = self.state_dict().keys() - base.keys()
        if differing := expected ^ checkpoint["state_dict"].keys():
            raise ValueError(
                f"this checkpoint of an adapter alone does not hold the parameters that train here "
                f"(such as {min(differing)}): give one that a run with these settings wrote"
            )
        if checkpoint["base_sha256"] != fingerprint(base):
            raise ValueError(
                f"this checkpoint of an adapter alone was trained on another base than "
                f"{self.init_from or self.hparams['architecture']} is now: set model.init_from or "
                "model.architecture to that base"
            )

    def _base(self) -> dict[str, Tensor]:
        """The frozen parameters that a checkpoint leaves to the base's files, by all their names.

        Not those that the files lack, such as a pooler: they were initialised at random.
        """
        [prefix] = [name for name, part in self.named_modules() if part is self.tuned_model]
        drawn = {f"{prefix}.{name}" for name in getattr(self.tuned_model, "at_random", ())}
        return {
            name: parameter
            for name, parameter in self.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and name not in drawn
        }
