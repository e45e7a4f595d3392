"""Pictures with a sentence to judge (SNLI-VE) or a question to answer (VQA v2)."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from datamodules.captions import plain, texts_of
from datamodules.image_text import ImageTextData
from datamodules.tables import json_lines, read_json, read_list, require_keys

RELATIONS = ("contradiction", "neutral", "entailment")  # 0, 1, 2 as in ALBEF


@dataclass(frozen=True)
class Judged:
    """An image, a hypothesis, and its label, an index into `RELATIONS`."""

    image: str
    text: str
    label: int


class EntailmentData(ImageTextData):
    """SNLI-VE: decide whether a picture entails a sentence.

    The files are ALBEF's ve_{train,dev,test}.json (`image` without ending, `sentence`, `label`) or
    the official snli_ve_{train,dev,test}.jsonl (`Flickr30K_ID`, `sentence2`, `gold_label`). Batches
    have `images`, `input_ids`, `attention_mask` and `labels` (B,).
    """

    @property
    def num_classes(self) -> int:
        return len(RELATIONS)

    def read(self, part: str) -> list[Judged]:
        official = [f"{stem}_{p}.{end}" for stem, end in (("ve", "json"), ("snli_ve", "jsonl"))
                    for p in ((part,) if part != "val" else ("val", "dev"))]  # fmt: skip
        default = next((n for n in official if (self.folder / n).is_file()), official[0])
        judged = []
        for file in self.list_files(part, default):
            lines = file.suffix.lower() == ".jsonl"
            entries = [entry for _, entry in json_lines(file)] if lines else read_list(file)
            # the label "-" means that the annotators did not agree
            judged += [
                self._judged(file, entry)
                for entry in entries
                if not (isinstance(entry, dict) and entry.get("gold_label") == "-")
            ]
        return judged

    def _judged(self, file: Path, entry: Any) -> Judged:
        fields = entry if isinstance(entry, dict) else {}
        image = str(fields.get("image", fields.get("Flickr30K_ID")))
        text = fields.get("sentence", fields.get("sentence2"))
        label = fields.get("label", fields.get("gold_label"))
        if label not in RELATIONS or not isinstance(text, str):
            raise ValueError(
                f"{file} has the entry {str(entry)[:80]!r}, expected a sentence and a label of "
                f"{', '.join(RELATIONS)}: remove or correct it."
            )
        if Path(image).suffix.lower() not in IMG_EXTENSIONS:
            png = self.path(f"{image}.png").is_file()
            image += ".png" if png else ".jpg"
        return Judged(image, text, RELATIONS.index(label))

    def samples(self, part: str) -> Dataset:
        return EntailmentSet(self, self.entries(part), training=part == "train")


class EntailmentSet(Dataset):
    """The samples of `EntailmentData`."""

    def __init__(self, data: EntailmentData, entries: list[Judged], training: bool) -> None:
        self.data, self.entries, self.training = data, entries, training

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> dict[str, Any]:
        entry = self.entries[place]
        image = self.data.picture(entry.image, self.training)
        return {"image": image, "text": entry.text, "labels": entry.label}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch, see `EntailmentData`."""
        return {
            "images": torch.stack([sample["image"] for sample in samples]),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
            **self.data.tokens([sample["text"] for sample in samples]),
        }


@dataclass(frozen=True)
class Asked:
    """An image, a question with its number, and people's answers."""

    image: str
    question: str
    number: int
    answers: tuple[str, ...]


class VQAData(ImageTextData):
    """VQA v2: questions, ten answers to each, and a list of candidate answers.

    The files are ALBEF's vqa_{train,val,test}.json (`question_id`, `question`, `image`, `answer`: a
    list, or one text as in Visual Genome's) and answer_list.json. Batches have `images`,
    `input_ids` and `attention_mask`. Training batches also have, for the S answers to all of their
    questions, `answer_ids` and `answer_mask` (S, A), `answer_row` (S,), the question's row in the
    batch, and `answer_weight` (S,), the share of people who gave the answer (a half for a single
    answer). Evaluation batches have `candidate_ids` and `candidate_mask` (C, A), `scores` (B, C),
    VQA's accuracy of each candidate, and `labels` (B,), the questions' indices, -100 for samples
    that only fill up a rank's last batch.

    Args:
        answer_list: file of the candidate answers, relative to the folder of the lists.
        **kwargs: see `ImageTextData`.
    """

    def __init__(self, answer_list: str = "answer_list.json", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.answer_list = answer_list
        self._candidates: list[str] = []

    @property
    def candidates(self) -> list[str]:
        """The candidate answers.

        Raises:
            ValueError: the list is empty, or lacks every answer of the validation part.
        """
        if not self._candidates:
            file = self.folder / self.answer_list
            candidates = read_json(file)
            if not candidates or not all(isinstance(answer, str) for answer in candidates):
                raise ValueError(f"{file} has no answers, expected a json list of texts.")
            given = {answer for entry in self.entries("val") for answer in entry.answers}
            if given and not {*map(plain, given)} & {*map(plain, candidates)}:
                raise ValueError(
                    f"{file} has none of the {len(given)} answers of the validation questions, "
                    f"such as {min(given)!r}: give the list that belongs to these questions."
                )
            # of an answer that is listed twice only one place would get its score
            self._candidates = list(dict.fromkeys(candidates))
        return self._candidates

    def describe(self) -> dict[str, Any]:
        """The description of `ImageTextData.describe`, and the candidate answers."""
        return {**super().describe(), "answers": self.candidates}

    def read(self, part: str) -> list[Asked]:
        entries = []
        for file in self.list_files(part, f"vqa_{part}.json"):
            for place, entry in enumerate(read_list(file)):
                require_keys(file, place, entry, ["image", "question"])
                question = entry["question"]
                if not isinstance(question, str):
                    raise ValueError(
                        f"{file}, entry {place}: the question is {question!r}, expected a text: "
                        "correct or remove the entry."
                    )
                answers = texts_of(entry.get("answer", []), f"{file}, entry {place}: the answer")
                if part == "train" and not answers:
                    raise ValueError(
                        f"{file}, entry {place}, has no answer, expected one or more to learn "
                        "from: remove it, or give the file to another part."
                    )
                number = entry.get("question_id", place)
                try:
                    entries.append(Asked(entry["image"], question, int(number), answers))
                except (TypeError, ValueError) as error:
                    raise ValueError(
                        f"{file}, entry {place}: the question_id is {number!r}, expected a whole "
                        "number: correct it, or remove it from all entries."
                    ) from error
        return entries

    def samples(self, part: str) -> Dataset:
        return VQASet(self, self.entries(part), training=part == "train")


class VQASet(Dataset):
    """The samples of `VQAData`."""

    def __init__(self, data: VQAData, entries: list[Asked], training: bool) -> None:
        self.data, self.entries, self.training = data, entries, training
        if not training:
            # as people's answers are compared: "Yes." is the candidate "yes"
            self.places: dict[str, list[int]] = {}
            for place, answer in enumerate(data.candidates):
                self.places.setdefault(plain(answer), []).append(place)
            self.candidates = data.tokens(data.candidates, cleaned=False)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> dict[str, Any]:
        entry = self.entries[place]
        image = self.data.picture(entry.image, self.training)
        return {"image": image, "entry": entry, "labels": place}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch, see `VQAData`."""
        entries = [sample["entry"] for sample in samples]
        batch = {
            "images": torch.stack([sample["image"] for sample in samples]),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
            **self.data.tokens([entry.question for entry in entries]),
        }
        if not self.training:
            scores = torch.zeros(len(entries), len(self.data.candidates))
            for row, entry in enumerate(entries):
                for answer, score in vqa_scores(entry.answers).items():
                    for place in self.places.get(plain(answer), []):
                        scores[row, place] = score
            candidates = {
                "candidate_ids": self.candidates["input_ids"],
                "candidate_mask": self.candidates["attention_mask"],
            }
            return {**batch, **candidates, "scores": scores}
        given = [
            # a single answer, such as Visual Genome's, has weight ½ in ALBEF
            (row, answer, count / max(len(entry.answers), 2))
            for row, entry in enumerate(entries)
            for answer, count in Counter(entry.answers).items()
        ]
        answers = self.data.tokens([answer for _, answer, _ in given], cleaned=False)
        return {
            **batch,
            "answer_ids": answers["input_ids"],
            "answer_mask": answers["attention_mask"],
            "answer_row": torch.tensor([row for row, _, _ in given]),
            "answer_weight": torch.tensor([weight for _, _, weight in given]),
        }


def vqa_scores(answers: tuple[str, ...]) -> dict[str, float]:
    """VQA's accuracy of every answer that people gave (Antol et al., 2015).

    It is min(number of people with this answer / 3, 1), averaged over leaving out each person.
    Where fewer than three are left, all of them are needed instead of three.
    """
    counts, people = Counter(plain(answer) for answer in answers), len(answers)
    needed = max(min(people - 1, 3), 1)
    scores = {}
    for answer in dict.fromkeys(answers):
        same = counts[plain(answer)]
        total = same * min((same - 1) / needed, 1) + (people - same) * min(same / needed, 1)
        # a single answer (Visual Genome's) counts as right
        scores[answer] = total / people if people > 1 else 1.0
    return scores
