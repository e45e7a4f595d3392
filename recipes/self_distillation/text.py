"""Self-distillation for further pre-training, on text (Tables 2 and 3, Figs. 1 and 5).

A masked language model is further pre-trained on the target texts, distilled into a fresh copy of
the original, and fine-tuned as a classifier. It is compared with fine-tuning alone, the baselines
and the ablations, by macro F1 on the test part after the last step, or by micro F1, which equals
the accuracy where each text has one label.

    python -m recipes.self_distillation.text              generated: a minute on a CPU
    make weights && python -m recipes.self_distillation.text --preset small --seeds 14
                                                      MiniLM, wikitext2, then SciERC
    python -m recipes.self_distillation.text --preset small_updates --seeds 5
                                                      the same, with as many updates as the paper's
    python -m recipes.self_distillation.text --preset small_steps --seeds 3      Fig. 1, same data
    python -m recipes.self_distillation.text --preset paper --seeds 5 --data.root /data

--rows finetune,further,self_distillation limits what is run; shared_grid.yaml has all rows. Presets
of real data run on one GPU with --trainer.accelerator gpu --trainer.precision bf16-mixed.

Your own texts, a csv, tsv or jsonl table with the columns sentence and label (--data.text and
--data.label name others):

    python -m recipes.self_distillation.text --preset own --data.train my.csv --data.test test.csv

This starts from RoBERTa-base. Another model needs its own tokenizer; for one without a masked-LM
head, --decoder_steps 1000 first trains one:

    python -m recipes.self_distillation.text --preset own --data.train my.csv \\
      --model.architecture weights/all-MiniLM-L6-v2 --data.tokenizer weights/all-MiniLM-L6-v2 \\
      --decoder_steps 1000

Further pre-training and distillation use the training texts, or with --unlabelled those of another
file: a table with the same column of sentences, or a .txt with one on each line. The checkpoint
that is best on validation is scored. The report ends with the best classifier and the lines of
Python that use it. A flag that begins with --adapt, as in --adapt.trainer.max_epochs 5, is for the
adaptations only, one that begins with --finetune for fine-tuning only.
"""

import functools
from functools import partial

import pandas as pd

from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Run
from recipes.messages import console
from recipes.runner import run_experiment
from recipes.self_distillation.chains import declare, options
from recipes.self_distillation.report import PaperTables, report
from recipes.self_distillation.shared_claims import POINTS, beats, gap_and_distance, gates

PAPER: PaperTables = {
    "Table 2, F1 (micro for ChemProt, else macro), %, mean ± standard deviation of 5 runs": (
        ["SciERC", "ACL-ARC", "ChemProt", "Twitter-Emotion"],
        {
            "finetune": ("76.63 ± 2.06", "64.09 ± 4.13", "80.59 ± 1.15", "77.61 ± 0.83"),
            "recadam": ("79.45 ± 1.92", "59.70 ± 2.68", "82.73 ± 0.28", "78.26 ± 0.88"),
            "mars": ("74.69 ± 1.25", "53.57 ± 6.64", "80.18 ± 0.92", "77.48 ± 1.69"),
            "r3f": ("75.61 ± 2.49", "60.13 ± 2.55", "79.25 ± 2.16", "77.79 ± 0.81"),
            "further": ("80.32 ± 1.25", "69.73 ± 2.40", "82.33 ± 0.46", "78.71 ± 0.40"),
            "self_distillation": ("81.79 ± 0.75", "73.17 ± 2.19", "82.87 ± 0.35", "79.77 ± 0.79"),
        },
    ),
    "Table 3, macro F1, %": (
        ["SciERC"],
        {
            "self_distillation": ("81.79",),
            "without_mae": ("80.66",),
            "further": ("80.32",),
            "further_x2": ("80.52",),
            "predictions": ("81.09",),
            "weights_l2": ("80.54",),
            "weights_mars": ("80.95",),
        },
    ),
}
USE = """
options = {"truncation": True, "max_length": data.max_length, "return_tensors": "pt"}
print(data.class_names[model(dict(data.tokenizer(["a new text"], **options))).argmax()])
"""

GATES = gates("score")  # each set's own metric, as Table 2 has it
CLAIMS = [
    *beats(
        "score",
        "Table 2",
        {
            "further": "SciERC 81.79 ± 0.75 against 80.32 ± 1.25",
            "finetune": "SciERC 81.79 ± 0.75 against 76.63 ± 2.06",
            "recadam": "SciERC 81.79 ± 0.75 against 79.45 ± 1.92",
            "mars": "SciERC 81.79 ± 0.75 against 74.69 ± 1.25",
            "r3f": "SciERC 81.79 ± 0.75 against 75.61 ± 2.49",
        },
    ),
    Claim(
        name="further over fine-tuning",
        paper="self-distillation",
        where="Table 2",
        sentence="On text, further pre-training beats fine-tuning alone.",
        number="SciERC 80.32 ± 1.25 against 76.63 ± 2.06",
        test=Comparison("score", "further", "finetune", **POINTS),
        gate=GATES[0],
    ),
    *beats(
        "score",
        "Table 3",
        {
            "without_mae": "SciERC 81.79 against 80.66",
            "further_x2": "SciERC 81.79 against 80.52",
            "predictions": "SciERC 81.79 against 81.09",
            "weights_l2": "SciERC 81.79 against 80.54",
            "weights_mars": "SciERC 81.79 against 80.95",
        },
    ),
    *gap_and_distance(GATES),
]


def text_report(table: pd.DataFrame, run: Run) -> list[str]:
    """The report's paragraphs."""
    return report(table, run, "text", PAPER, USE)


EXPERIMENT = Experiment(
    name="self_distillation.text",
    file=__file__,
    config="text_grid",
    description=__doc__ or "",
    declare=functools.partial(declare, kind="text"),
    report=text_report,
    options=options,
    measured_on=dict.fromkeys(("small", "small_updates"), "MiniLM (22.7M parameters), {sets}"),
)

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
