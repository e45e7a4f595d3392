"""`python -m recipes VERB`: Lightning's verbs for one stage (recipes/cli.py), or one of VERBS."""

import difflib
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


STAGE = ("fit", "validate", "test", "predict")  # Lightning's
OVERVIEW = """usage: python -m recipes VERB …, and python -m recipes VERB --help

train one stage
  plan -c FILE          steps, memory and hours, and what is missing, before it runs
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
    """Run a verb of VERBS or a stage; after `fit`, print its checkpoints and what to do next.

    Raises:
        ValueError: if there is no such verb.
    """
    verb, arguments = " ".join(sys.argv[1:2]), sys.argv[2:]
    if verb in ("", "-h", "--help"):
        print(OVERVIEW)
        return
    known = [*STAGE, *VERBS]
    if verb not in known and not verb.startswith("-"):
        near = difflib.get_close_matches(verb, known, n=1)
        meant = f", did you mean {near[0]!r}?" if near else ": --help lists those that there are"
        raise ValueError(f"{verb!r} is no verb of python -m recipes{meant}")
    names_a_stage = any(one.partition("=")[0] in ("-c", "--config") for one in arguments)
    if verb in VERBS and not (verb == "predict" and names_a_stage):
        importlib.import_module(VERBS[verb]).main(arguments)
        return
    stage = main()
    if verb == "fit" and stage.trainer.is_global_zero:
        print(ending(stage.trainer, stage.model))


if __name__ == "__main__":
    console(dispatch, "the same command with --ckpt_path …/last.ckpt continues")
