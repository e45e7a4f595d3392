"""Sizes of PELA's models: exact counts, and the claims that need nothing else."""

import pytest
import torch

from lightning_modules.counting import count_macs
from lightning_modules.pela.downstream.mask_rcnn import TopDown
from lightning_modules.pela.downstream.pyramid import Pyramid, build_backbone
from recipes import cli
from recipes.claims import judge
from recipes.ledger import ROOT
from recipes.pela import sizes
from recipes.results import read, select
from tests.recipes.report_checks import check_reports_of_parts

PARAMETERS = {  # dense and low-rank, as papers/pela.md of the specification lists them
    "deit_b": (86_567_656, 44_081_896),
    "deit3_l": (304_374_760, 153_232_360),
    "swin_b": (87_768_224, 62_164_128),
    "albef": (209_968_247, 87_137_399),
}
GIGA = {  # multiply-adds, in 10⁹
    "deit_b": (17.564, 9.194),
    "deit3_l": (61.555, 31.780),
    "swin_b": (15.431, 10.904),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return sizes.main(["--preset", "paper", "--out", str(out)])


def value(table, name, row, metric):
    return select(table, {"set": name, "row": row, "metric": metric})["value"].item()


def test_the_papers_models_have_the_known_sizes(run):
    table = read(run.out)
    for name, expected in PARAMETERS.items():
        rows = ("dense", "low_rank")
        assert tuple(value(table, name, row, "parameters") for row in rows) == expected
    for name, expected in GIGA.items():
        counted = (value(table, name, row, "macs") / 1e9 for row in ("dense", "low_rank"))
        assert tuple(round(one, 3) for one in counted) == expected
    for name in sizes.MODELS:
        for metric in ("parameters", "macs"):
            dense, small = (value(table, name, row, metric) for row in ("dense", "low_rank"))
            saved = value(table, name, "low_rank", f"saved {metric}")
            assert saved == pytest.approx(1 - small / dense) and 0.19 < saved < 0.7
    assert "| ALBEF, one image and one text |" in (run.out / "report.md").read_text()
    check_reports_of_parts(sizes.EXPERIMENT, run)


def test_mask_rcnn_s_heads_are_counted_on_the_regions_that_they_get(run):
    """The difference to backbone and feature pyramid, which low rank does not change, by hand."""
    config = cli.parse(sizes.CONFIGS / sizes.MODELS["detection"])
    side, model = config.data.init_args.image_size, config.model.init_args
    for row, ratio in (("dense", None), ("low_rank", model.ratio)):
        with torch.device("meta"):
            backbone, _ = build_backbone(
                model.architecture, model.model_args, ratio=ratio, skip=model.skip
            )
            pyramid = count_macs(TopDown(Pyramid(backbone)), (1, 3, side, side))
        cells = 280**2 + 140**2 + 70**2 + 35**2 + 18**2  # at strides 4, 8, 16, 32 and 64 of 1,120
        proposals = cells * (9 * 256 * 256 + 256 * (3 + 12))
        boxes = 1000 * (7 * 7 * 256 * 1024 + 1024 * 1024 + 1024 * (81 + 4 * 81))
        upsampled = 4 * 14**2 * 256 * 256 + 28**2 * 256 * 81
        masks = 100 * (4 * 14**2 * 9 * 256 * 256 + upsampled)
        counted = value(read(run.out), "detection", row, "macs")
        assert counted == pyramid + proposals + boxes + masks


def test_claims_on_sizes_are_judged_by_the_share_that_is_saved(run):
    """A third of the linear layers is more than a third of ALBEF: its embeddings stay."""
    table = read(run.out)
    words = {claim.name: judge(claim, table)[0] for claim in sizes.CLAIMS}
    assert words == {
        "Swin-Base, multiply-adds": "supported",
        "detection, multiply-adds": "supported",
        "ALBEF, parameters": "refuted",
        "ALBEF, multiply-adds": "refuted",
    }
    table.loc[table["metric"] == "saved parameters", "value"] = 2 / 3 - 0.009
    table.loc[table["metric"] == "saved macs", "value"] = 0.16
    words = {claim.name: judge(claim, table)[0] for claim in sizes.CLAIMS}
    assert words.pop("ALBEF, parameters") == "supported" and set(words.values()) == {"refuted"}


def test_the_published_table_is_what_the_code_counts(run):
    published = read(ROOT / "results" / "pela" / "sizes" / "paper")
    assert published.drop(columns="seed").equals(read(run.out).drop(columns="seed"))
