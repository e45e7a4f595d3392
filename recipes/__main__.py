"""`python -m recipes VERB`: a subcommand of LightningCLI (recipes/cli.py) or of VERBS."""

import difflib
import importlib
import logging
import sys

from lightning.pytorch.utilities import rank_zero_only

from recipes.cli import main
from recipes.ending import SayResume, ending
from recipes.messages import console

# verb → module whose main() gets the other arguments; `predict -c FILE` is LightningCLI's instead
VERBS = {
    "claims": "recipes.ledger",
    "evaluate": "recipes.evaluate",
    "export": "recipes.export",
    "generate": "recipes.generate",
    "plan": "recipes.plan",
    "predict": "recipes.predict",
    "report": "recipes.runner",
}


STAGE = ("fit", "validate", "test", "predict")  # subcommands of LightningCLI
OVERVIEW = """usage: python -m recipes VERB …, and python -m recipes VERB --help

train one stage
  plan -c FILE          predict steps, memory and hours, and list missing files
  fit -c FILE           train; FILE is a stage's YAML, such as recipes/matformer/folder.yaml
  validate, test        score a checkpoint: -c FILE --ckpt_path CKPT
use what has been trained
  predict               classify pictures or sentences, continue prompts
  generate              continue prompts by speculative decoding
  evaluate              score a language model on tasks of lm-evaluation-harness
  export                write it for timm, transformers, peft or ONNX
run a paper's experiment: python -m recipes.matformer.matvit --help; README.md lists all
  report FOLDER         write a run's report again
  claims                write results/claims.md, and the tables of README.md and the cards"""


def dispatch() -> None:
    """Run a verb of VERBS or of LightningCLI; after `fit`, print checkpoints and next commands.

    Raises:
        ValueError: if there is no such verb.
    """
    verb, arguments = " ".join(sys.argv[1:2]), sys.argv[2:]
    if verb in ("", "-h", "--help"):
        print(OVERVIEW)
        return
    all_verbs = [*STAGE, *VERBS]
    if verb not in all_verbs and not verb.startswith("-"):
        close = difflib.get_close_matches(verb, all_verbs, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ": --help lists those that there are"
        raise ValueError(f"{verb!r} is no verb of python -m recipes{hint}")
    has_config = any(part.partition("=")[0] in ("-c", "--config") for part in arguments)
    if verb in VERBS and not (verb == "predict" and has_config):
        importlib.import_module(VERBS[verb]).main(arguments)
        return
    show_log()
    stage = main(callbacks=[SayResume()])
    if verb == "fit" and stage.trainer.is_global_zero:
        print(ending(stage.trainer, stage.model))


def show_log() -> None:
    """Print what the first process logs: which initial weights fitted, where an adapter is."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: getattr(rank_zero_only, "rank", 0) == 0)
    log = logging.getLogger("lightning_modules")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


if __name__ == "__main__":
    console(dispatch, resume="")
