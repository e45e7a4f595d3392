"""`python -m recipes VERB`: Lightning's verbs for one stage (recipes/cli.py), or one of VERBS."""

import importlib
import sys

from recipes.cli import main
from recipes.ending import ending
from recipes.messages import console

# verb → the module whose main parses the other arguments; `predict -c FILE` is Lightning's own
VERBS = {
    "claims": "recipes.ledger",
    "evaluate": "recipes.evaluate",
    "export": "recipes.export",
    "generate": "recipes.generate",
    "plan": "recipes.plan",
    "predict": "recipes.predict",
    "report": "recipes.runner",
}


def dispatch() -> None:
    """Run a verb of VERBS or a stage; after `fit`, print its checkpoints and what to do next."""
    verb, arguments = " ".join(sys.argv[1:2]), sys.argv[2:]
    names_a_stage = any(one.partition("=")[0] in ("-c", "--config") for one in arguments)
    if verb in VERBS and not (verb == "predict" and names_a_stage):
        importlib.import_module(VERBS[verb]).main(arguments)
        return
    stage = main()
    if verb == "fit" and stage.trainer.is_global_zero:
        print(ending(stage.trainer, stage.model))


if __name__ == "__main__":
    console(dispatch, "the same command with --ckpt_path …/last.ckpt continues")
