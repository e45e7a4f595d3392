"""One training stage from one YAML file: fit, validate, test or predict.

python -m recipes fit -c recipes/matformer/matvit.yaml
python -m recipes fit -c recipes/matformer/matvit.yaml --ckpt_path runs/…/last.ckpt   (continue)
python -m recipes fit -c recipes/matformer/matvit.yaml --trainer.devices 8 --trainer.strategy ddp
"""

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks.seeding import SeedEveryStep

CONFIG = re.compile("(-c|--config)=")
SUMMARY = "One training stage from one YAML file, such as recipes/matformer/matvit.yaml."

WRONG_SIZE = "doesn't match model"  # timm's assertion about an image

# an experiment hands each stage its own arguments, whatever the process was started with
warnings.filterwarnings("ignore", message="LightningCLI's args parameter")


class RecipeCLI(LightningCLI):
    """Lightning's command line, with what every recipe has in common.

    Added keys: `checkpoint` (Lightning's ModelCheckpoint; last.ckpt is always written, with
    `monitor` the best one beside it) and `seeding` (reproducible noise, see SeedEveryStep).
    `seed_everything` is the one seed of a run: the order of the data and the noise of the steps
    follow it.
    """

    def __init__(self, args: ArgsType = None):
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            # it would put every argument, init_from too, into the checkpoint's hyperparameters
            load_from_checkpoint_support=False,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "python -m recipes", "description": SUMMARY},
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what all stages share."""
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(SeedEveryStep, "seeding")
        parser.set_defaults({"checkpoint.save_last": True})
        parser.link_arguments("seed_everything", "seeding.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)
        parser.link_arguments(
            "data.num_classes", "model.init_args.num_classes", apply_on="instantiate"
        )

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Let last.ckpt be the last checkpoint with `monitor` too.

        Lightning then writes it only when the monitored value has become better.
        """
        trainer: Any = super().instantiate_trainer(**kwargs)
        checkpoint = trainer.checkpoint_callback
        if checkpoint is not None and checkpoint.monitor is not None and checkpoint.save_last:
            checkpoint.save_last = False
            settings = self._get(self.config, "checkpoint").as_dict()
            changes = {"monitor": None, "filename": "last", "save_last": None, "save_top_k": 1}
            changes["enable_version_counter"] = False
            trainer.callbacks.append(ModelCheckpoint(**{**settings, **changes}))
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Keep the YAML's word on resume.

        Lightning would let the checkpoint's hyperparameters win over the file silently; the
        modules compare the two instead and refuse another model's checkpoint.
        """


class _ParseOnly(RecipeCLI):
    def instantiate_classes(self) -> None:
        """Stop before anything is built."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Stop before anything is run."""


def parse(path: str, overrides: list[str] | None = None) -> Namespace:
    """What a stage's file says, with defaults filled in; nothing is built or run.

    Args:
        path: a stage (matvit.yaml), or a preset (matvit.tiny.yaml), which is laid over its stage.
        overrides: further command-line arguments.
    """
    args = [item for file in layers_of(path) for item in ("-c", file)]
    return _ParseOnly(["fit", *args, *(overrides or [])]).config["fit"]


def layers_of(path: str) -> list[str]:
    """The files that make up a stage: the file itself, after its base if it is a preset."""
    folder, _, name = path.rpartition("/")
    parts = name.split(".")
    base = f"{folder}/{parts[0]}.yaml" if folder else f"{parts[0]}.yaml"
    return [base, path] if len(parts) > 2 and Path(base).is_file() else [path]


def main(args: list[str] | None = None) -> RecipeCLI:
    """Run one stage; the command line is sys.argv's unless args are given.

    A preset (-c matvit.tiny.yaml) brings the stage that it changes with it.
    """
    args = sys.argv[1:] if args is None else args
    args = [part for one in args for part in (one.split("=", 1) if CONFIG.match(one) else [one])]
    given: list[str] = []
    for i, argument in enumerate(args):
        if i and args[i - 1] in ("-c", "--config"):
            base, *preset = layers_of(argument)
            given += [base, "-c", *preset] if preset and base not in args else [argument]
        else:
            given.append(argument)
    torch.set_float32_matmul_precision("high")
    logging.getLogger("lightning_modules").setLevel(logging.INFO)
    try:
        return RecipeCLI(given)
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # what Lightning makes of it
            raise KeyboardInterrupt from None
        raise


def console(run: Callable[[], Any], resume: str = "the same command continues") -> None:
    """Run a command; say what is wrong with its input in one line instead of a traceback.

    `resume` is said after Ctrl-C.
    The environment variable RECIPES_TRACEBACK=1 brings the traceback back.
    """
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(f"interrupted: {resume}")
    except (ValueError, OSError, MisconfigurationException, AssertionError) as error:
        reason = str(error)
        foreign = isinstance(error, AssertionError)
        if os.environ.get("RECIPES_TRACEBACK") or (foreign and WRONG_SIZE not in reason):
            raise
        if foreign:
            reason += " Set data.image_size to the model's, or img_size in model.model_args."
        # a worker of the loader hands over its whole traceback
        reason = re.split(r"Original Traceback.*\n\w+Error: ", reason, flags=re.S)[-1].strip()
        print(f"error: {reason}\n(RECIPES_TRACEBACK=1 shows where)", file=sys.stderr)
        sys.exit(2)
