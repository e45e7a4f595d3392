"""The tidy table: files, tables, paired comparisons, plots."""

import math
import os
import subprocess
import sys

import matplotlib.image
import pandas as pd
import pytest
from scipy import stats

from recipes.plots import COLORS, GRAYS, curves, groups, ranking, scatter
from recipes.results import (
    COLUMNS,
    Row,
    by_seed,
    difference,
    read,
    tidy,
    write,
    write_report,
)
from recipes.tables import COLLAPSED, Column, Table, summary, tabulate

SCORES = {  # row → set → by seed
    "lora": {"RTE": [0.5, 0.6, 0.7], "MRPC": [0.8, 0.8, 0.8]},
    "vera": {"RTE": [0.6, 0.8, 0.8], "MRPC": [0.7, 0.9]},  # MRPC of seed 2 is not there yet
}


def example(preset: str = "small") -> pd.DataFrame:
    parts = [
        tidy([Row(row, "score", value, set=name)], "vera.glue", preset, seed, f"{name}_{row}")
        for row, sets in SCORES.items()
        for name, values in sets.items()
        for seed, value in enumerate(values)
    ]
    tuned = [Row("lora", "tuned", 73728, "RTE"), Row("vera", "tuned", 7680, "RTE")]
    parts += [tidy(tuned, "vera.glue", preset, seed) for seed in range(3)]
    return pd.concat(parts, ignore_index=True)


class TestFile:
    def test_floats_return_exactly_and_texts_stay_texts(self, tmp_path):
        values = [0.1 + 0.2, 1 / 3, 1e-300, math.pi * 1e17, -0.0, math.inf]
        rows = [
            Row("NA", f"m{i}", value, "", x=value or None) for i, value in enumerate(values)
        ] + [Row("007", "loss", math.nan)]
        write(tmp_path / "results.csv", tidy(rows, "a.b", "tiny", 3, "null"))
        table = read(tmp_path)
        assert list(table.columns) == COLUMNS
        assert table["value"].tolist()[:-1] == values
        assert math.isnan(table["value"].iloc[-1])
        assert list(table["row"]) == ["NA"] * 6 + ["007"]
        assert set(table["stage"]) == {"null"} and set(table["set"]) == {""}
        assert table["seed"].tolist() == [3] * 7
        before = (tmp_path / "results.csv").read_bytes()
        write(tmp_path / "results.csv", table)
        assert (tmp_path / "results.csv").read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["results.csv"]

    def test_seeds_stand_in_order_whatever_finished_first(self, tmp_path):
        one, two = (tidy([Row("b", "m", 1), Row("a", "m", 2)], "e", "p", s) for s in (1, 0))
        write(tmp_path / "x.csv", pd.concat([one, two]))
        write(tmp_path / "y.csv", pd.concat([two, one]))
        assert (tmp_path / "x.csv").read_bytes() == (tmp_path / "y.csv").read_bytes()
        table = read(tmp_path / "x.csv")
        assert table["seed"].tolist() == [0, 0, 1, 1] and table["row"].tolist() == list("baba")

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        write(tmp_path / "results.csv", example())
        before = (tmp_path / "results.csv").read_bytes()

        def full(*_, **__):
            raise OSError("No space left on device")

        monkeypatch.setattr(pd.DataFrame, "to_csv", full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path / "results.csv", example("tiny"))
        assert (tmp_path / "results.csv").read_bytes() == before

    def test_a_report_is_utf_8_in_any_locale(self, tmp_path):
        """The ledger reads it as UTF-8."""
        code = "import sys; from pathlib import Path; from recipes.results import write_report; "
        code += r"write_report(Path(sys.argv[1]), ['\u03ba \u2264 2', '', 'so'])"
        ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0"}
        command = [sys.executable, "-c", code, str(tmp_path / "new")]
        subprocess.run(command, env={**os.environ, **ascii_locale}, check=True)
        [report] = (tmp_path / "new").iterdir()  # and no half-written file beside it
        assert report.read_text(encoding="utf-8") == "κ ≤ 2\n\nso\n"

    def test_one_number_has_one_line(self, tmp_path):
        with pytest.raises(ValueError, match=r"same number.*'row': 'lora'.*expected one"):
            write(tmp_path / "results.csv", pd.concat([example(), example()]))

    def test_a_foreign_or_missing_file_is_said(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"results\.csv is missing"):
            read(tmp_path)
        (tmp_path / "results.csv").write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match=r"has the columns \['a', 'b'\], expected"):
            read(tmp_path)


class TestBySeed:
    def test_mean_over_sets_leaves_out_seeds_that_lack_one(self):
        assert by_seed(example(), "score", {"row": "lora"}, "set").tolist() == pytest.approx(
            [0.65, 0.7, 0.75]
        )
        vera = by_seed(example(), "score", {"row": "vera"}, "set")
        assert vera.index.tolist() == [0, 1] and vera.tolist() == pytest.approx([0.65, 0.85])

    def test_a_row_without_a_set_that_others_have_has_no_mean(self):
        table = example()
        table = table[~((table.row == "vera") & (table.set == "MRPC"))]
        assert by_seed(table, "score", {"row": "vera"}, "set").empty

    def test_several_values_of_a_seed_are_never_mixed_in_silence(self):
        with pytest.raises(ValueError, match=r"'score' of .*several values of seed 0.*differ in"):
            by_seed(example(), "score", {"row": "lora"})

    def test_points_of_a_curve_are_asked_for(self):
        rows = [Row("a", "loss", 3.0, x=1), Row("a", "loss", 2.0, x=2), Row("a", "loss", 9.0)]
        table = tidy(rows, "e", "p", 0)
        assert by_seed(table, "loss").tolist() == [9.0]
        assert by_seed(table, "loss", {"x": 2}).tolist() == [2.0]

    def test_an_unknown_column_is_named(self):
        with pytest.raises(ValueError, match="no column 'task'"):
            by_seed(example(), "score", {"task": "RTE"})


class TestDifference:
    def test_is_the_t_interval_of_the_paired_test(self):
        a = pd.Series([0.61, 0.72, 0.58, 0.66, 0.7])
        b = pd.Series([0.6, 0.65, 0.59, 0.6, 0.66])
        expected = stats.ttest_rel(a, b).confidence_interval(0.95)
        found = difference(a, b)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
        assert found.mean == pytest.approx(0.034) and found.n == 5
        assert found.sd == pytest.approx((a - b).std())

    def test_worked_by_hand(self):
        found = difference(pd.Series([1.0, 3.0]), 0.0)
        half = 12.7062047 * math.sqrt(2) / math.sqrt(2)  # t of .975 with 1 degree · sd / √n
        assert (found.mean, found.low, found.high) == pytest.approx((2, 2 - half, 2 + half))

    def test_takes_the_seeds_that_both_have(self):
        found = difference(pd.Series({0: 1.0, 2: 5.0}), pd.Series({1: 1.0, 2: 2.0}))
        assert (found.mean, found.n) == (3.0, 1) and math.isnan(found.low)
        assert difference(pd.Series({0: 1.0}), pd.Series({1: 1.0})).n == 0

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_diverged_seed_is_not_left_out(self, value):
        found = difference(pd.Series([1.0, 1.1, value]), pd.Series([2.0, 2.1, 2.2]))
        assert found.diverged and found.n == 3 and found.text() == "diverged"
        assert not difference(pd.Series([1.0, 1.1]), pd.Series([2.0, 2.1])).diverged


ROWS = {"vera": "VeRA", "lora": "LoRA", "full": "full"}
RTE = {"scale": 100, "where": {"set": "RTE"}}


class TestTable:
    def test_cells_spreads_and_seeds(self):
        columns = [
            Column("tuned", "tuned", {"set": "RTE"}, digits=0, spread=""),
            Column("mean", "score", **RTE),
            Column("median", "score", spread="range", **RTE),
            Column("MRPC", "score", {"set": "MRPC"}, digits=2),
        ]
        table = tabulate(example(), ROWS, columns, heading="method")
        assert table.header == ["method", "tuned", "mean", "median", "MRPC"]
        assert table.rows == [
            ["VeRA", "7,680", "73.3 ± 11.5", "80.0 (60.0–80.0)", "0.80 ± 0.14 (n = 2)"],
            ["LoRA", "73,728", "60.0 ± 10.0", "60.0 (50.0–70.0)", "0.80 ± 0.00"],
        ]
        assert table.notes == ["n = 3 seeds each."]
        lines = table.markdown().splitlines()
        assert lines[0] == "| method | tuned | mean | median | MRPC |"
        assert lines[1] == "| --- | ---: | ---: | ---: | ---: |"

    def test_a_column_of_differences(self):
        column = Column("− LoRA", "score", mean_over="set", scale=100, reference="lora")
        table = tabulate(example(), ROWS, [column])
        found = difference(pd.Series([0.65, 0.85]), pd.Series([0.65, 0.7]))
        assert table.rows[0] == ["VeRA", f"{found.text(100)} (n = 2)"]
        assert table.rows[0][1].startswith("+7.5 [-") and table.rows[1] == ["LoRA", ""]
        assert "95 % interval" in table.notes[0]

    def test_differences_in_a_table_of_sets(self):
        column = Column("VeRA − LoRA", "score", {"row": "vera"}, reference={"row": "lora"})
        table = tabulate(example(), ["RTE", "MRPC"], [column], index="set")
        found = difference(pd.Series([0.6, 0.8, 0.8]), pd.Series([0.5, 0.6, 0.7]))
        assert table.rows[0] == ["RTE", found.text()] and found.text().startswith("+0.1 [")
        assert table.rows[1][0] == "MRPC"

    def test_a_column_without_numbers_is_left_out(self):
        columns = [Column(metric, metric, {"set": "RTE"}) for metric in ("seconds", "score")]
        table = tabulate(example(), ROWS, columns)
        assert table.header == ["", "score"] and {len(row) for row in table.rows} == {2}

    def test_none_is_no_number(self):
        rows = [Row("vera", "seconds", None), Row("vera", "score", 0.0)]
        assert list(tidy(rows, "e", "p", 0)["metric"]) == ["score"]

    def test_a_collapsed_classifier_is_flagged_in_its_own_set_only(self):
        answers = [
            Row("vera", "classes_predicted", 1, "RTE"),
            Row("lora", "classes_predicted", 2, "RTE"),
        ]
        table = pd.concat([example(), tidy(answers, "vera.glue", "small", 1)])
        columns = [Column(s, "score", {"set": s}, scale=100) for s in ("RTE", "MRPC")]
        written = tabulate(table, ROWS, columns)
        assert written.rows[0][1].endswith("†") and "†" not in written.rows[0][2]
        assert "†" not in "".join(written.rows[1])
        assert "collapsed" in written.notes[-1]

    def test_a_curve_as_a_table(self):
        rows = [
            Row(row, "accuracy", value, x=ratio)
            for ratio, values in {10.0: (0.2, 0.4), 1.5: (0.5, 0.6)}.items()
            for row, value in zip(("direct", "both"), values, strict=True)
        ]
        columns = [
            Column(name, "accuracy", {"row": name}, scale=100) for name in ("direct", "both")
        ]
        table = tabulate(tidy(rows, "e", "p", 0), None, columns, index="x", heading="κ")
        assert table.rows == [["1.5", "50.0", "60.0"], ["10", "20.0", "40.0"]]

    def test_the_terminal_shows_it(self, capsys):
        tabulate(example(), ROWS, [Column("RTE", "score", **RTE)]).show("GLUE")
        assert "GLUE" in (shown := capsys.readouterr().out) and "60.0 ± 10.0" in shown

    def test_summary_of_one_seed_is_its_value(self):
        assert summary([0.7131], 100) == "71.3" and summary([]) == ""
        assert summary([1, 2, 6], spread="range", digits=0) == "2 (1–6)"


class TestPlots:
    def test_scatter_has_a_panel_for_each_set_and_cost(self, tmp_path):
        table = example()
        tuned = tidy(
            [Row("lora", "tuned", 9, "MRPC"), Row("vera", "tuned", 3, "MRPC")], "e", "p", 0
        )
        table = pd.concat([table, tuned])
        one, two = tmp_path / "one.png", tmp_path / "two.png"
        costs = {"tuned": "tuned parameters"}
        scatter(table, one, "score", costs, where={"set": "RTE"}, baselines=["lora"])
        scatter(table, two, "score", costs, panel="set", log=True, joined=["vera"])
        widths = [matplotlib.image.imread(file).shape[1] for file in (one, two)]
        assert widths[1] > 1.4 * widths[0]

    def test_what_is_drawn(self, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(
            "recipes.plots.save_plot", lambda figure, path, note: drawn.append(figure)
        )
        rows = {0: {1: 2.0, 2: 4.0}, 1: {1: 4.0, 2: 4.0}}
        table = pd.concat(
            [
                *(
                    tidy([Row("a", "loss", y, x=x) for x, y in points.items()], "e", "p", seed)
                    for seed, points in rows.items()
                ),
                tidy([Row("chance", "loss", 5.0)], "e", "p", 0),
            ]
        )
        curves(
            table, tmp_path / "a.png", "loss", baselines=["chance"], scale=10, ylabel="loss × 10"
        )
        axis = drawn[0].axes[0]
        line, dotted = axis.lines
        assert line.get_xdata().tolist() == [1, 2] and line.get_ydata().tolist() == [30, 40]
        assert set(dotted.get_ydata()) == {50} and axis.get_ylabel() == "loss × 10"
        band = axis.collections[0].get_paths()[0].vertices[:, 1]
        assert (band.min(), band.max()) == pytest.approx((30 - 200**0.5, 30 + 200**0.5))

    def test_a_note_says_how_many_seeds_and_what_the_bars_are(self, tmp_path, monkeypatch):
        notes = []
        monkeypatch.setattr(
            "recipes.plots.save_plot", lambda figure, path, note: notes.append(note)
        )
        rows = [Row("a", "score", 1.0), Row("a", "tuned", 1.0), Row("a", "loss", 1.0, x=1)]
        once = tidy(rows, "e", "p", 0)
        twice = pd.concat([once, tidy(rows, "e", "p", 1), tidy([Row("b", "f1", 1)], "e", "p", 2)])
        for table in (once, twice):
            scatter(table, tmp_path / "a.png", "score", {"tuned": "tuned"})
            curves(table, tmp_path / "a.png", "loss")
            ranking(table, tmp_path / "a.png", "score", {"a": "A"}, costs={})
        assert notes[:3] == ["one seed"] * 3
        assert notes[3:] == [
            "means of 2 seeds; bars: ± one standard deviation",
            "means of 2 seeds; bands: ± one standard deviation",
            "means of 2 seeds; dots: seeds; bars: ± one standard deviation",
        ]

    def test_groups_have_their_series_side_by_side(self, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(
            "recipes.plots.save_plot", lambda figure, path, note: drawn.append(figure)
        )
        rows = [
            Row("a", "score", 1.0, "one", x=0), Row("a", "score", 5.0, "one", x=1),
            Row("b", "score", 2.0, "one", x=1), Row("a", "score", 4.0, "two", x=0),
        ]  # fmt: skip
        other = Row("a", "score", 3.0, "one", x=0)
        table = pd.concat([tidy(rows, "e", "p", 0), tidy([other], "e", "p", 1)])
        groups(table, tmp_path / "a.png", "score", ["small", "large"], panel="set", scale=10)
        one, two = drawn[0].axes
        assert [axis.get_title() for axis in (one, two)] == ["one", "two"]
        assert [label.get_text() for label in one.get_xticklabels()] == ["small", "large"]
        dots = [line for line in one.lines if line.get_alpha()]
        assert sorted(dots[0].get_ydata()) == [10, 30, 50] and list(dots[1].get_ydata()) == [20]
        # the two of a group beside each other
        assert sorted(dots[0].get_xdata()) == pytest.approx([-0.275, -0.125, 0.8])
        assert list(dots[1].get_xdata()) == [1.2]
        bar, none = one.collections[0].get_segments()  # of a: group by group
        assert bar[:, 1].tolist() == pytest.approx([20 - 200**0.5, 20 + 200**0.5])
        assert none[:, 1].tolist() == [50, 50]  # one value has no deviation
        assert one.get_xlim() == two.get_xlim() == (-0.5, 1.5)
        # the panel with the legend lacks b
        assert [text.get_text() for text in two.get_legend().get_texts()] == ["a", "b"]

    def test_a_median_with_its_range(self, tmp_path, monkeypatch):
        """One seed far off moves a mean, and a deviation reaches where no seed was."""
        drawn, notes = [], []
        monkeypatch.setattr(
            "recipes.plots.save_plot",
            lambda figure, path, note: (drawn.append(figure), notes.append(note)),
        )
        table = pd.concat(
            tidy(
                [
                    Row("a", "score", y), Row("a", "tuned", 7.0), Row("a", "loss", y, x=1),
                    Row("b", "score", y),
                ],
                "e", "p", seed,
            )
            for seed, y in enumerate((1.0, 4.0, 40.0))
        )  # fmt: skip
        path = tmp_path / "a.png"
        scatter(table, path, "score", {"tuned": "tuned"}, baselines=["b"], spread="range")
        curves(table, path, "loss", spread="range")
        points, bands = (figure.axes[0] for figure in drawn)
        (bar,) = points.collections[0].get_segments()
        assert bar[:, 1].tolist() == [1, 40]
        assert {tuple(line.get_ydata()) for line in points.lines} >= {(4,), (4, 4)}
        assert bands.lines[0].get_ydata().tolist() == [4]
        assert notes == [
            "medians of 3 seeds; bars: from the lowest to the highest",
            "medians of 3 seeds; bands: from the lowest to the highest",
        ]

    def test_collapsed_runs_and_shut_gates_are_shown_in_groups(self, tmp_path, monkeypatch):
        drawn, notes = [], []
        monkeypatch.setattr(
            "recipes.plots.save_plot",
            lambda figure, path, note: (drawn.append(figure), notes.append(note)),
        )
        rows = [
            Row("a", "score", 1.0, "one", x=0), Row("a", COLLAPSED, 2, "one", x=0),
            Row("a", "score", 5.0, "one", x=1), Row("a", COLLAPSED, 1, "one", x=1),
            Row("a", "score", 2.0, "two", x=1),
        ]  # fmt: skip
        groups(
            tidy(rows, "e", "p", 0), tmp_path / "a.png", "score", ["small", "large"], panel="set",
            dot="one draw", remarks={"two": "gate shut"},
        )  # fmt: skip
        one, two = drawn[0].axes
        crosses = [line for line in one.lines if line.get_marker() == "x"]
        assert [line.get_ydata().tolist() for line in crosses] == [[5.0]]
        assert not [line for line in two.lines if line.get_marker() == "x"]
        assert (one.get_xlabel(), two.get_xlabel()) == ("", "gate shut")
        assert notes == ["1 seed; a dot: one draw; bars: mean of the dots ± one standard deviation"]

    def test_runs_of_one_score_lie_side_by_side_in_groups(self, tmp_path, monkeypatch):
        """Four trainings that had collapsed to one class were one cross."""
        drawn = []
        monkeypatch.setattr("recipes.plots.save_plot", lambda figure, *_: drawn.append(figure))
        rows = [
            *(Row(row, "score", 5.0, x=1) for row in "ab"),
            *(Row(row, COLLAPSED, 1, x=1) for row in "ab"),
        ]
        table = pd.concat(tidy(rows, "e", "p", seed) for seed in range(4))
        groups(table, tmp_path / "a.png", "score", ["small", "large"])
        lines = drawn[0].axes[0].lines
        crosses, dots = (
            [line.get_xdata().tolist() for line in lines if line.get_marker() == mark]
            for mark in "xo"
        )
        for own, its_dots, bar in zip(crosses, dots, (0.8, 1.2), strict=True):
            assert own == its_dots and len(set(own)) == 4
            assert sum(own) / 4 == pytest.approx(bar) and max(own) - min(own) < 0.4

    def test_baselines_are_grey_and_the_rest_has_strong_colours(self, tmp_path, monkeypatch):
        """Titles of rows that no run had used to take the strong colours."""
        drawn = []
        monkeypatch.setattr(
            "recipes.plots.save_plot", lambda figure, path, note: drawn.append(figure)
        )
        titles = {**{f"absent {n}": "" for n in range(10)}, "chance": "chance", "a": "A"}
        rows = [Row("chance", "loss", 1.0), *(Row("a", "loss", 2.0, x=x) for x in (1, 2))]
        curves(tidy(rows, "e", "p", 0), tmp_path / "a.png", "loss",
               titles=titles, baselines=["chance"])  # fmt: skip
        colors = {line.get_label(): line.get_color() for line in drawn[0].axes[0].lines}
        assert colors == {"chance": GRAYS[0], "A": COLORS[0]}

    def test_a_series_has_one_colour_in_all_panels(self, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr("recipes.plots.save_plot", lambda figure, *_: drawn.append(figure))
        rows = [
            *(Row(row, "loss", 1.0, panel, x=1) for row, panel in
              (("lora", "one"), ("vera", "one"), ("vera", "two"))),
            Row("lora, full", "loss", 4.0, "one"),
        ]  # fmt: skip
        curves(
            tidy(rows, "e", "p", 0), tmp_path / "a.png", "loss", panel="set",
            baselines=["lora, full"],
        )  # fmt: skip
        one, two = (
            {line.get_label(): line.get_color() for line in axis.lines} for axis in drawn[0].axes
        )
        assert one == {"lora": COLORS[0], "vera": COLORS[1], "lora, full": COLORS[0]}
        assert two == {"vera": COLORS[1]}

    def test_a_mark_is_a_vertical_line_in_the_colour_of_its_series(self, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(
            "recipes.plots.save_plot", lambda figure, path, note: drawn.append(figure)
        )
        rows = [Row("a", "loss", x, x=x) for x in (1, 2, 4)]
        tables = [
            tidy([*rows, Row("a", "knee", knee)], "e", "p", seed)
            for seed, knee in enumerate((1, 2, 4))
        ]
        marks = {"knee": "the knee", "absent": "not there"}
        curves(pd.concat(tables), tmp_path / "a.png", "loss", marks=marks)
        curve, mark = drawn[0].axes[0].lines
        assert set(mark.get_xdata()) == {2} and mark.get_label() == "a: the knee"
        assert mark.get_color() == curve.get_color()

    def test_twelve_series_have_twelve_colours(self, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(
            "recipes.plots.save_plot", lambda figure, path, note: drawn.append(figure)
        )
        rows = [Row(f"row {n}", "loss", n, x=x) for n in range(12) for x in (1, 2)]
        curves(tidy(rows, "e", "p", 0), tmp_path / "a.png", "loss")
        assert len({str(line.get_color()) for line in drawn[0].axes[0].lines}) == 12

    def test_a_ranking_has_the_best_on_top_with_its_costs(self, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(
            "recipes.plots.save_plot", lambda figure, path, note: drawn.append(figure)
        )
        costs = {"tuned": "tuned parameters"}
        for titles in ({"head": "head only", "lora": "LoRA", "vera": "VeRA"}, {"absent": "none"}):
            table = pd.concat(
                tidy(
                    [
                        Row("vera", "score", 0.7 + seed / 10), Row("lora", "score", 0.6),
                        Row("vera", "tuned", 2500), Row("head", "score", 0.5),
                    ],
                    "e", "p", seed,
                )
                for seed in range(2)
            )  # fmt: skip
            path = tmp_path / "a.png"
            ranking(table, path, "score", titles, costs=costs, baselines=["head"], scale=100)
        full, empty = (figure.axes[0] for figure in drawn)
        labels = [label.get_text() for label in full.get_yticklabels()]
        assert labels == ["LoRA", "VeRA · 2.5 k tuned parameters"]
        dots = [line for line in full.lines if line.get_marker() == "o"]
        assert dots[1].get_xdata().tolist() == [70, 80] and set(dots[1].get_ydata()) == {1}
        (dotted,) = (line for line in full.lines if line.get_label() == "head only")
        assert set(dotted.get_xdata()) == {50}
        assert [text.get_text() for text in empty.texts] == ["not measured"]

    def test_a_metric_that_is_not_there_is_said_to_be_missing(self, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(
            "recipes.plots.save_plot", lambda figure, path, note: drawn.append(figure)
        )
        curves(example(), tmp_path / "a.png", "f1")
        scatter(example(), tmp_path / "a.png", "score", {"tuned": "tuned"})
        texts = [[text.get_text() for text in figure.axes[0].texts] for figure in drawn]
        assert texts == [["not measured"], []]


def test_a_report_is_written_and_announced(tmp_path, capsys):
    path = write_report(tmp_path / "new", ["# Title", "", "Text"])
    assert path.read_text() == "# Title\n\nText\n"
    assert str(path) in capsys.readouterr().out


def test_a_printed_table_shows_square_brackets(capsys):
    Table(["text"], [["a [/quote] and [b]"]]).show("of [draft]")
    said = capsys.readouterr().out
    assert "a [/quote] and [b]" in said and "of [draft]" in said
