"""ALBEF's experiment at its tiny preset: what each stage saw, what came out, and its use."""

import json

import pandas as pd
import pytest
import torch
from PIL import Image

from datamodules.image_text_tasks import RELATIONS
from datamodules.shapes import write
from lightning_modules.albef import VQA, Grounding, Repair, Retrieval, build, skipped
from lightning_modules.albef.retrieval import recall
from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.pela import factorize, plan_of
from lightning_modules.pela.tome import add_tome
from recipes import predict
from recipes.albef import compression, measures, use
from recipes.cli import parse, presets
from recipes.experiment import Stage
from recipes.ledger import ROOT
from recipes.records import instance_of
from recipes.results import read
from recipes.runner import command_line
from tests.recipes.report_checks import check_reports_of_parts

PICTURES = {"train": 96, "val": 20, "test": 20, "size": 48}
ROWS = "scratch,lora,direct,maskalign,tome,pela"
FLAGS = [
    f"--data.generate={json.dumps(PICTURES)}",
    "--trainer.enable_progress_bar=false",
    "--pretrain.trainer.max_epochs=8",
    "--pretrain.trainer.check_val_every_n_epoch=8",
    "--repair.trainer.max_epochs=2",
    "--repair.trainer.check_val_every_n_epoch=2",
    *(
        f"--{task}.trainer.{name}=1"
        for task in ("retrieval", "entailment", "vqa", "grounding")
        for name in ("max_epochs", "check_val_every_n_epoch")
    ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return compression.main(["--out", str(out), "--rows", ROWS, *FLAGS])


@pytest.mark.parametrize("preset", ["tiny", "small", "paper"])
def test_where_pre_training_starts(preset):
    """The row `frozen` runs at every preset; at `small` pre-training goes on from it."""
    run = command_line(compression.EXPERIMENT, ["--preset", preset, "--rows", "frozen,dense"])
    compression.declare(run)
    stages = {node.name: node for node in run.nodes.values() if isinstance(node, Stage)}
    start = stages["pretrain"].varied.get("model.init_from")
    assert start is (stages["retrieval_frozen"] if preset == "small" else None)


@pytest.mark.parametrize("preset", ["small", "paper"])
def test_every_row_of_a_claim_is_run(preset):
    run = command_line(compression.EXPERIMENT, ["--preset", preset])
    named = {
        side.partition("_")[0]
        for claim in compression.CLAIMS
        for test in (claim.test, *claim.gate)
        for side in (test.a, test.b)
    }
    assert "frozen" in named and named <= set(run.grid("compression_grid")["rows"])


def test_every_part_has_its_scores(run):
    table = read(run.out)
    ranked, others = {"retrieval", compression.ZERO_SHOT}, {"entailment", "vqa", "grounding"}
    found = {"direct": ranked, "maskalign": ranked, "tome": {"retrieval"}, "pela": ranked | others}
    for row, sets in ((f"{name}_k3", of_row) for name, of_row in found.items()):
        scores = table[table.row == row]
        assert set(scores.set) == sets
        recalls = scores[(scores.set == "retrieval") & scores.metric.isin(compression.RECALLS)]
        assert len(recalls) == 6 and recalls.value.between(0, 1).all()
    table = table[~table.row.isin(["scratch", "lora", "tome_k3"])]  # which are dense
    sizes = table[table.metric == "parameters"].groupby("set").value.nunique()
    assert (sizes == 1).all()  # the others are as small as one another
    settings = parse(run.folder / "retrieval.yaml", "tiny").model.init_args.sizes
    expected = build("retrieval", **settings)
    factorize(expected, 3.0, skip=skipped(expected))
    found = table[(table.metric == "parameters") & (table.set == "retrieval")].value.iloc[0]
    assert found == count_parameters(expected)


def test_lora_costs_what_the_dense_model_costs_and_the_others_less(run):
    table = read(run.out)
    table = table[table.set == "retrieval"].set_index("row")
    parameters, macs = (table[table.metric == name].value for name in ("parameters", "macs"))
    assert parameters["lora"] == parameters["scratch"] == parameters["tome_k3"]
    assert macs["lora"] == macs["scratch"] > macs["tome_k3"] > macs["pela_k3"]
    assert macs["pela_k3"] == macs["direct_k3"]
    assert "| multiply-adds |" in (run.out / "report.md").read_text()


def test_a_pair_s_multiply_adds_are_those_of_all_its_layers():
    text = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    model = build(
        "retrieval", "vit_tiny_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 2}, 64,
        text, text_layers=2, fusion_layers=3, projection=12,
    )  # fmt: skip
    d, c, hidden, tokens, patches = 32, 48, 64, 7, 17  # 16 patches and the class token
    layer = tokens * (4 * d * d + 2 * d * hidden) + 2 * tokens * tokens * d
    crossing = 2 * tokens * d * d + 2 * patches * c * d + 2 * tokens * patches * d
    whole = count_macs(measures.Pair(model, tokens), (1, 3, 64, 64))
    assert whole - count_macs(model.visual_encoder, (1, 3, 64, 64)) == 5 * layer + 3 * crossing


def test_claims_on_tome_say_what_has_as_many_multiply_adds():
    sentences = [one.sentence for one in compression.CLAIMS if one.name.endswith("PELA > ToMe")]
    assert len(sentences) == 4
    assert all("as many multiply-adds in the image encoder" in one for one in sentences)


def test_chance_is_the_recall_of_random_scores(run):
    """Both directions; with several captions a picture has more than one right answer."""
    table = read(run.out)
    chance = table[(table.row == "chance") & (table.set == "retrieval")].set_index("metric").value
    entries = instance_of(run.parsed("retrieval").data.as_dict()).entries("test")
    pictures = torch.arange(len(entries))
    texts = pictures.repeat_interleave(torch.tensor([len(entry.captions) for entry in entries]))
    generator = torch.Generator().manual_seed(0)
    for way, queries, keys in (("t2i", texts, pictures), ("i2t", pictures, texts)):
        draws = [
            recall(torch.rand(len(queries), len(keys), generator=generator), queries, keys)
            for _ in range(400)
        ]
        for k, expected in zip((1, 5, 10), torch.tensor(draws).mean(0).tolist(), strict=True):
            assert chance[f"{way}_r{k}"] == pytest.approx(expected, abs=0.015)
    assert chance["r_mean"] == pytest.approx(chance.drop("r_mean").mean())
    assert "| chance |" in (run.out / "report.md").read_text()


def test_scratch_begins_with_the_encoders_own_weights():
    run = command_line(compression.EXPERIMENT, ["--preset", "small", "--rows", "scratch,dense"])
    compression.declare(run)
    stages = {node.name: node for node in run.nodes.values() if isinstance(node, Stage)}
    model = stages["retrieval_scratch"].parsed().model.init_args
    encoders = ("weights/dinov2-vit-s14-depth9", "weights/all-MiniLM-L6-v2")
    assert (model.init_from, model.vision_from, model.text_from) == (None, *encoders)
    assert model.tuning == stages["retrieval_dense"].parsed().model.init_args.tuning
    assert sum(name.startswith("retrieval_scratch trial") for name in stages) == 4


def test_tome_needs_no_more_multiply_adds_than_low_rank():
    run = command_line(compression.EXPERIMENT, ["--preset", "paper", "--rows", "tome"])
    compression.declare(run)
    stages = {node.name: node for node in run.nodes.values() if isinstance(node, Stage)}
    tuned = stages["retrieval_tome_k3"].parsed()
    model, side = tuned.model.init_args, tuned.data.init_args.image_size
    assert stages["retrieval_tome_k3"].varied["model.init_from"] is stages["pretrain"]
    with torch.device("meta"):
        low_rank, *dense = (build("retrieval", **(model.sizes or {})) for _ in range(3))
    factorize(low_rank, 3, skip=skipped(low_rank), method="empty")
    macs = [
        count_macs(add_tome(one.visual_encoder, r), (1, 3, side, side))
        for one, r in zip(dense, (model.merged_tokens, model.merged_tokens - 1), strict=True)
    ]
    assert macs[0] <= count_macs(low_rank.visual_encoder, (1, 3, side, side)) < macs[1]


def test_published_reports_come_out_again():
    run = command_line(compression.EXPERIMENT, ["--preset", "small"])
    published = ROOT / "results" / "albef" / "compression" / "small"
    text = "\n".join(compression.report(read(published), run))
    assert "| PELA, κ 1.5 |" in text and "| chance |" not in text


def test_what_each_stage_saw(run):
    batches = {"pretrain": 96 * 2 // 48, "repair_pela_k3": 4, "retrieval_pela_k3": 4}
    epochs = {"pretrain": 8, "repair_pela_k3": 2, "retrieval_pela_k3": 1}
    for name, count in batches.items():
        file = run.out / "seed0" / name / "checkpoints" / "last.ckpt"
        checkpoint = torch.load(file, weights_only=True)
        assert checkpoint["global_step"] == count * epochs[name]
        queue = {key for key in checkpoint["state_dict"] if key.startswith("queue.")}
        assert len(queue) == 4
    repaired = run.out / "seed0" / "repair_pela_k3" / "checkpoints" / "last.ckpt"
    module = Repair.load_from_checkpoint(repaired)
    assert plan_of(module.model) == module.settings.ranks
    assert "teacher" not in str(list(torch.load(repaired, weights_only=True)["state_dict"]))
    tuned = Retrieval.load_from_checkpoint(
        run.out / "seed0" / "retrieval_pela_k3" / "checkpoints" / "last.ckpt"
    )
    plan = {name.replace(".bert.", "."): rank for name, rank in plan_of(module.model).items()}
    assert plan_of(tuned.model) == plan


def test_the_report_has_tables_and_pictures(run):
    text = (run.out / "report.md").read_text()
    assert "A smoke test" in text and "| PELA, κ 3 |" in text
    for page in ("score_retrieval_pela_k3/retrieved.png", "score_grounding_pela_k3/heat.png"):
        assert f"(seed0/{page})" in text
        with Image.open(run.out / "seed0" / page) as picture:
            assert min(picture.size) > 300
    check_reports_of_parts(compression.EXPERIMENT, run)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    write(folder, train=5, val=1, test=1)
    return folder / "images"


def test_search_and_match_on_ones_own_pictures(run, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(use, "BATCH", 3)
    checkpoint = str(run.out / "seed0" / "retrieval_pela_k3" / "checkpoints" / "last.ckpt")
    use.main(
        ["search", str(pictures), "a red disc", "--ckpt_path", checkpoint, "--out", str(tmp_path)]
    )
    rows = pd.read_csv(tmp_path / "predictions.csv")
    assert len(rows) == 7 and rows.score.is_monotonic_decreasing
    assert set(rows.picture) == {str(file) for file in pictures.iterdir()}
    assert (tmp_path / "found.png").is_file()
    with pytest.raises(SystemExit):
        use.main(["search", str(pictures), "a", "red", "disc", "--ckpt_path", checkpoint])
    assert 'takes one text, not 3: put it in quotes, "a red disc"' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        use.main(["search", str(pictures), "x", "--ckpt_path", checkpoint, "--answers", "yes"])
    assert "--answers is for ask" in capsys.readouterr().err
    torn = tmp_path / "some"
    torn.mkdir()
    (torn / "torn.jpg").write_bytes(next(pictures.iterdir()).read_bytes()[:30])
    (torn / "fit.png").write_bytes(next(pictures.iterdir()).read_bytes())
    assert list(use.search(checkpoint, torn, "a disc").picture) == [str(torn / "fit.png")]
    sentences = ["a red disc above a blue square", "a white triangle", "two things"]
    found = use.match(checkpoint, rows.picture[0], sentences)
    assert sorted(found.sentence) == sorted(sentences) and found.score.is_monotonic_decreasing
    searcher = use.Searcher(checkpoint)
    files = use.pictures_in(pictures)
    together, apart = searcher(files, sentences), [searcher([f], sentences) for f in files]
    # similarity of a picture does not depend on the others; k of them are matched in both
    torch.testing.assert_close(together[:, 0], apart[0][:, 0], rtol=1e-3, atol=1e-3)


def test_a_sentence_of_a_file_is_a_line(tmp_path):
    """Lines end as in any text file, not at U+2028, which Unicode takes for a line's end too."""
    file = tmp_path / "sentences.txt"
    file.write_text("a red\u2028disc\n\na square\n", encoding="utf-8")
    assert use.sentences_of([str(file)]) == ["a red\u2028disc", "a square"]
    with pytest.raises(FileNotFoundError, match="typo.txt is not there"):
        use.sentences_of(["typo.txt"])
    assert use.sentences_of(["it reads notes.txt"]) == ["it reads notes.txt"]


def test_candidate_answers_are_stripped_and_none_is_empty(monkeypatch, tmp_path, capsys):
    asked: list = []
    rows = pd.DataFrame([{"answer": "yes", "probability": 1.0}])
    monkeypatch.setattr(use, "ask", lambda *given: asked.append(given[-1]) or rows)
    command = ["ask", "one.png", "is it", "--ckpt_path", "a.ckpt", "--out", str(tmp_path)]
    use.main([*command, "--answers", "yes, no"])
    use.main(command)
    assert asked == [["yes", "no"], None]
    with pytest.raises(SystemExit):
        use.main([*command, "--answers", "yes,"])
    assert "--answers yes,: an answer is empty" in capsys.readouterr().err


def test_a_question_on_a_picture(run, pictures, tmp_path):
    checkpoint = run.out / "seed0" / "vqa_pela_k3" / "checkpoints" / "last.ckpt"
    picture = next(pictures.iterdir())
    rows = use.ask(checkpoint, picture, "what color is the disc")
    module = VQA.load_from_checkpoint(checkpoint)
    assert len(rows) == len(
        torch.load(checkpoint, weights_only=True)["VQAData"]["description"]["answers"]
    )
    assert rows.probability.sum() == pytest.approx(1, abs=1e-4) and module.task == "vqa"
    few = use.ask(checkpoint, picture, "is there a disc", ["yes", "no"])
    assert sorted(few.answer) == ["no", "yes"]
    with pytest.raises(ValueError, match="is of VQA, expected one of Retrieval"):
        use.search(checkpoint, picture.parent, "a disc")
    with pytest.raises(ValueError, match="recipes.albef.use --help` says how"):
        predict.main([str(picture), "--ckpt_path", str(checkpoint)])
    with pytest.raises(FileNotFoundError, match="has no pictures"):
        use.pictures_in(tmp_path)


def test_sentences_on_a_picture_are_judged(run, pictures, tmp_path, capsys):
    checkpoint = run.out / "seed0" / "entailment_pela_k3" / "checkpoints" / "last.ckpt"
    picture, sentences = sorted(pictures.iterdir())[0], ["there is a red disc", "it is snowing"]
    rows = use.judge(checkpoint, picture, sentences)
    assert list(rows.sentence) == sentences  # in the given order
    for place, sentence in enumerate(sentences):
        [alone] = use.judge(checkpoint, picture, [sentence]).itertuples()
        assert alone.relation == rows.relation[place] in RELATIONS
        assert alone.probability == pytest.approx(rows.probability[place], abs=1e-4)
    assert (rows.probability > 1 / 3).all()
    command = ["judge", str(picture), *sentences, "--ckpt_path", str(checkpoint)]
    use.main([*command, "--out", str(tmp_path)])
    assert pd.read_csv(tmp_path / "predictions.csv").relation.tolist() == list(rows.relation)
    assert f"{rows.probability[0]:.3f}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"is of Entailment, expected one of Grounding: give a ch"):
        use.point(checkpoint, picture, "a disc", tmp_path / "heat.png")


def test_a_phrase_is_pointed_at(run, pictures, tmp_path, monkeypatch):
    checkpoint = run.out / "seed0" / "grounding_pela_k3" / "checkpoints" / "last.ckpt"
    picture = sorted(pictures.iterdir())[0]
    command = ["point", str(picture), "the red disc", "--ckpt_path", str(checkpoint)]
    opened, real = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *given: opened.append(given) or real(*given))
    use.main([*command, "--out", str(tmp_path)])
    assert len(opened) == 1
    [row] = pd.read_csv(tmp_path / "predictions.csv").itertuples()
    with Image.open(picture) as image, Image.open(tmp_path / "heat.png") as page:
        assert 0 <= row.x < image.width and 0 <= row.y < image.height
        assert min(page.size) > 300
    module, data, _ = use.load(checkpoint, Grounding)
    batch = {"images": data.picture(picture, training=False)[None], **data.tokens(["the red disc"])}
    heat = module.heat({key: value.to(module.device) for key, value in batch.items()})[0]
    # the hottest pixel is in the hottest patch, or in one beside it
    place = torch.tensor([row.y * heat.shape[0] / 48, row.x * heat.shape[1] / 48])
    hottest = torch.tensor(divmod(int(heat.argmax()), heat.shape[1])) + 0.5
    assert (place - hottest).abs().max() <= 1.5


def test_paper_presets_are_albefs_and_pelas():
    """ALBEF's configurations (pre-training, four tasks), and PELA's of the repair."""
    expected = {
        # epochs, pairs on a device, lr, decay, warm-up, pixels, smallest crop, tokens of a text,
        # whether the soft targets rise over the first epoch
        "pretrain": (30, 64, 1e-4, 0.02, 1000, 256, 0.2, 25, True),
        "repair": (20, 32, 1e-4, 0.02, 1000, 256, 0.2, 25, True),
        "retrieval": (10, 32, 1e-5, 0.02, 0, 384, 0.5, 30, True),
        "entailment": (5, 32, 2e-5, 0.02, 0, 384, 0.5, 30, False),
        "vqa": (8, 32, 2e-5, 0.02, 0, 384, 0.5, 25, True),
        "grounding": (5, 32, 1e-5, 0.02, 0, 384, 1.0, 30, True),
    }
    for name, values in expected.items():
        settings = parse(compression.EXPERIMENT.folder / f"{name}.yaml")
        model, data = settings.model.init_args, settings.data.init_args
        given = (model.lr, model.weight_decay, model.warmup_steps)
        rest = (data.image_size, data.min_crop, data.max_length, model.ramp)
        assert (settings.trainer.max_epochs, data.batch_size, *given, *rest) == values, name
        assert (model.decay, model.soft_targets) == (0.995, 0.4) and not model.sizes
        assert getattr(model, "queue_size", 65536) == 65536 and model.schedule == "cosine"
        assert getattr(model, "mask_probability", 0.15) == 0.15
        assert getattr(model, "k", 128) == 128  # pairs or answers that are scored completely
    repair = parse(compression.EXPERIMENT.folder / "repair.yaml").model.init_args
    losses = (repair.ratio, repair.fd_weight, repair.rwp_weight, repair.epsilon, repair.p)
    assert losses == (3.0, 0.1, 1.0, 1e-3, float("inf"))
    assert (repair.setting, repair.distillation) == ("released", "pela")
    assert parse(compression.EXPERIMENT.folder / "grounding.yaml").model.init_args.block == 8


def test_lora_has_a_learning_rate_of_its_own():
    """papers/pela.md: LoRA at the rate of full fine-tuning is no baseline. It gives no number."""
    run = command_line(compression.EXPERIMENT, ["--preset", "paper", "--rows", "dense,lora"])
    compression.EXPERIMENT.declare(run)
    rates = {
        node.name: node.parsed().model.init_args.lr
        for node in run.nodes.values()
        if isinstance(node, Stage)
    }
    full = {"retrieval": 1e-5, "entailment": 2e-5, "vqa": 2e-5, "grounding": 1e-5}
    for task, rate in full.items():
        assert rates[f"{task}_dense"] == rate < rates[f"{task}_lora"]


def test_tiny_and_small_change_values_only():
    for file in compression.EXPERIMENT.folder.glob("*.yaml"):
        if file.name != "compression_grid.yaml":
            assert presets(file)[0] == "tiny"
            paper, tiny = parse(file), parse(file, "tiny")
            assert paper.model.class_path == tiny.model.class_path
