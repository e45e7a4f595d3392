"""Judges all claims; writes results/claims.md and the verdicts in README files and in reports.

python -m recipes claims
"""

import argparse
import importlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from recipes import archive
from recipes.claims import COMPUTE, NOT_JUDGED, REFUTED, SUPPORTED, UNDECIDED, Claim, judge
from recipes.provenance import MEASURED_ON
from recipes.results import read
from recipes.tables import Table

ROOT = Path(__file__).resolve().parents[1]
MEANING = (
    "Differences are paired by seed, with the 95 % interval of Student's t, and positive where "
    "they speak for the claim; one without an interval is exact, or the same for every seed. "
    "Losses are in nats: a perplexity ten times as high is ln 10 = 2.303 nats more. A claim is "
    "supported if the interval lies above its threshold (0 unless it is given), refuted if it "
    "lies below, and undecided if it contains the threshold (the verdict says how many seeds "
    "would decide with 80 % power, if mean and spread stay as they are). It is not judged if its "
    "gate is shut: a gate is a comparison that must be supported before models of this size can "
    "say anything about the claim."
)
WORDS = (SUPPORTED, REFUTED, UNDECIDED, NOT_JUDGED)
ON_THIS_RUN = "## The paper's claims, judged on this run"  # the last heading of a report


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, judged on the table of one run.

    Attributes:
        claim: the judged claim.
        experiment: such as "vera.glue".
        word: supported, refuted, undecided or not judged.
        measured: differences, intervals and n.
        reason: why it is not judged, or how many seeds would decide.
        source: the report's line of provenance: command, device, date, commit.
        measured_on: the models and data of the table, from its report.
        report: the file beside the table; None in it, or if no table has what the claim compares.
    """

    claim: Claim
    experiment: str
    word: str
    measured: str = ""
    reason: str = ""
    source: str = ""
    measured_on: str = ""
    report: Path | None = None

    def link(self, page: Path) -> str:
        """The report as a link in Markdown from a page; "" without one."""
        if self.report is None:
            return ""
        where = Path(os.path.relpath(self.report, page.parent)).as_posix()
        return f"[{self.report.parent.name}]({where})"


def claims(root: Path = ROOT) -> Iterator[tuple[str, Claim]]:
    """Every experiment's name with each of its claims: the modules that have a CLAIMS."""
    for file in sorted((root / "recipes").glob("*/*.py")):
        if re.search(r"^CLAIMS\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            name = f"{file.parent.name}.{file.stem}"
            for claim in claims_of(name):
                yield name, claim


def claims_of(experiment: str) -> Sequence[Claim]:
    """The CLAIMS of an experiment's module; none if the experiment is not in recipes/."""
    name = f"recipes.{experiment}"
    try:
        return getattr(importlib.import_module(name), "CLAIMS", ())
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return ()
        raise


def verdicts_on(table: pd.DataFrame, experiment: str, preset: str) -> list[str]:
    """Paragraphs with the verdicts on one run, which end its report; none at preset tiny.

    Args:
        table: the run's tidy table.
        experiment: such as "vera.glue".
        preset: of the run.
    """
    all_claims = () if preset == "tiny" else claims_of(experiment)
    listed = [claim for claim in all_claims if claim.preset in ("", preset)]
    if not listed:
        return []
    verdicts = [Verdict(claim, experiment, *judge(claim, table)) for claim in listed]
    return [ON_THIS_RUN, MEANING, overview(verdicts)]


def judge_all(root: Path = ROOT) -> list[Verdict]:
    """A verdict for each claim on each table under results/ that has its rows, except tiny."""
    tables = [
        (part, file.with_name("report.md"))
        for file in sorted((root / "results").rglob("results.csv"))
        for _, part in read(file).groupby(["experiment", "preset"], sort=False)
    ]
    verdicts = []
    for experiment, claim in claims(root):
        judged = [
            Verdict(claim, experiment, *judge(claim, part), *_lines(report), report)
            for part, report in tables
            if claim.test is not None
            and part["experiment"].iloc[0] == experiment
            and part["preset"].iloc[0] != "tiny"
            and claim.preset in ("", part["preset"].iloc[0])
        ]
        # a table without the rows of a claim says nothing beside one that has them
        lacking = [one for one in judged if one.reason.startswith(COMPUTE)]
        judged = [one for one in judged if one not in lacking]
        judged = judged or [replace(one, report=None) for one in lacking[:1]]
        reason = claim.reason or _not_run(experiment, claim.preset)
        verdicts += judged or [Verdict(claim, experiment, NOT_JUDGED, reason=reason)]
    return verdicts


def _not_run(experiment: str, preset: str) -> str:
    """Why there is no table to judge a claim on."""
    preset = preset or "small"
    command = f"`python -m recipes.{experiment} --preset {preset} --plan`"
    if preset.startswith("small"):
        return f"{COMPUTE} not run here; {command} tells how long it takes"
    return f"data and compute: preset {preset} is of the paper's scale; {command} lists its needs"


def _lines(report: Path) -> tuple[str, str]:
    """A report's line of provenance, and the models and data it names; "" for what it lacks."""
    text = report.read_text(encoding="utf-8") if report.is_file() else ""
    patterns = r"^(`.*` · \d+ seeds? · .*)$", rf"^{MEASURED_ON}(.*)\.$"
    found = [re.search(pattern, text, re.MULTILINE) for pattern in patterns]
    source, measured_on = (match[1] if match else "" for match in found)
    return source, measured_on


def overview(verdicts: Sequence[Verdict], page: Path | None = None) -> str:
    """Tables of the judged claims, and of the others with reasons.

    Args:
        verdicts: on the claims.
        page: the file with the tables, from which each run's report is linked; None for a report.
    """
    judged = [one for one in verdicts if one.word != NOT_JUDGED]
    not_judged = [
        [_sentence(one.claim), one.claim.number, one.reason, *([one.link(page)] if page else [])]
        for one in verdicts
        if one.word == NOT_JUDGED
    ]
    header = ["not judged", "paper", "why", *(["run"] if page else [])]
    return "\n\n".join(
        ([_judged(judged, page)] if judged else [])
        + ([_markdown(header, not_judged)] if not_judged else [])
    )


def summary(verdicts: Sequence[Verdict], page: Path) -> str:
    """Tables for README.md: judged claims, and counts of verdicts."""
    rows = []
    for experiment in dict.fromkeys(one.experiment for one in verdicts):
        part = [one for one in verdicts if one.experiment == experiment]
        counts = [str(sum(one.word == word for one in part)) for word in WORDS]
        rows.append([part[0].claim.paper, f"`recipes.{experiment}`", *counts])
    judged = [one for one in verdicts if one.word != NOT_JUDGED]
    return "\n\n".join(
        ([_judged(judged, page)] if judged else [])
        + [_markdown(["paper", "experiment", *(f"claims {word}" for word in WORDS)], rows)]
    )


def _judged(verdicts: Sequence[Verdict], page: Path | None) -> str:
    placed = any(one.measured_on for one in verdicts)  # not in a report, which names them on top
    header = ["claim", "paper", *(["measured on"] if placed else []), "ours, with 95 % interval"]
    header += ["verdict", *(["run"] if page else [])]
    rows = [
        [
            _sentence(one.claim),
            one.claim.number,
            *([one.claim.measured_on or one.measured_on] if placed else []),
            one.measured,
            f"**{one.word}**" + (f": {one.reason}" if one.reason else ""),
            *([one.link(page)] if page else []),
        ]
        for one in verdicts
    ]
    return _markdown(header, rows)


def _sentence(claim: Claim) -> str:
    return ", ".join(part for part in (claim.paper, claim.where) if part) + f": {claim.sentence}"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return Table(header, cells, words=True).markdown()


def ledger(verdicts: Sequence[Verdict], page: Path) -> str:
    """The text of results/claims.md, which is `page`."""
    count = {word: sum(one.word == word for one in verdicts) for word in WORDS}
    distinct = len({(one.experiment, one.claim.name) for one in verdicts})
    text = [
        "# Claims and verdicts",
        "Written by `python -m recipes claims` from every results.csv in this folder; a test fails "
        "where they disagree. " + MEANING,
        f"{distinct} claims; one that several runs measured has a line for each run. Lines: "
        + ", ".join(f"{number} {word}" for word, number in count.items())
        + ".",
        _cost(page.parent),
    ]
    for experiment in dict.fromkeys(one.experiment for one in verdicts):
        part = [one for one in verdicts if one.experiment == experiment]
        sources = dict.fromkeys(f"- {one.link(page)}: {one.source}" for one in part if one.report)
        text += [f"## {part[0].claim.paper}: {experiment}", "\n".join(sources)]
        text.append(overview(part, page))
    return "\n\n".join(one for one in text if one) + "\n"


def _cost(results: Path) -> str:
    """How much was computed for the tables whose records are kept; "" without any."""
    files = sorted(results.rglob(archive.FILE))
    if not files:
        return ""
    hours = sum(archive.seconds(file) for file in files) / 3600
    return (
        f"The trainings and measurements of the {len(files)} tables with a {archive.FILE} took "
        f"{hours:.0f} hours, added up one by one: most ran in pairs, each on one of two cores, and "
        "often beside other work. “Not run here” means that this time had to end somewhere: "
        "[what was not run](README.md#what-was-not-run) has the order."
    )


MARKED = re.compile(r"(<!-- claims:([\w.]+) -->\n).*?(<!-- /claims -->)", re.DOTALL)


def pages(root: Path = ROOT) -> dict[Path, str]:
    """The texts of claims.md, README.md, recipes/*/README.md and reports with current verdicts.

    A page's tables are between `<!-- claims:NAME -->` and `<!-- /claims -->`, where NAME is a
    method's folder or an experiment; "all" stands for all experiments, and gives the tables of
    `summary`. Each verdict links the report of its run, which begins with the command. The reports
    are those beside the tables in results/.

    Raises:
        ValueError: if no claims belong to a NAME in a page.
    """
    verdicts = judge_all(root)
    claims_page = root / "results" / "claims.md"
    texts = {claims_page: ledger(verdicts, claims_page)}
    for page in [root / "README.md", *sorted((root / "recipes").glob("*/README.md"))]:
        if page.is_file():
            texts[page] = _filled(page, verdicts)
    return texts | _reports(root)


def _filled(page: Path, verdicts: Sequence[Verdict]) -> str:
    """A page's text with current tables between its marks."""

    def tables(match: re.Match[str]) -> str:
        before, name, after = match.groups()
        part = [
            one
            for one in verdicts
            if name in ("all", one.experiment, one.experiment.partition(".")[0])
        ]
        if not part:
            raise ValueError(f"no claims are named {name!r}: expected a method or an experiment")
        text = summary(part, page) if name == "all" else overview(part, page)
        return f"{before}{text}\n{after}"

    return MARKED.sub(tables, page.read_text(encoding="utf-8"))


def _reports(root: Path) -> dict[Path, str]:
    texts = {}
    for page in sorted((root / "results").rglob("report.md")):
        table = read(page.with_name("results.csv"))
        experiment, preset = table[["experiment", "preset"]].iloc[0]
        before = page.read_text(encoding="utf-8").partition(ON_THIS_RUN)[0].rstrip()
        verdicts = verdicts_on(table, experiment, preset)
        texts[page] = "\n\n".join([before, *verdicts]) + "\n"
    return texts


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pages that have changed, and print their names."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    for page, text in pages().items():
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page}")
