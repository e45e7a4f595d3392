"""What a tuned model writes, and its score: F1 of answers, ROUGE-L of summaries (App. D)."""

import json
import random
from collections.abc import Iterator, Sequence

from torchmetrics.functional.text import rouge_score, squad

from lightning_modules.decoding import generate
from recipes.experiment import Measuring
from recipes.methods import best_of, costs, load
from recipes.results import Row

_WHO = ("the cook", "a waiter", "my sister", "the old man", "our teacher")
_DOES = ("likes", "sells", "paints", "carries", "buys")


def measure_texts(m: Measuring) -> Iterator[Row]:
    """The score of what is written for the test part's inputs, token by most likely token.

    Of several trainings the one with the least loss on the validation part writes. Settings: `row`
    and `set` in the table, `metric`. outputs.txt has a text on each line.
    """
    stage = best_of(list(m.stages.values()), "val/loss", "min")
    data, module = stage.datamodule(), load(stage)
    texts = [""] * len(data.prompts("test"))
    for batch in data.test_dataloader():
        places = batch.pop("labels").tolist()
        written = generate(
            module.model, batch, data.tokenizer, beams=1, no_repeat_ngram=0, stop=None,
            max_new_tokens=data.target_length,
        )  # fmt: skip
        for place, text in zip(places, written, strict=True):
            texts[place] = " ".join(text.split())
    (m.folder / "outputs.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    value = text_score(m.settings["metric"], texts, data.references("test"))
    values = {"score": value, **costs(stage, data), "scored": len(texts)}
    for metric, number in values.items():
        yield Row(metric=metric, value=number, row=m.settings["row"], set=m.settings["set"])


def text_score(metric: str, texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """A share of one, the mean over texts of the best over a text's references.

    Args:
        metric: "f1", SQuAD's of words (Rajpurkar et al., 2016), or "rouge_l" (Lin, 2004).
        texts: written.
        references: of each.

    Raises:
        ValueError: for another metric.
    """
    if metric == "f1":
        written = [{"prediction_text": text, "id": str(n)} for n, text in enumerate(texts)]
        answers = [
            {"answers": {"answer_start": [0] * len(several), "text": list(several)}, "id": str(n)}
            for n, several in enumerate(references)
        ]
        return float(squad(written, answers)["f1"]) / 100  # type: ignore[arg-type]
    if metric == "rouge_l":
        several = [list(one) for one in references]
        scores = rouge_score(list(texts), several, accumulate="best", rouge_keys="rougeL")
        return float(scores["rougeL_fmeasure"])
    raise ValueError(f"metric {metric!r} is not one of texts: expected f1 or rouge_l")


def measure_nothing(m: Measuring) -> Iterator[Row]:
    """The guess at a text to be written, which the paper scores 0."""
    yield Row(metric="score", value=0.0, row="majority", set=m.settings["set"])


def write_questions(m: Measuring) -> Iterator[Row]:
    """Questions about a small world in NQ-Open's form, in the folder `questions`, for `tiny`."""
    rng = random.Random(0)
    folder = m.folder / "questions"
    folder.mkdir(exist_ok=True)
    facts = {does: rng.choice(_WHO) for does in _DOES}
    for part, count in (("train", 64), ("dev", 16)):
        asked = [rng.choice(_DOES) for _ in range(count)]
        lines = [
            json.dumps({"question": f"who {does} {rng.choice(_WHO)}", "answer": [facts[does]]})
            for does in asked
        ]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    yield Row(metric="questions", value=len(facts), row="questions")
