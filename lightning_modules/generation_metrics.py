"""Scores generated text against several references, as the official E2E scorer does.

The official scorer (tuetschek/e2e-metrics) takes BLEU and NIST from mteval-v13a, and METEOR,
ROUGE-L and CIDEr from the COCO caption scorer, which tokenises with the Penn Treebank tokenizer of
Stanford CoreNLP 3.4.1. This file needs neither Java nor Perl for all but METEOR 1.5, which exists
in Java only and is computed where PyPI's `pycocoevalcap` and a `java` are installed.

`score(outputs, references)` computes all of them. Sources: Papineni et al. 2002 (BLEU), Doddington
2002 (NIST), Lin 2004 (ROUGE-L), Vedantam et al. 2015 (CIDEr-D), Denkowski and Lavie 2014 (METEOR).
"""

import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence

# Tokens.

_ABBREVIATIONS = (
    "mr|mrs|ms|messrs|drs?|profs?|sens?|reps?|attys?|lt|col|gen|govs?|adm|rev|maj|sgt|cpl|pvt|mt|"
    "capt|ste?|ave|pres|lieut|hon|brig|pfc|spc|supts?|det|jr|sr|bros|ph|blvd|rd|esq|inc|cos?|corp|"
    "ptys?|ltd|plc|bancorp|dept|assn|univ|intl|invt|elec|natl|mfg|vs|alex|wm|jos|cie|cf|etc|al|seq|"
    "jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|mon|tues?|wed|thurs?|fri"
)
_WORD = r"[^\W_]+"  # letters and digits of any alphabet
_TOKEN = re.compile(
    rf"""
      (?P<whole>                                            # kept as it is
        </?[a-z][^<>\s]*> | https?://\S+ | www\.\S+\w | [\w.+-]+@[\w-]+\.\w+ | [#@][a-z]\w*
      )
    | (?P<ellipsis> \.\.\.+ | … )
    | (?P<dashes> --+ | [–—] )
    | (?P<clitic> '(?:s|m|d|re|ve|ll|t(?=is\b|was\b))(?:\b|(?<='t)) )
    | (?P<decade> '\d\ds?\b )
    | (?P<quote> ''|``|[`'"] )
    | (?P<stopped>                                          # keeps its full stop
        (?<!\w) (?: (?:[a-z]\.){{2,}}(?!\w)
          | [a-z]\.(?!\w|\Z) | (?:{_ABBREVIATIONS})\.(?!\w) | no\.(?=\s*\d) )
      | {_WORD}(?:-{_WORD})*\.(?=[,;:])
    )
    | (?P<negated> (?:{_WORD}-)*{_WORD}?(?=n't\b) | n't\b )
    | (?P<number>
        (?> (?:(?<!\w)[-+])? (?:\d*(?:[.,:]\d+)+|\d+) (?:[-/]\d+(?:[.,:]\d+)*)* )
        (?: (?<=[.,:]\d)|(?<=[.,:]\d\d) | (?!{_WORD}) ) (?!-[a-z])
      )
    | (?P<sites> (?<![\w-])[^\W\d_]+(?:\.[^\W\d_]+)+(?:-[^\W\d_]+)* )
    | (?P<word>
        (?:[dol]'(?=[a-z]{{2}}))?  (?:\d+[.,]\d+(?=-)|{_WORD}(?:&{_WORD})*) (?:[-/]{_WORD})*
      )
    | (?P<marks> [!?]+ )
    | (?P<other> [^\s] )
    """,
    re.VERBOSE | re.IGNORECASE,
)
# words that the Penn Treebank splits in two → length of the first part
_SPLIT_AT = {"cannot": 3, "gonna": 3, "gotta": 3, "wanna": 3, "gimme": 3, "lemme": 3}
_PTB_NAMES = ("-lrb-", "-rrb-", "-lsb-", "-rsb-", "-lcb-", "-rcb-", "#", "$")
_PTB_SYMBOLS = dict(zip("()[]{}£€", _PTB_NAMES, strict=True))
_PUNCTUATION = frozenset(".?!,:-;")  # brackets stay: the official list has them in capitals


def ptb_tokens(text: str) -> list[str]:
    """Lower-case Penn Treebank tokens of `text` without punctuation, as the COCO scorer makes them.

    One regular expression in place of Stanford's PTBTokenizer 3.4.1. The two agree on all but one
    of E2E's 51,426 references, but not on every text. Words with "-", "/" or a "." between letters
    stay whole; clitics such as "n't" and "'s" are split off; £ becomes "#"; "center.," keeps its
    full stop and "city centre." does not.
    """
    text = text.replace("’", "'").replace("‘", "`").replace("“", '"').replace("”", '"')
    tokens = []
    for match in _TOKEN.finditer(text):
        token, kind = match.group().lower(), match.lastgroup
        if kind == "word" and token in _SPLIT_AT:
            tokens += [token[: _SPLIT_AT[token]], token[_SPLIT_AT[token] :]]
        elif kind in ("quote", "dashes", "ellipsis"):
            continue
        elif kind == "other":
            tokens.append(_PTB_SYMBOLS.get(token, token))
        elif token:  # "can't" is an empty word before "n't"
            tokens.append(token)
    return [token for token in tokens if token not in _PUNCTUATION]


# Scores.


def score(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """BLEU, NIST, ROUGE_L and CIDEr of the outputs, and METEOR where it is installed.

    Units are those of the E2E papers' tables: BLEU, ROUGE_L and METEOR in percent, NIST and CIDEr
    on their own scales. `meteor_is_missing()` says why METEOR is left out.

    Args:
        outputs: one text for each input.
        references: the references of each input, one or more.

    Raises:
        ValueError: if outputs and references do not match; see `check`.
        ImportError: if sacrebleu is not installed.
    """
    check(outputs, references)
    tokens = [ptb_tokens(output) for output in outputs]
    reference_tokens = [[ptb_tokens(text) for text in texts] for texts in references]
    scores = {
        "BLEU": bleu(outputs, references),
        "NIST": nist(outputs, references),
        "ROUGE_L": 100 * rouge_l(tokens, reference_tokens),
        "CIDEr": cider(tokens, reference_tokens),
    }
    if meteor_is_missing() is None:
        scores["METEOR"] = 100 * meteor(tokens, reference_tokens)
    return scores


def check(outputs: Sequence, references: Sequence[Sequence]) -> None:
    """Check that there is at least one output, and at least one reference for each output.

    Raises:
        ValueError: otherwise, or if a single string stands in place of a list.
    """
    if isinstance(outputs, str) or any(isinstance(texts, str) for texts in references):
        raise ValueError(
            "The outputs or one input's references are a single string, expected lists: one output "
            "for each input and a list of references for each input."
        )
    if len(outputs) != len(references):
        raise ValueError(
            f"There are {len(outputs)} outputs and {len(references)} lists of references, expected "
            "one list for each output: group the references by input (the E2E test part has 4,693 "
            "references of 630 inputs) and give one output for each input."
        )
    if not outputs:
        raise ValueError("There are 0 outputs, expected 1 or more: generate some first.")
    for place, texts in enumerate(references):
        if not texts:
            raise ValueError(
                f"Output {place} has 0 references, expected 1 or more: leave the output out, or "
                "add a reference."
            )


def bleu(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU in percent: sacrebleu with mteval-v13a's tokens, lower case, no smoothing.

    Raises:
        ValueError: if outputs and references do not match; see `check`.
        ImportError: if sacrebleu is not installed.
    """
    check(outputs, references)
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError(
            "BLEU needs sacrebleu, which is not installed: pip install sacrebleu."
        ) from error
    most_references = max(map(len, references))
    # sacrebleu takes the n-th references of all inputs together, None where an input has fewer
    streams = [
        [texts[n] if n < len(texts) else None for texts in references]
        for n in range(most_references)
    ]
    metric = BLEU(tokenize="13a", lowercase=True, smooth_method="none")
    return metric.corpus_score(list(outputs), streams).score  # type: ignore[arg-type]


def nist(outputs: Sequence[str], references: Sequence[Sequence[str]], max_ngram: int = 5) -> float:
    """NIST (Doddington 2002) over the corpus, as mteval-v13a defines it.

    The score is Σ_n (Σ over hits of info(w_1…w_n)) / (Σ over outputs of max(length − n + 1, 0)),
    times a length penalty exp(−β ln²(L_out / L_ref)) where L_out < L_ref, with β such that the
    penalty is 0.5 at L_out / L_ref = 2/3. A hit is an n-gram of an output that also stands in one
    of its references, counted at most as often as in the reference that has it most often.
    info(w_1…w_n) = log2(count(w_1…w_{n−1}) / count(w_1…w_n)), with counts over all references.
    L_ref = (number of inputs) · (tokens of all references) / (number of references).

    Args:
        outputs: one text for each input.
        references: the references of each input, one or more.
        max_ngram: the largest n.

    Raises:
        ValueError: if outputs and references do not match; see `check`.
    """
    check(outputs, references)
    counts: Counter[tuple[str, ...]] = Counter()
    hits: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(max_ngram)]
    lengths = [0] * max_ngram
    for output, texts in zip(outputs, references, strict=True):
        tokens = mteval_tokens(output)
        reference_tokens = [mteval_tokens(text) for text in texts]
        counts[()] += sum(map(len, reference_tokens))
        for n in range(1, max_ngram + 1):
            highest_counts: Counter[tuple[str, ...]] = Counter()
            for reference in reference_tokens:
                ngrams = _ngrams(reference, n)
                counts.update(ngrams)
                highest_counts |= ngrams
            hits[n - 1].update(_ngrams(tokens, n) & highest_counts)
            lengths[n - 1] += max(len(tokens) - n + 1, 0)
    total = 0.0
    for matched, length in zip(hits, lengths, strict=True):
        information = sum(
            times * math.log2(counts[ngram[:-1]] / counts[ngram])
            for ngram, times in matched.items()
        )
        total += information / max(length, 1)
    references_each = sum(map(len, references)) / len(references)
    ratio = lengths[0] * references_each / counts[()] if counts[()] else 0.0
    if ratio <= 0:
        return 0.0
    beta = math.log(2) / math.log(1.5) ** 2
    return total * (1.0 if ratio >= 1 else math.exp(-beta * math.log(ratio) ** 2))


def rouge_l(outputs: Sequence[list[str]], references: Sequence[Sequence[list[str]]]) -> float:
    """Mean ROUGE-L (Lin 2004) of tokenised texts, between 0 and 1, as in the COCO scorer.

    F = (1 + β²) P R / (R + β² P) with β = 1.2. P and R are the length of the longest common
    subsequence over the output's and the reference's length; each is the maximum over the
    references, possibly of different ones.

    Raises:
        ValueError: if outputs and references do not match; see `check`.
    """
    check(outputs, references)
    beta2 = 1.2**2
    total = 0.0
    for output, texts in zip(outputs, references, strict=True):
        # the official scorer treats an empty text as one empty word
        output = output or [""]
        lengths = [(_common_length(output, text or [""]), len(text) or 1) for text in texts]
        precision = max(common for common, _ in lengths) / len(output)
        recall = max(common / size for common, size in lengths)
        if precision and recall:
            total += (1 + beta2) * precision * recall / (recall + beta2 * precision)
    return total / len(outputs)


def cider(outputs: Sequence[list[str]], references: Sequence[Sequence[list[str]]]) -> float:
    """Mean CIDEr-D (Vedantam et al. 2015) of tokenised texts, 0 to 10, as in the COCO scorer.

    For each n up to 4: the cosine of the tf-idf vectors of output and reference, with the
    output's entries clipped to the reference's, times exp(−(length difference)² / 2σ²), σ = 6. The
    score is 10 times the mean over n and references. As in the official code, the document
    frequency of an n-gram is the number of inputs with a reference that contains it, and lengths
    are numbers of bigrams.

    Raises:
        ValueError: if outputs and references do not match; see `check`.
    """
    check(outputs, references)
    max_ngram, sigma = 4, 6.0
    frequency: Counter[tuple[str, ...]] = Counter()
    for texts in references:
        frequency.update({ngram for text in texts for ngram in _all_ngrams(text, max_ngram)})
    log_inputs = math.log(len(references))

    def vectors(text: list[str]) -> list[dict[tuple[str, ...], float]]:
        parts: list[dict[tuple[str, ...], float]] = [{} for _ in range(max_ngram)]
        for ngram, times in _all_ngrams(text, max_ngram).items():
            idf = log_inputs - math.log(max(1, frequency[ngram]))
            parts[len(ngram) - 1][ngram] = times * idf
        return parts

    total = 0.0
    for output, texts in zip(outputs, references, strict=True):
        output_vectors = vectors(output)
        for text in texts:
            reference_vectors = vectors(text)
            difference = max(len(output) - 1, 0) - max(len(text) - 1, 0)
            penalty = math.exp(-(difference**2) / (2 * sigma**2))
            for output_vector, reference_vector in zip(
                output_vectors, reference_vectors, strict=True
            ):
                product = sum(
                    min(value, reference_vector[ngram]) * reference_vector[ngram]
                    for ngram, value in output_vector.items()
                    if ngram in reference_vector
                )
                norm = _norm(output_vector) * _norm(reference_vector)
                total += penalty * (product / norm if norm else 0.0) / len(texts)
    return 10 * total / max_ngram / len(outputs)


def meteor_is_missing() -> str | None:
    """One sentence on what has to be installed for METEOR; None where nothing is missing."""
    try:
        import pycocoevalcap.meteor.meteor  # noqa: F401
    except ImportError:
        return (
            "METEOR is left out: its Java program is not here; pip install --no-deps pycocoevalcap "
            "brings it (100 MB)."
        )
    if shutil.which("java") is None:
        return "METEOR is left out: there is no java on the PATH; install a Java runtime."
    return None


def meteor(outputs: Sequence[list[str]], references: Sequence[Sequence[list[str]]]) -> float:
    """METEOR 1.5 (Denkowski and Lavie 2014) of tokenised texts over the corpus, between 0 and 1.

    Raises:
        ValueError: if outputs and references do not match; see `check`.
        RuntimeError: if `pycocoevalcap` or `java` is missing.
    """
    check(outputs, references)
    if reason := meteor_is_missing():
        raise RuntimeError(reason)
    from pycocoevalcap.meteor.meteor import Meteor

    scorer = Meteor()
    try:
        total, _ = scorer.compute_score(
            {i: [" ".join(text) for text in texts] for i, texts in enumerate(references)},
            {i: [" ".join(text)] for i, text in enumerate(outputs)},
        )
    finally:
        for stream in (scorer.meteor_p.stdin, scorer.meteor_p.stdout, scorer.meteor_p.stderr):
            stream.close()
        scorer.meteor_p.kill()
        scorer.meteor_p.wait()
    return float(total)


def mteval_tokens(text: str) -> list[str]:
    """Lower-case tokens of mteval-v13a: marks are split off, except "." and "," inside numbers."""
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, mark in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(entity, mark)
    text = f" {text} "
    text = re.sub(r"([!-&(-+:-@\[-`{-~/])", r" \1 ", text)
    text = re.sub(r"([^0-9])([.,])", r"\1 \2 ", text)
    text = re.sub(r"([.,])([^0-9])", r" \1 \2", text)
    text = re.sub(r"([0-9])(-)", r"\1 \2 ", text)
    return text.lower().split()


def _ngrams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(tokens[start:] for start in range(n)), strict=False))


def _all_ngrams(tokens: list[str], most: int) -> Counter[tuple[str, ...]]:
    """All n-grams of 1 to `most` tokens."""
    counts: Counter[tuple[str, ...]] = Counter()
    for n in range(1, most + 1):
        counts.update(_ngrams(tokens, n))
    return counts


def _norm(vector: dict[tuple[str, ...], float]) -> float:
    return math.sqrt(sum(value * value for value in vector.values()))


def _common_length(first: list[str], second: list[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for a in first:
        before = 0  # of the previous row, one place to the left
        for place, b in enumerate(second, start=1):
            above = row[place]
            row[place] = before + 1 if a == b else max(above, row[place - 1])
            before = above
    return row[-1]
