"""PELA's baselines: other distillations, token merging and LoRA."""

from typing import Any, Literal

from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.backbones import classifier_names
from lightning_modules.pela.backbone_module import MODEL
from lightning_modules.pela.baselines import lillama, maskalign, tinybert
from lightning_modules.pela.classifier_module import Classifier
from lightning_modules.pela.features import feature_layers
from lightning_modules.pela.module import required
from lightning_modules.pela.tome import add_tome
from lightning_modules.tuning import tune

METHODS = {"tinybert": tinybert, "maskalign": maskalign, "lillama": lillama}


class Distillation(Classifier):
    """A low-rank classifier that learns by another distillation instead of L_fd.

    Args:
        method: "tinybert", "maskalign" or "lillama", see pela.baselines. Lillama also replaces the
            loss on labels, and trains the blocks only.
        teacher_from: the teacher's weights; null where init_from or the hub gives dense ones. Not
            saved in checkpoints.
        alpha: weight of the distillation relative to the cross-entropy.
        **kwargs: see `Classifier`.
    """

    def __init__(
        self,
        method: Literal["tinybert", "maskalign", "lillama"] = "tinybert",
        teacher_from: str | None = None,
        alpha: float = 1.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.teacher_from = teacher_from
        self.teacher: nn.Module | None = None

    def configure_callbacks(self) -> list[Callback]:
        """FrozenTeacher, which every method here needs."""
        from callbacks.frozen_teacher import FrozenTeacher

        return [FrozenTeacher()]

    def build_teacher(self) -> nn.Module:
        """The teacher for the callback FrozenTeacher: the dense original, see `dense_original`.

        Raises:
            ValueError: as `dense_original`, or if TinyBERT would distil random outputs.
        """
        h, teacher = self.settings, self.dense_original(self.teacher_from, None)
        if h.method == "tinybert" and getattr(teacher, "at_random", ()):
            raise ValueError(
                f"{h.architecture} has no classifier of {h.num_classes} classes, whose outputs "
                "method tinybert distils: fine-tune the dense model first and give its checkpoint "
                "as model.teacher_from"
            )
        return teacher

    def prepare(self, model: nn.Module) -> None:
        """Freeze everything but the blocks for Lillama."""
        if self.settings.method == "lillama":
            model.requires_grad_(False)
            for name in feature_layers(model, "blocks"):
                model.get_submodule(name).requires_grad_(True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy on the full images (not for Lillama), and the distillation."""
        h, (images, targets) = self.settings, batch
        logits, distance = METHODS[h.method](self.model, required(self.teacher), images)
        base = F.cross_entropy(logits.float(), targets)
        loss = h.alpha * distance + (0 if h.method == "lillama" else base)
        parts = {"base": base.detach(), "distillation": distance.detach()}
        self.log_dict({f"train/{name}": value for name, value in parts.items()})
        self.log("train/loss", loss, prog_bar=True)
        return loss


class TokenMerging(Classifier):
    """A dense classifier whose blocks merge tokens (ToMe, arXiv 2210.09461).

    Args:
        merged_tokens: tokens merged in each block.
        **kwargs: see `Classifier`.
    """

    def __init__(self, merged_tokens: int = 8, **kwargs: Any):
        super().__init__(**kwargs)

    def prepare(self, model: nn.Module) -> None:
        """Make the blocks merge tokens."""
        add_tome(model, self.settings.merged_tokens)

    def model_names(self) -> tuple[str, ...]:
        """The hyperparameters in which a checkpoint must equal the run that loads it."""
        return (*MODEL, "merged_tokens")


class LoRA(Classifier):
    """A dense classifier that trains LoRA (arXiv 2106.09685) on its qkv layers, and its heads.

    Args:
        lora_rank: LoRA's rank r.
        **kwargs: see `Classifier`.
    """

    def __init__(self, lora_rank: int = 8, **kwargs: Any):
        super().__init__(**kwargs)

    def prepare(self, model: nn.Module) -> None:
        """Add the adapters and freeze the rest.

        Raises:
            ValueError: if the model is of low rank.
        """
        if self.settings.ranks:
            raise ValueError(
                f"lora_rank {self.settings.lora_rank} is for the dense model: set model.ratio to "
                "null and start from dense weights"
            )
        heads = classifier_names(model)  # a distilled model has two
        tune(model, "lora", heads=heads, rank=self.settings.lora_rank, targets=["qkv"])

    def model_names(self) -> tuple[str, ...]:
        """The hyperparameters in which a checkpoint must equal the run that loads it."""
        return (*MODEL, "lora_rank")
