"""`python -m recipes VERB`: a stage (recipes/cli.py), or one of the verbs below."""

import importlib
import sys

from recipes.cli import main
from recipes.messages import console

VERBS = {"claims": "recipes.ledger"}  # verb → the module whose main has the arguments behind it


def dispatch() -> None:
    """Run a verb of VERBS, or a stage."""
    if module := VERBS.get(" ".join(sys.argv[1:2])):
        importlib.import_module(module).main(sys.argv[2:])
    else:
        main()


if __name__ == "__main__":
    console(dispatch, "the same command with --ckpt_path …/last.ckpt continues")
