"""Decodes a tuned model's texts and scores them by F1 (answers) or ROUGE-L (summaries), App. D."""

import string
from collections.abc import Iterator, Sequence

from torchmetrics.functional.text import rouge_score, squad

from recipes.experiment import Measuring
from recipes.methods import costs, decode_test_part
from recipes.nodes import device
from recipes.records import best_of
from recipes.results import Row


def measure_texts(m: Measuring) -> Iterator[Row]:
    """The score of greedily decoded texts for the inputs of the test part.

    If the cell has several trainings, the one with the lowest validation loss is decoded. Settings:
    `row` and `set` in the table, and `metric`. outputs.txt has one text on each line.
    """
    stage = best_of(list(m.stages.values()), "val/loss", "min")
    data, module = stage.datamodule(), stage.module(device())
    texts = decode_test_part(module.model, data, max_new_tokens=data.target_length)
    (m.folder / "outputs.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    value = text_score(m.settings["metric"], texts, data.references("test"))
    values = {"score": value, **costs(stage, data), "scored": len(texts)}
    for metric, number in values.items():
        yield Row(metric=metric, value=number, row=m.settings["row"], set=m.settings["set"])


def text_score(metric: str, texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean over texts of each text's best score against its references, in 0 … 1.

    Args:
        metric: "f1", the F1 of words of SQuAD 1.1 (Rajpurkar et al., 2016): without articles and
            punctuation, and 0 where no word is left; or "rouge_l" (Lin, 2004).
        texts: decoded by the model.
        references: one or more for each text.

    Raises:
        ValueError: for another metric.
    """
    if metric == "f1":
        predictions = [{"prediction_text": text, "id": str(n)} for n, text in enumerate(texts)]
        answers = [
            {"answers": {"answer_start": [0] * len(several), "text": list(several)}, "id": str(n)}
            # torchmetrics scores two empty texts 1, as SQuAD 2.0 does
            for n, several in enumerate(
                several if _has_words(text) else ["word"]
                for text, several in zip(texts, references, strict=True)
            )
        ]
        return float(squad(predictions, answers)["f1"]) / 100  # type: ignore[arg-type]
    if metric == "rouge_l":
        several = [list(one) for one in references]
        scores = rouge_score(list(texts), several, accumulate="best", rouge_keys="rougeL")
        return float(scores["rougeL_fmeasure"])
    raise ValueError(f"metric {metric!r} does not score texts: expected f1 or rouge_l")


def _has_words(text: str) -> bool:
    """Whether SQuAD's normalisation, which drops punctuation and articles, leaves anything."""
    kept = "".join(one for one in text.lower() if one not in string.punctuation)
    return not {"a", "an", "the"}.issuperset(kept.split())


def measure_nothing(m: Measuring) -> Iterator[Row]:
    """The guessing baseline of a free-text task: a score of 0, as in the paper."""
    yield Row(metric="score", value=0.0, row="majority", set=m.settings["set"])
