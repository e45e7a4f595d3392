"""The E2E scorer against numbers computed by hand, sacrebleu, and the official scorer."""

import csv
import math
from collections import Counter
from pathlib import Path

import pytest

from lightning_modules import generation_metrics as metrics
from lightning_modules.generation_metrics import mteval_tokens, ptb_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [  # what Stanford's PTBTokenizer 3.4.1 and the COCO scorer's list of punctuation make of them
        ("Cocum's in the £20-25 range.", "cocum 's in the # 20-25 range"),
        (
            "It's (really) good & cheap; £20-£25, €30",
            "it 's -lrb- really -rrb- good & cheap # 20 # 25 $ 30",
        ),
        ("You can't, don't and cannot.", "you ca n't do n't and can not"),
        ("the city center., near", "the city center. near"),
        ("in food.Children are", "in food.children are"),
        ("£20.The price is 3.5.", "# 20 the price is 3.5"),
        ("5-star.It's 3/5, and/or 1,000.50", "5-star it 's 3/5 and/or 1,000.50"),
        ("\"Quoted\" and 'single' – no... --- !!", "quoted and single no !!"),
        ("near St. John's, Chesterton Rd. today", "near st. john 's chesterton rd. today"),
        ("a d'oeuvre at Café Rouge", "a d'oeuvre at café rouge"),
        ("family - friendly .", "family friendly"),
        ("25% of 20gbp, 20-25and", "25 % of 20gbp 20-25and"),
        ("e.g. Mr. Smith, the U.S. and A. then", "e.g. mr. smith the u.s. and a. then"),
        ("", ""),
    ],
)
def test_treebank_tokens(text: str, tokens: str) -> None:
    assert ptb_tokens(text) == tokens.split()


def test_mteval_tokens_are_sacrebleus() -> None:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    texts = [
        "It's £20-25, 1,000.50 or 3.5; (good) [x] {y} a/b &amp; &quot;c&quot; <d> 5-star!",
        "the end. 5. 6, 7 -8 café's",
    ]
    for text in texts:
        assert mteval_tokens(text) == Tokenizer13a()(text.lower()).split()


def test_nist_by_hand() -> None:
    # counts over the references: 4 tokens in all; a 2, b 1, c 1; "a b" 1, "b a" 1, "a c" 1
    one = math.log2(4 / 2) * 1 + math.log2(4 / 1)  # hits a (once, the output has one), b
    two = math.log2(2 / 1)  # "a b", after two a
    ratio = 2 / 4
    penalty = math.exp(math.log(0.5) / math.log(1.5) ** 2 * math.log(ratio) ** 2)
    assert metrics.nist(["a b"], [["a b a c"]]) == pytest.approx(penalty * (one / 2 + two / 1))
    assert metrics.nist(["a b a c"], [["a b a c"]], max_ngram=1) == pytest.approx(
        (2 * 1 + 2 + 2) / 4
    )
    # the penalty is one half at two thirds of the length
    full = metrics.nist(["a b c"], [["a b c"]], max_ngram=1)
    assert metrics.nist(["a b"], [["a b c"]], max_ngram=1) == pytest.approx(full / 2)


def test_nist_takes_the_mean_length_of_references_and_the_best_clip() -> None:
    # references of 2 and 4 tokens: mean 3, so an output of 3 has no penalty; "a" clips at 2
    score = metrics.nist(["a a a"], [["a a", "b c d e"]], max_ngram=1)
    assert score == pytest.approx(2 * math.log2(6 / 2) / 3)


def test_nist_penalty_with_unequally_many_references() -> None:
    """L_ref by hand: 2 inputs, references of 2 | 6, 6, 7 tokens: 2 · 21 / 4 = 10.5.

    The mean over inputs of their own means, 2 + 19 / 3 = 8.3, would give the outputs' 9 tokens no
    penalty at all.
    """
    outputs = ["a b", "c d e f g h i"]
    references = [["a b"], ["c d e f g h", "c d e f g h", "c d e f g h i"]]
    ratio = 9 / 10.5
    penalty = math.exp(math.log(0.5) / math.log(1.5) ** 2 * math.log(ratio) ** 2)
    once, thrice = math.log2(21 / 1), math.log2(21 / 3)  # a, b, i; c to h
    expected = penalty * (3 * once + 6 * thrice) / 9
    assert metrics.nist(outputs, references, max_ngram=1) == pytest.approx(expected)


def test_nist_counts_no_ngrams_in_an_output_that_is_too_short() -> None:
    # bigrams: "a" and "" have none, "a b c" has two; an empty text takes none away
    outputs, references = ["a", "", "a b c"], [["a"], ["c"], ["a b c"]]
    ones = 3 * math.log2(5 / 2) + math.log2(5 / 1)  # a, a, c; b
    twos = math.log2(2 / 1) + math.log2(1 / 1)  # "a b", after two a; "b c", after one b
    penalty = math.exp(math.log(0.5) / math.log(1.5) ** 2 * math.log(4 / 5) ** 2)
    expected = penalty * (ones / 4 + twos / 2)
    assert metrics.nist(outputs, references, max_ngram=2) == pytest.approx(expected)


def mteval(outputs: list[str], references: list[list[str]], systems: float) -> float:
    """mteval-v13a's NIST written down from its definition, for `systems` references an input."""
    words = [[text.split() for text in texts] for texts in references]
    everything = [text for texts in words for text in texts]
    counted = Counter(
        tuple(text[i : i + n]) for text in everything for n in range(1, 6)
        for i in range(len(text) - n + 1)
    )  # fmt: skip

    def count(ngram: tuple[str, ...], text: list[str]) -> int:
        places = range(len(text) - len(ngram) + 1)
        return sum(tuple(text[i : i + len(ngram)]) == ngram for i in places)

    def information(ngram: tuple[str, ...]) -> float:
        before = counted[ngram[:-1]] if ngram[:-1] else sum(map(len, everything))
        return -math.log(counted[ngram] / before) / math.log(2)

    score = 0.0
    for n in range(1, 6):
        gained, ngrams = 0.0, 0
        for output, texts in zip(outputs, words, strict=True):
            tokens = output.split()
            ngrams += len(tokens) - n + 1 if n <= len(tokens) else 0
            for ngram in {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}:
                most = max(count(ngram, text) for text in texts)
                if hit := min(count(ngram, tokens), most):
                    gained += hit * information(ngram)
        score += gained / max(ngrams, 1)
    ratio = sum(len(o.split()) for o in outputs) / (sum(map(len, everything)) / systems)
    beta = -math.log(0.5) / math.log(1.5) / math.log(1.5)
    return score * (1 if ratio >= 1 else math.exp(-beta * math.log(ratio) * math.log(ratio)))


def test_nist_is_mtevals_on_real_references(recipes_data: Path) -> None:
    several = leave_one_out(recipes_data)
    plain = [
        [" ".join(mteval_tokens(text)) for text in texts] for texts in several if len(texts) > 2
    ]
    outputs = [texts[0][: int(0.8 * len(texts[0]))].rsplit(" ", 1)[0] for texts in plain]
    even = [texts[1:3] for texts in plain]
    uneven = [texts[1:] for texts in plain]
    mean = sum(map(len, uneven)) / len(uneven)
    assert len(set(map(len, uneven))) > 3
    assert metrics.nist(outputs, even) == pytest.approx(mteval(outputs, even, 2))
    assert metrics.nist(outputs, uneven) == pytest.approx(mteval(outputs, uneven, mean))


def test_rouge_l_by_hand() -> None:
    # common subsequence "a c": P = 2/3 from the first, R = 2/2 from the second reference
    outputs, references = [["a", "b", "c"]], [[["a", "x", "c", "y"], ["a", "c"]]]
    precision, recall, beta2 = 2 / 3, 1.0, 1.44
    expected = (1 + beta2) * precision * recall / (recall + beta2 * precision)
    assert metrics.rouge_l(outputs, references) == pytest.approx(expected)
    assert metrics.rouge_l([["q"]], references) == 0
    assert metrics.rouge_l([[]], references) == 0
    assert metrics.rouge_l(outputs, [[outputs[0]]]) == pytest.approx(1)
    # the reference with the lower precision has the higher recall
    apart = metrics.rouge_l([["a", "b", "c"]], [[["a", "x", "c", "y"], ["b"]]])
    assert apart == pytest.approx(expected)


def test_cider_by_hand() -> None:
    # two inputs; every word is in the references of one of them, so each idf is ln 2
    outputs = [["a", "b"], ["c", "d"]]
    references = [[["a", "b"]], [["c", "e", "f"]]]
    # input 0: cosines 1, 1, 0, 0. input 1: unigrams 1/(√2 √3), bigram none; lengths 1 and 2
    second = 1 / math.sqrt(6) * math.exp(-1 / 72)
    assert metrics.cider(outputs, references) == pytest.approx(10 * (2 / 4 + second / 4) / 2)


def test_cider_clips_and_averages_references() -> None:
    # "a a" has tf 2 and is clipped to 1: cosine 1·1/(2·1) for unigrams, lengths 1 and 0
    outputs, references = [["a", "a"], ["z"]], [[["a"], ["b"]], [["z"]]]
    clipped = 0.5 * math.exp(-1 / 72)
    assert metrics.cider(outputs, references) == pytest.approx(10 * (clipped / 2 / 4 + 1 / 4) / 2)


def test_cider_takes_no_notice_of_words_of_every_input() -> None:
    # counted once for an input, however many of its references have the word
    outputs, references = [["a", "b"], ["a"]], [[["a", "c"], ["a"]], [["a"]]]
    assert metrics.cider(outputs, references) == 0


def test_bleu_with_uneven_references_and_case() -> None:
    outputs = ["The cat sat on the mat .", "a dog ran far away today"]
    references = [["the cat sat on the mat.", "A cat!"], ["A dog ran far away today"]]
    assert metrics.bleu(outputs, references) == pytest.approx(100)
    # by hand: 6 of 7, 5 of 6, 4 of 5, 3 of 4 n-grams; the closest reference is as long
    score = metrics.bleu(["the cat sat on the red mat"], [["the cat sat on the red dog"]])
    assert score == pytest.approx(100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25)
    assert metrics.bleu(["the red cat sat"], [["the red dog sat"]]) == 0  # not smoothed


def test_scores_of_perfect_outputs() -> None:
    texts = [
        "The Eagle is a cheap pub near Café Rouge.",
        "Zizzi costs more than £30 a head, sadly.",
    ]
    scores = metrics.score(texts, [[text] for text in texts])
    assert scores["BLEU"] == pytest.approx(100)
    assert scores["ROUGE_L"] == pytest.approx(100)
    assert scores["CIDEr"] == pytest.approx(10)
    assert ("METEOR" in scores) == (metrics.meteor_is_missing() is None)


@pytest.mark.skipif(
    metrics.meteor_is_missing() is not None, reason=str(metrics.meteor_is_missing())
)
@pytest.mark.parametrize(
    ("output", "matches", "chunks"),
    [("zeb quux blorf norg", 4, 1), ("zeb quux", 2, 1), ("zeb quux florp tark", 2, 1),
     ("norg blorf quux zeb", 4, 4)],
)  # fmt: skip
def test_meteor_is_the_papers_formula(output: str, matches: int, chunks: int) -> None:
    # words that no list of synonyms, stems or function words has; English parameters of METEOR 1.5
    reference = ["zeb", "quux", "blorf", "norg"]
    precision, recall = matches / len(output.split()), matches / len(reference)
    mean = precision * recall / (0.85 * precision + 0.15 * recall)
    perfect = matches == len(reference) and chunks == 1
    penalty = 0.0 if perfect else 0.6 * (chunks / matches) ** 0.2
    score = metrics.meteor([output.split()], [[reference]])
    assert score == pytest.approx(mean * (1 - penalty))


def test_meteor_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pycocoevalcap.meteor.meteor", None)
    assert "pip install --no-deps pycocoevalcap" in str(metrics.meteor_is_missing())
    with pytest.raises(RuntimeError, match="METEOR is left out"):
        metrics.meteor([["a"]], [[["a"]]])


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="2 outputs and 1 lists of references"):
        metrics.score(["a", "b"], [["a"]])
    with pytest.raises(ValueError, match="Output 1 has 0 references"):
        metrics.score(["a", "b"], [["a"], []])
    with pytest.raises(ValueError, match="0 outputs"):
        metrics.score([], [])
    with pytest.raises(ValueError, match="single string"):
        metrics.nist(["a"], ["a"])  # type: ignore[list-item]


# On the dev part, of each MR with several references the first as output: ROUGE-L and CIDEr
# by PyPI's pycocoevalcap 1.2 (Stanford's tokenizer 3.4.1, Java 17), BLEU by a rewriting of the
# official scorer's pymteval; measured 2026-11-21.
OFFICIAL = {
    "BLEU": 59.953459442534154,
    "ROUGE_L": 65.28351319176511,
    "CIDEr": 1.8542754607258303,
}


def leave_one_out(recipes_data: Path) -> list[list[str]]:
    """The references of each MR of E2E's development set that has several."""
    with open(recipes_data / "e2e_nlg" / "devset.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    groups: dict[str, list[str]] = {}
    for mr, ref in rows:
        groups.setdefault(mr, []).append(ref)
    return [refs for refs in groups.values() if len(refs) > 1]


def test_leave_one_out_on_real_references(recipes_data: Path) -> None:
    several = leave_one_out(recipes_data)
    outputs, references = [refs[0] for refs in several], [refs[1:] for refs in several]
    tokens = [ptb_tokens(text) for text in outputs]
    reference_tokens = [[ptb_tokens(text) for text in texts] for texts in references]
    scores = {
        "BLEU": metrics.bleu(outputs, references),
        "ROUGE_L": 100 * metrics.rouge_l(tokens, reference_tokens),
        "CIDEr": metrics.cider(tokens, reference_tokens),
    }
    assert scores == pytest.approx(OFFICIAL, abs=1e-6)
