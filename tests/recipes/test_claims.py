"""Claims, their verdicts, and the pages that carry them."""

import importlib
import json
import math
import re
import sys
import types
import zipfile

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from recipes import cli, ledger
from recipes.claims import (
    NOT_JUDGED,
    REFUTED,
    SUPPORTED,
    UNDECIDED,
    Claim,
    Comparison,
    judge,
    seeds_needed,
)
from recipes.results import Difference, Row, tidy, write


def table(preset: str = "small", experiment: str = "m.e", **rows: list[float]) -> pd.DataFrame:
    """Accuracies by seed of each row; `RTE_vera` is row vera of the set RTE."""
    lines = []
    for name, values in rows.items():
        group, _, row = name.rpartition("_")
        for seed, value in enumerate(values):
            lines.append(tidy([Row(row, "accuracy", value, group)], experiment, preset, seed))
    return pd.concat(lines, ignore_index=True)


def claim(test, gate=None, **settings) -> Claim:
    return Claim("c", "Paper", "A beats B.", "Table 1", "2 points", test, gate, **settings)


A_B = Comparison("accuracy", "a", "b", scale=100, digits=1)


class TestVerdict:
    def test_the_interval_decides(self):
        above = table(a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        assert judge(claim(A_B), above) == (SUPPORTED, "+2.0 [+2.0, +2.0] points, n = 3", "")
        below = table(a=[0.5, 0.51, 0.5], b=[0.52, 0.53, 0.525])
        assert judge(claim(A_B), below)[0] == REFUTED
        both = table(a=[0.52, 0.50, 0.53], b=[0.5, 0.51, 0.52])
        assert judge(claim(A_B), both)[0] == UNDECIDED

    def test_pairs_count_and_not_the_spread_of_seeds(self):
        rows = table(a=[0.21, 0.512, 0.811, 0.91], b=[0.2, 0.5, 0.8, 0.9])
        assert judge(claim(A_B), rows)[0] == SUPPORTED

    def test_a_threshold_is_what_the_difference_must_exceed(self):
        rows = table(a=[0.495, 0.496, 0.494], b=[0.5, 0.5, 0.5])
        loses = Comparison("accuracy", "a", "b", threshold=-0.01, scale=100, digits=1)
        word, measured, _ = judge(claim(loses), rows)
        assert word == SUPPORTED and "(must exceed -1.0)" in measured
        assert judge(claim(A_B), rows)[0] == REFUTED

    def test_an_end_that_would_be_printed_like_the_threshold_gets_more_decimals(self):
        """A shut gate read -0.040 [-0.050, -0.030] (must exceed -0.050)."""
        rows = table(a=[0.46, 0.47, 0.48], b=[0.5, 0.5, 0.5])
        near = Comparison("accuracy", "a", "b", threshold=-0.0551, digits=3)
        assert near.text(near.difference(rows)) == (
            "-0.0300 [-0.0548, -0.0052] (must exceed -0.0551), n = 3"
        )
        equal = Comparison("accuracy", "a", "b", threshold=0.5, exact=True, digits=1)
        assert equal.text(equal.difference(table(a=[1.0], b=[0.5]))) == "+0.5 (must exceed +0.5)"

    def test_one_seed_decides_nothing(self):
        rows = table(a=[0.9], b=[0.1])
        word, measured, reason = judge(claim(A_B), rows)
        assert (word, measured, reason) == (
            UNDECIDED,
            "+80.0 points, n = 1",
            "one seed has no interval",
        )

    def test_exact_values_need_no_interval(self):
        exact = Comparison("accuracy", "a", "b", exact=True)
        assert judge(claim(exact), table(a=[0.9], b=[0.1]))[0] == SUPPORTED
        assert judge(claim(exact), table(a=[0.1], b=[0.1]))[0] == REFUTED
        # several seeds: the mean is judged, so no interval is printed beside it
        word, measured, _ = judge(claim(exact), table(a=[1.0, 0.0], b=[0.0, 0.0]))
        assert (word, measured) == (SUPPORTED, "+0.50")

    def test_one_side_alone_is_compared_with_the_threshold(self):
        alone = Comparison("accuracy", "a", threshold=0.6)
        assert judge(claim(alone), table(a=[0.7, 0.71, 0.69]))[0] == SUPPORTED
        assert judge(claim(alone), table(a=[0.5, 0.51, 0.49]))[0] == REFUTED

    def test_several_comparisons_all_have_to_hold(self):
        rows = table(
            a=[0.5, 0.51, 0.52], b=[0.4, 0.41, 0.43], c=[0.6, 0.62, 0.61], d=[0.3, 0.7, 0.5]
        )
        over_c, over_d = (Comparison("accuracy", "a", other) for other in ("c", "d"))
        assert judge(claim([A_B, A_B]), rows)[0] == SUPPORTED
        assert judge(claim([A_B, over_d]), rows)[0] == UNDECIDED
        assert judge(claim([A_B, over_d, over_c]), rows)[0] == REFUTED

    def test_an_interval_that_ends_at_the_threshold_decides_nothing(self):
        same = table(a=[0.5, 0.6, 0.7], b=[0.5, 0.6, 0.7])
        assert judge(claim(A_B), same)[0] == UNDECIDED

    def test_of_several_the_undecided_ones_say_how_many_seeds(self):
        rows = table(
            a=[0.5, 0.51, 0.52], b=[0.4, 0.41, 0.43], c=[0.3, 0.8, 0.2], d=[0.3, 0.6, 0.5], e=[0.4]
        )
        over_c, over_d, over_e = (Comparison("accuracy", "a", other) for other in ("c", "d", "e"))
        needed = [seeds_needed(one.difference(rows)) for one in (over_c, over_d)]
        assert 3 < needed[1] < needed[0] < 1000
        for tests, seeds in (([A_B, over_d], needed[1]), ([over_d, over_c], needed[0])):
            assert judge(claim(tests), rows)[::2] == (UNDECIDED, f"{seeds} seeds would decide")
        assert judge(claim([A_B, over_e]), rows)[2] == "one seed has no interval"
        # where the supported one has fewer seeds than would support it four times out of five
        rows = table(a=[0.5, 0.51, 0.52], b=[0.4, 0.36, 0.32], c=[0.4, 0.39])
        assert judge(claim([A_B, over_c]), rows)[::2] == (UNDECIDED, "3 seeds would decide")
        assert seeds_needed(A_B.difference(rows)) == 4

    def test_what_was_not_measured_is_not_judged(self):
        assert judge(claim(A_B), table(a=[0.5, 0.6])) == (
            NOT_JUDGED, "", "compute: not run here: accuracy of b",
        )  # fmt: skip
        without = claim(None, reason="needs ImageNet-21K")
        assert judge(without, table(a=[0.5])) == (NOT_JUDGED, "", "needs ImageNet-21K")
        lacking = claim(A_B, reason="needs a Java program")
        assert judge(lacking, table(a=[0.5])) == (NOT_JUDGED, "", "needs a Java program")
        assert judge(lacking, table(a=[0.5, 0.5], b=[0.4, 0.3]))[0] != NOT_JUDGED


class TestGate:
    rows = table(
        a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52], xl=[0.6, 0.61, 0.6], s=[0.5, 0.52, 0.51]
    )

    def test_open_and_shut(self):
        xl_s = Comparison("accuracy", "xl", "s")
        s_xl = Comparison("accuracy", "s", "xl")
        assert judge(claim(A_B, xl_s), self.rows)[0] == SUPPORTED
        word, measured, reason = judge(claim(A_B, s_xl), self.rows)
        assert word == NOT_JUDGED and measured == ""
        assert reason.startswith("the gate is shut (accuracy of s and of xl): -0.09 [")
        assert judge(claim(A_B, [xl_s, s_xl]), self.rows)[0] == NOT_JUDGED

    def test_undecided_or_unmeasured_is_shut(self):
        few = table(a=[0.52], b=[0.5], xl=[0.9], s=[0.1])
        word, _, reason = judge(claim(A_B, Comparison("accuracy", "xl", "s")), few)
        assert word == NOT_JUDGED
        assert reason.endswith(": one seed has no interval, a second is needed")
        reason = judge(claim(A_B, Comparison("accuracy", "xl", "t")), self.rows)[2]
        assert reason == "compute: its gate (accuracy of xl and of t) was not measured"

    def test_a_mean_is_over_the_sets_that_both_rows_have(self):
        """Table 6 has most variants on two of the tasks, and the default on all."""
        rows = table(
            RTE_default=[0.8, 0.81], RTE_variant=[0.6, 0.61], RTE_unique=[0.8, 0.8],
            CoLA_default=[0.1, 0.1], CoLA_unique=[0.1, 0.1],
        )  # fmt: skip
        test = Comparison("accuracy", "default", "variant", mean_over="set")
        compared = test.difference(rows)
        assert compared.n == 2 and compared.mean == pytest.approx(0.2)

    def test_a_mean_is_over_the_sets_that_the_gate_lets_through(self):
        rows = table(
            RTE_vera=[0.7, 0.72, 0.71], RTE_lora=[0.6, 0.61, 0.62],
            RTE_full=[0.8, 0.81, 0.8], RTE_majority=[0.5, 0.5, 0.5],
            CoLA_vera=[0.0, 0.0, 0.0], CoLA_lora=[0.9, 0.9, 0.9],
            CoLA_full=[0.5, 0.49, 0.5], CoLA_majority=[0.5, 0.5, 0.5],
        )  # fmt: skip
        test = Comparison("accuracy", "vera", "lora", mean_over="set")
        gate = Comparison("accuracy", "full", "majority", threshold=0.01)
        assert judge(claim(test), rows)[0] == REFUTED
        word, measured, reason = judge(claim(test, gate), rows)
        assert word == SUPPORTED and measured.startswith("+0.10 [")
        assert reason.startswith(
            "left out: CoLA, the gate is shut (accuracy of full and of majority): "
        )
        shut = rows[rows["set"] == "CoLA"]
        word, _, reason = judge(claim(test, gate, reason="needs a cluster"), shut)
        assert word == NOT_JUDGED and reason.startswith("left out: CoLA, the gate is shut")

    def test_a_gate_on_a_point_of_a_curve_is_judged_for_each_set(self):
        rows = table(
            RTE_vera=[0.7, 0.72, 0.71], RTE_lora=[0.6, 0.61, 0.62],
            CoLA_vera=[0.0, 0.0, 0.0], CoLA_lora=[0.9, 0.9, 0.9],
        )  # fmt: skip
        for task, value in (("RTE", 0.2), ("CoLA", -0.2)):
            for seed in range(3):
                point = tidy([Row("full", "rise", value, task, x=1.0)], "m.e", "small", seed)
                rows = pd.concat([rows, point], ignore_index=True)
        test = Comparison("accuracy", "vera", "lora", mean_over="set")
        word, _, reason = judge(claim(test, Comparison("rise", {"row": "full", "x": 1.0})), rows)
        assert word == SUPPORTED and reason.startswith("left out: CoLA, the gate is shut")


class TestSeedsNeeded:
    def test_agrees_with_the_power_of_the_paired_test(self):
        """Simulated: at that n about 80 % of experiments decide, at half of it clearly fewer."""
        compared = Difference(mean=1.0, low=-1, high=3, sd=1.25, n=4)
        n = seeds_needed(compared)
        assert n == 15  # normal approximation: (1.96 + 0.84)² · 1.25² ≈ 12.3, and t is wider
        assert seeds_needed(Difference(1.5, -0.5, 3.5, 1.25, 4), threshold=0.5) == n
        draws = np.random.default_rng(0).normal(1.0, 1.25, (4000, n))
        for count, least, most in ((n, 0.77, 0.87), (n // 2, 0.0, 0.6)):
            part = draws[:, :count]
            half = stats.t.ppf(0.975, count - 1) * part.std(1, ddof=1) / math.sqrt(count)
            assert least < np.mean(part.mean(1) - half > 0) < most

    def test_says_so_in_the_verdict(self):
        rows = table(a=[0.52, 0.50, 0.53], b=[0.5, 0.51, 0.52])
        word, _, reason = judge(claim(A_B), rows)
        compared = A_B.difference(rows)
        assert word == UNDECIDED and reason == f"{seeds_needed(compared)} seeds would decide"

    def test_no_difference_needs_no_end_of_seeds(self):
        rows = table(a=[0.4, 0.6], b=[0.5, 0.5])
        assert judge(claim(A_B), rows)[2] == "more than 1000 seeds would be needed"


class TestPages:
    @pytest.fixture
    def root(self, tmp_path, monkeypatch):
        """A repository with one experiment, its results and two pages."""
        module = types.ModuleType("recipes.m.e")
        module.CLAIMS = [claim(A_B), claim(None, reason="needs a cluster")]
        monkeypatch.setitem(sys.modules, "recipes.m.e", module)
        folder = tmp_path / "recipes" / "m"
        folder.mkdir(parents=True)
        (folder / "e.py").write_text("CLAIMS = [...]\n")
        (folder / "other.py").write_text("# no CLAIMS here\n")
        marks = "before\n<!-- claims:{} -->\nold\n<!-- /claims -->\nafter\n"
        (folder / "README.md").write_text(marks.format("m"))
        (tmp_path / "README.md").write_text(marks.format("all"))
        return tmp_path

    def results(self, root, **rows):
        folder = root / "results" / "m" / "e"
        write(folder / "results.csv", table(**rows))
        (folder / "report.md").write_text(
            "# E\n\n`python -m recipes.m.e --preset small` · 3 seeds · CPU · commit 1a2b3c4\n"
        )

    def test_every_claim_has_a_line_in_ledger_and_card(self, root):
        self.results(root, a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        pages = ledger.pages(root)
        written = pages[root / "results" / "claims.md"]
        assert "1 supported, 0 refuted, 0 undecided, 1 not judged." in written
        assert "commit 1a2b3c4" in written
        assert "- [e](m/e/report.md): `python -m recipes.m.e --preset small`" in written
        card = pages[root / "recipes" / "m" / "README.md"]
        for text, link in (
            (written, "[e](m/e/report.md)"), (card, "[e](../../results/m/e/report.md)")
        ):  # fmt: skip
            assert f"| +2.0 [+2.0, +2.0] points, n = 3 | **supported** | {link} |" in text
            assert (
                "| Paper, Table 1: A beats B. | 2 points | needs a cluster |  |" in text
            )  # no run can tell

    def test_a_claim_may_be_measured_on_something_else(self, root):
        """Fits of random matrices are of no data set that the experiment trains on."""
        other = claim(A_B, measured_on="random matrices")
        sys.modules["recipes.m.e"].CLAIMS = [claim(A_B), other]
        self.results(root, a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        report = root / "results" / "m" / "e" / "report.md"
        report.write_text(f"{report.read_text()}\nMeasured on SST-2.\n")
        pages = ledger.pages(root)
        for page in ("README.md", "results/claims.md"):
            lines = [one for one in pages[root / page].splitlines() if "A beats B." in one]
            assert ["| SST-2 |" in one for one in lines] == [True, False]
            assert ["| random matrices |" in one for one in lines] == [False, True]
        assert "random matrices" not in pages[report]  # whose first lines say it

    def test_the_readme_has_the_judged_claims_and_counts_the_others(self, root):
        self.results(root, a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        text = ledger.pages(root)[root / "README.md"]
        assert text.startswith("before\n<!-- claims:all") and text.endswith("-->\nafter\n")
        link = "[e](results/m/e/report.md)"
        assert f"| +2.0 [+2.0, +2.0] points, n = 3 | **supported** | {link} |" in text
        assert "old" not in text
        assert "needs a cluster" not in text
        assert "| Paper | `recipes.m.e` | 1 | 0 | 0 | 1 |" in text

    def test_a_changed_number_changes_the_pages(self, root):
        self.results(root, a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        before = ledger.pages(root)
        self.results(root, a=[0.48, 0.49, 0.5], b=[0.5, 0.51, 0.52])
        after = ledger.pages(root)
        assert all(before[page] != after[page] for page in before)
        assert "**refuted**" in after[root / "README.md"]

    def test_the_ledger_says_how_much_was_computed(self, root):
        folder = root / "results" / "m"
        written = root / "results" / "claims.md"
        assert "hours" not in ledger.pages(root)[written]
        for run, seconds in (("e", [3000, 4000]), ("f", [7300, None])):
            (folder / run).mkdir(parents=True)
            with zipfile.ZipFile(folder / run / "records.zip", "w") as file:
                file.writestr("run.json", '{"seconds": 1e9}')
                for number, value in enumerate(seconds):
                    file.writestr(f"m-e/{number}/node.json", json.dumps({"seconds": value}))
        text = ledger.pages(root)[written]
        assert "of the 2 tables with a records.zip took 4 hours" in text
        assert "(README.md#what-was-not-run)" in text
        assert "\n## What was not run\n" in (ledger.ROOT / "results" / "README.md").read_text()

    def test_without_results_or_with_tiny_ones_nothing_is_judged(self, root):
        words = {one.word for one in ledger.judge_all(root)}
        self.results(root, preset="tiny", a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        assert words | {one.word for one in ledger.judge_all(root)} == {NOT_JUDGED}
        assert ledger.judge_all(root)[0].reason.startswith("compute: not run here; `python -m")

    @pytest.mark.parametrize(
        ("preset", "why"), [("small_steps", "compute: not run here"), ("paper", "data and compute")]
    )
    def test_a_claim_that_was_not_run_says_what_it_lacks(self, root, preset, why, monkeypatch):
        only = Claim("c", "Paper", "A beats B.", "Table 1", "2 points", A_B, preset=preset)
        monkeypatch.setattr(ledger, "claims", lambda _: [("m.e", only)])
        (verdict,) = ledger.judge_all(root)
        assert verdict.reason.startswith(why) and f"--preset {preset} --plan" in verdict.reason

    def test_a_table_without_the_rows_says_nothing_beside_one_that_has_them(self, root):
        self.results(root, a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        other = root / "results" / "m" / "e" / "other"
        write(other / "results.csv", table(a=[0.5, 0.6, 0.7]))
        words = [one.word for one in ledger.judge_all(root)]
        assert words.count("supported") == 1
        (root / "results" / "m" / "e" / "results.csv").unlink()
        reasons = [one.reason for one in ledger.judge_all(root)]
        assert reasons.count("compute: not run here: accuracy of b") == 1

    def test_a_run_s_own_report_ends_in_the_same_verdicts(self, root):
        rows = table(a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        text = "\n".join(ledger.verdicts_on(rows, "m.e", "small"))
        assert "| +2.0 [+2.0, +2.0] points, n = 3 | **supported** |\n" in text
        assert "needs a cluster" in text
        assert not ledger.verdicts_on(rows, "m.e", "tiny")
        assert not ledger.verdicts_on(rows, "m.elsewhere", "small")

    def test_a_report_s_verdicts_are_written_again_and_the_rest_stays(self, root):
        self.results(root, a=[0.52, 0.53, 0.54], b=[0.5, 0.51, 0.52])
        report = root / "results" / "m" / "e" / "report.md"
        first = ledger.pages(root)[report]
        assert first.startswith(report.read_text().rstrip()) and "**supported**" in first
        report.write_text(first)
        assert ledger.pages(root)[report] == first
        write(report.with_name("results.csv"), table(a=[0.48, 0.49, 0.5], b=[0.5, 0.51, 0.52]))
        second = first.replace("**supported**", "**refuted**").replace("+2.0", "-2.0")
        assert ledger.pages(root)[report] == second

    def test_a_page_that_asks_for_no_one_s_claims_is_refused(self, root):
        (root / "README.md").write_text("<!-- claims:nobody -->\n<!-- /claims -->\n")
        with pytest.raises(ValueError, match="no claims are named 'nobody'"):
            ledger.pages(root)


@pytest.mark.parametrize("mean_over", ["", "set"])
def test_a_seed_that_diverged_is_said_and_not_left_out(mean_over):
    rows = {"a": [0.9, 0.91, 0.92, math.nan], "b": [0.1, 0.11, 0.12, 0.13]}
    if mean_over:
        rows = {f"{task}_{row}": values for task in ("RTE", "MRPC") for row, values in rows.items()}
    test = Comparison("accuracy", "a", "b", mean_over=mean_over)
    verdict, measured, reason = judge(claim(test), table(**rows))
    assert (verdict, measured) == (NOT_JUDGED, "") and "a seed has diverged" in reason
    sound = Comparison("accuracy", "b", mean_over=mean_over)
    assert judge(claim([sound, test]), table(**rows)) == (verdict, measured, reason)


def test_this_repository_s_pages_agree_with_its_results():
    """`python -m recipes claims` has been run since results or claims were changed."""
    for page, text in ledger.pages().items():
        assert page.is_file() and page.read_text(encoding="utf-8") == text, (
            f"{page} differs from results/**/results.csv: run python -m recipes claims"
        )


def test_names_of_claims_are_unique():
    names = [(experiment, one.name) for experiment, one in ledger.claims()]
    assert len(names) == len(set(names))


def test_every_preset_that_the_ledger_names_is_one_of_the_experiment():
    for one in ledger.judge_all():
        experiment = importlib.import_module(f"recipes.{one.experiment}").EXPERIMENT
        known = cli.presets(experiment.folder / f"{experiment.config}.yaml")
        named = re.findall(r"--preset (\w+)", one.source + one.reason)
        assert {one.claim.preset or known[0], *named} <= set(known), (one.claim.name, one.reason)
