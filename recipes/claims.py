"""Claims of the papers, as data in each experiment's module, and the rule that judges them.

An experiment's module lists its paper's claims:

    CLAIMS = [
        Claim(
            name="further < self-distillation",
            paper="self-distillation",
            sentence="Self-distillation beats further pre-training alone.",
            where="Table 1, CUB",
            number="58.06 against 55.72 %",
            test=Comparison("accuracy", "self_distillation", "further", scale=100),
            gate=Comparison("accuracy", "finetune", "scratch", threshold=0.01, scale=100),
        ),
    ]

recipes/ledger.py judges all of them by the difference, paired by seed, and its 95 % interval:

    supported     the interval lies above the threshold
    refuted       the interval lies below the threshold
    undecided     the interval contains the threshold; the reason tells how many seeds would decide
                  if mean and standard deviation stayed the same
    not judged    there is no measurement (preset tiny does not count), or the gate is shut: a gate
                  is a precondition, a comparison that must be supported for the test to mean
                  anything, such as "fine-tuning beats training from scratch". The reason says
                  which: "the gate is shut", "compute" for what was not run here, "data" for what
                  needs the paper's own
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
from scipy import stats

from recipes.results import Difference, Where, by_seed, difference, select, unique

SUPPORTED, REFUTED = "supported", "refuted"
UNDECIDED, NOT_JUDGED = "undecided", "not judged"
MOST_SEEDS = 1000
POWER = 0.8  # probability of a verdict that `seeds_needed` asks for, as Cohen (1988) advises
UNITS = {  # of metrics, as they are printed
    **dict.fromkeys(("loss", "val_loss", "loss at budget", "loss by slope", "below the line",
                     "kl"), "nats"),
    **dict.fromkeys(("gain", "deviation", "BLEU", "points per 1K"), "points"),
    **dict.fromkeys(("trained", "tuned"), "parameters"),
    **dict.fromkeys(("high", "low"), "powers of ten"),
    "macs": "multiply-adds",
}  # fmt: skip
COMPUTE = "compute:"  # begins the reason of a claim whose rows were not run


@dataclass(frozen=True)
class Comparison:
    """A comparison of two rows, which holds if a − b exceeds a threshold.

    Attributes:
        metric: name of the compared metric.
        a: a row, or conditions on columns, such as {"row": "vera", "stage": "best"}.
        b: likewise; if None, a alone is compared with the threshold. Swap a and b for "at most".
        threshold: in the metric's unit: −0.01 for "loses at most one point".
        where: further conditions on both sides.
        mean_over: see `results.by_seed`. If a test has mean_over "set", a gate that names no set is
            judged for each set, and the test's mean is over the sets whose gate is open.
        exact: judged by the mean alone: counts, the same for every seed, or values of 1 and 0.
        scale: factor by which differences are multiplied when printed: 100 for points.
        digits: decimals of differences when printed.
        unit: of differences when printed; by default the metric's in UNITS, or "points" at scale
            100.
        says: of a gate, what it asks for, in words.
    """

    metric: str
    a: str | Where
    b: str | Where | None = None
    threshold: float = 0.0
    where: Where = field(default_factory=dict)
    mean_over: str = ""
    exact: bool = False
    scale: float = 1.0
    digits: int = 2
    unit: str = ""
    says: str = ""

    @property
    def title(self) -> str:
        """What is compared, such as "accuracy of vera and of lora"."""
        return self._title(self._sides)

    def lacking(self, table: pd.DataFrame) -> str:
        """What is compared and not in the table: one side, or both."""
        absent = [one for one in self._sides if self.side(table, one).empty]
        return self._title(absent or self._sides)

    @property
    def _sides(self) -> list[str | Where]:
        return [self.a] if self.b is None else [self.a, self.b]

    def _title(self, sides: Sequence[str | Where]) -> str:
        return f"{self.metric} of {' and of '.join(map(_named, sides))}"

    def side(self, table: pd.DataFrame, one: str | Where) -> pd.Series:
        """Values of one side, indexed by seed."""
        return by_seed(table, self.metric, {**self.where, **_conditions(one)}, self.mean_over)

    def _lines(self, table: pd.DataFrame, one: str | Where) -> pd.DataFrame:
        where = {"metric": self.metric, "x": None, **self.where, **_conditions(one)}
        return select(table, where)

    def difference(self, table: pd.DataFrame) -> Difference:
        """a − b, or a alone; with `mean_over`, over the values of that column that both have."""
        if self.b is None:
            return difference(self.side(table, self.a), 0.0)
        if self.mean_over:
            in_a, in_b = (set(self._lines(table, one)[self.mean_over]) for one in self._sides)
            table = table[table[self.mean_over].isin(in_a & in_b)]
        return difference(self.side(table, self.a), self.side(table, self.b))

    def verdict(self, compared: Difference) -> str:
        """SUPPORTED, REFUTED, UNDECIDED or NOT_JUDGED for a measured difference."""
        if not compared.n:
            return NOT_JUDGED
        low, high = self._ends(compared)
        if low > self.threshold:
            return SUPPORTED
        # an exact value that equals the threshold does not exceed it
        if high < self.threshold or (self.exact and high == self.threshold):
            return REFUTED
        return UNDECIDED

    def _ends(self, compared: Difference) -> tuple[float, float]:
        """Of the interval; an exact difference has none, and is both."""
        if self.exact:
            return compared.mean, compared.mean
        return compared.low, compared.high

    def text(self, compared: Difference) -> str:
        """The difference with its interval and n, and a threshold that is not zero."""
        if not compared.n:
            return ""
        limit = self.threshold * self.scale
        digits = self._digits(compared, limit)
        text = compared.text(self.scale, digits, interval=not self.exact)
        unit = self.unit or UNITS.get(self.metric, "points" if self.scale == 100 else "")
        text += f" {unit}" * bool(unit)
        text += f" (must exceed {limit:+.{digits}f})" if self.threshold else ""
        return text if self.exact else f"{text}, n = {compared.n}"

    def _digits(self, compared: Difference, limit: float) -> int:
        """`digits`, or more where an end of the interval would be printed like the threshold."""
        ends = [end * self.scale for end in self._ends(compared)]
        for digits in range(self.digits, self.digits + 3):
            if round(limit, digits) not in (round(end, digits) for end in ends):
                return digits
        return self.digits  # too close to tell, or equal


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        name: short and unique within its experiment.
        paper: such as "VeRA".
        sentence: the claim in one sentence.
        where: the paper's table, figure or section.
        number: the value that the paper reports.
        test: a comparison, or several that all have to hold; None if this repository cannot test
            the claim.
        gate: a comparison, or several, that must be supported for the test to mean anything.
        reason: why there is no test, or what else than computing time it may lack.
        preset: the only preset that it is judged at; "" if it can be judged at any.
        measured_on: what it is measured on, if not on the experiment's models and data.
    """

    name: str
    paper: str
    sentence: str
    where: str
    number: str
    test: Comparison | Sequence[Comparison] | None = None
    gate: Comparison | Sequence[Comparison] | None = None
    reason: str = ""
    preset: str = ""
    measured_on: str = ""


def judge(claim: Claim, table: pd.DataFrame) -> tuple[str, str, str]:
    """Judge a claim: verdict (such as SUPPORTED), measured differences, and reason.

    Args:
        claim: the claim.
        table: the tidy table of one experiment at one preset.
    """
    tests, gates = _several(claim.test), _several(claim.gate)
    if not tests:
        return NOT_JUDGED, "", claim.reason
    by_set = any(test.mean_over == "set" for test in tests)
    shut: list[str] = []
    measured_metrics = set(table["metric"])
    for gate in gates:
        if by_set and not gate.mean_over and "set" not in gate.where:
            if gate.metric not in measured_metrics:
                return NOT_JUDGED, "", _why_shut(gate, table)
            open_sets = []
            at = {**gate.where, **_conditions(gate.a)}.get("x")
            for name in unique(select(table, {"metric": gate.metric, "x": at}), "set"):
                within = replace(gate, where={**gate.where, "set": name})
                if reason := _why_shut(within, table):
                    shut.append(f"{name}, {reason}")
                else:
                    open_sets.append(name)
            table = select(table, {"set": open_sets})
        elif reason := _why_shut(gate, table):
            return NOT_JUDGED, "", reason
    left_out = f"left out: {'; '.join(shut)}" if shut else ""
    compared = [test.difference(table) for test in tests]
    for test, one in zip(tests, compared, strict=True):
        if not one.n:
            not_run = f"{COMPUTE} not run here: {test.lacking(table)}"
            return NOT_JUDGED, "", left_out or claim.reason or not_run
    if any(one.diverged for one in compared):
        return NOT_JUDGED, "", "a seed has diverged: its value is no finite number"
    words = [test.verdict(one) for test, one in zip(tests, compared, strict=True)]
    measured = "; ".join(test.text(one) for test, one in zip(tests, compared, strict=True))
    if REFUTED in words:
        return REFUTED, measured, left_out
    if UNDECIDED not in words:
        return SUPPORTED, measured, left_out
    needed = max(
        seeds_needed(one, test.threshold)
        for test, one, word in zip(tests, compared, words, strict=True)
        if word == UNDECIDED
    )
    missing = (
        "one seed has no interval"
        if min(one.n for one in compared) < 2
        else f"{needed} seeds would decide"
        if needed <= MOST_SEEDS
        else f"more than {MOST_SEEDS} seeds would be needed"
    )
    return UNDECIDED, measured, "; ".join(part for part in (missing, left_out) if part)


def _conditions(side: str | Where) -> Where:
    return {"row": side} if isinstance(side, str) else side


def _several(comparisons: Comparison | Sequence[Comparison] | None) -> list[Comparison]:
    if comparisons is None:
        return []
    return [comparisons] if isinstance(comparisons, Comparison) else list(comparisons)


def _why_shut(gate: Comparison, table: pd.DataFrame) -> str:
    """Why a gate is shut; "" if it is open."""
    compared = gate.difference(table)
    asked = gate.says or gate.title
    if not compared.n:
        return f"{COMPUTE} its gate ({asked}) was not measured"
    if gate.verdict(compared) == SUPPORTED:
        return ""
    reason = f"the gate is shut ({asked}): {gate.text(compared)}"
    if compared.n == 1 and not gate.exact:
        return f"{reason}: one seed has no interval, a second is needed"
    return reason


def _named(side: str | Where) -> str:
    values = _conditions(side).values()
    return " ".join(" or ".join(one) if isinstance(one, list) else str(one) for one in values)


def seeds_needed(compared: Difference, threshold: float = 0.0) -> int:
    """The least n at which the interval would exclude the threshold with probability POWER.

    Mean and sd are assumed not to change: √n · |mean − threshold| / sd ≥ t(0.975) + t(POWER),
    both quantiles with n − 1 degrees of freedom; MOST_SEEDS + 1 if no n up to MOST_SEEDS suffices.
    """
    distance = abs(compared.mean - threshold)
    if compared.n < 2 or not distance:
        return MOST_SEEDS + 1
    for n in range(2, MOST_SEEDS + 1):
        both = stats.t.ppf(0.975, n - 1) + stats.t.ppf(POWER, n - 1)
        if math.sqrt(n) * distance >= both * compared.sd:
            return n
    return MOST_SEEDS + 1
