"""Self-distillation for further pre-training, on text (Tables 2 and 3, Fig. 5, App. B).

A masked language model is further pre-trained on the target's texts, distilled into a fresh copy of
the original, and fine-tuned as a classifier; beside it stand fine-tuning alone, its rivals and the
ablations. Scores are those of the test part after the last step: macro F1, or micro F1, which with
one label for each text is the accuracy.

    python -m recipes.self_distillation.text              generated: a minute on a CPU
    make weights && python -m recipes.self_distillation.text --preset small --seeds 3
                                                      MiniLM, SciERC and ChemProt
    python -m recipes.self_distillation.text --preset paper --seeds 5 --data.root /data

--rows finetune,further,self_distillation limits what is run; text_grid.yaml has all rows.

Your own texts, a csv, tsv or jsonl table with the columns sentence and label (--data.text and
--data.label name others):

    python -m recipes.self_distillation.text --preset own --data.train my.csv --data.test test.csv

begins with RoBERTa-base. Another model needs its own tokenizer, and one without a masked-LM head
gets one by --decoder_steps 1000:

    python -m recipes.self_distillation.text --preset own --data.train my.csv \\
      --model.architecture weights/all-MiniLM-L6-v2 --data.tokenizer weights/all-MiniLM-L6-v2 \\
      --decoder_steps 1000

Further pre-training and distillation take the training texts; --unlabelled takes those of another
file instead, a table with the same column of sentences, or a .txt with one on each line. What is
scored is the checkpoint best on validation. The report ends in a classifier and the lines that use
it. Any further argument goes to every stage, --adapt.trainer.max_epochs to further pre-training and
distillation only, --finetune.trainer.max_epochs to fine-tuning only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset

from datamodules.tables import TXT
from lightning_modules.weights import read_state_dict
from recipes.legacy import Experiment
from recipes.messages import console
from recipes.self_distillation.adaptation import Study, command_line
from recipes.self_distillation.tables import Tables

PAPER: Tables = {
    "Table 2, F1 (micro for ChemProt, else macro), %": (
        ["SciERC", "ACL-ARC", "ChemProt", "Twitter-Emotion"],
        {
            "finetune": (76.63, 64.09, 80.59, 77.61),
            "recadam": (79.45, 59.70, 82.73, 78.26),
            "mars": (74.69, 53.57, 80.18, 77.48),
            "r3f": (75.61, 60.13, 79.25, 77.79),
            "further": (80.32, 69.73, 82.33, 78.71),
            "self_distillation": (81.79, 73.17, 82.87, 79.77),
        },
    ),
    "Table 3, macro F1, %": (
        ["SciERC"],
        {
            "self_distillation": (81.79,),
            "without_mae": (80.66,),
            "further": (80.32,),
            "further_x2": (80.52,),
            "predictions": (81.09,),
            "weights_l2": (80.54,),
            "weights_mars": (80.95,),
        },
    ),
}
USE = """
options = {"truncation": True, "max_length": data.max_length, "return_tensors": "pt"}
print(data.class_names[model(dict(data.tokenizer(["a new text"], **options))).argmax()])
"""


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment, options = command_line("text", __file__, __doc__ or "", argv)
    title = "Self-distillation for further pre-training, text"
    return Study(
        experiment, "text", title, parts, encoder, PAPER, overlap, USE, unlabelled, **options
    ).run()


def unlabelled(table: str, labelled: Any) -> dict[str, Any]:
    """Settings of the DataModule that has a table's texts, all of them.

    It wants a label, which nothing looks at: the text itself will do.
    """
    text = TXT if Path(table).suffix.lower() == ".txt" else labelled.get("text", "sentence")
    return {
        "data": "datamodules.TextData",
        "data.train": table,
        "data.val": None,
        "data.text": text,
        "data.label": text,
        "data.limit": None,
    }


def parts(data: Any) -> dict[str, DataLoader]:
    """Training and test texts, and if there are any in both, test texts without them.

    With `eval_limit` no more training texts either, the first ones.
    """
    train, test = data.samples("train"), data.samples("test")
    known = {example.first for example in data.examples("train")}
    new = [i for i, example in enumerate(data.examples("test")) if example.first not in known]
    seen = range(min(len(train), data.eval_limit or len(train)))
    found = {"train": some(data, train, seen), "test": data.loader(test)}
    if 0 < len(new) < len(test):
        found["new"] = some(data, test, new)
    return found


def some(data: Any, samples: Any, places: Sequence[int]) -> DataLoader:
    """Batches of some samples."""
    chosen: Any = Subset(samples, places)
    chosen.collate = samples.collate
    return data.loader(chosen)


def encoder(checkpoint: Path) -> dict[str, Tensor]:
    """The weights below the model's head."""
    state = read_state_dict(checkpoint)
    base = next(name for name in state if "embeddings." in name).partition(".")[0]
    return {name: value for name, value in state.items() if name.startswith(f"{base}.")}


def overlap(data: Any) -> str:
    """How many texts there are, and how many of the test's are in training too."""
    known = {example.first for example in data.examples("train")}
    test = data.examples("test")
    both = sum(example.first in known for example in test)
    return (
        f"{len(data.examples('train'))} training and {len(test)} test texts of {data.num_classes} "
        f"classes; {both} of the test texts are training texts too."
        + (f" The training loss is that of the first {data.eval_limit}." if data.eval_limit else "")
    )


if __name__ == "__main__":
    console(main)
