"""The experiments on language models, from the command line to the report, on generated text."""

import importlib
import json
from types import SimpleNamespace

import lightning as L
import pandas as pd
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from datamodules import InstructionData
from datamodules.instructions import (
    fill_template,
    follow_up,
    read_instructions,
    read_questions,
    write_instructions,
    write_questions,
)
from lightning_modules import backbones
from lightning_modules.generation_metrics import score
from lightning_modules.vera import LanguageTuning
from recipes import cli
from recipes.experiment import Measuring, Stage
from recipes.results import by_seed
from recipes.runner import command_line
from recipes.vera import e2e, instruct
from tests.recipes.report_checks import check_reports_of_parts
from tests.recipes.stage_runs import RECIPES

SIZES = {  # of two layers of width 32: what each method trains
    "e2e": {"vera": 2 * 2 * (32 + 16), "lora": 2 * 4 * (32 + 96)},
    "instruct": {
        "vera": 2 * (96 + 32 + 128 + 32 + 4 * 16),
        "lora": 2 * 4 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32),
    },
}
FEWER = {
    "e2e": ["--trainer.max_epochs=1", "--data.limit=48", "--data.eval_limit=5"],
    "instruct": [],
}
SETS = {"e2e": "E2E", "instruct": "Alpaca"}


def module_of(name):
    return importlib.import_module(f"recipes.vera.{name}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Each experiment run once at `tiny`: its command line, its Run and its table."""
    runs = {}

    def run(name):
        if name not in runs:
            command = ["--out", str(tmp_path_factory.mktemp(name)), *FEWER[name]]
            done = module_of(name).main(command)
            file = done.out / "results.csv"
            table = pd.read_csv(file, keep_default_na=False, na_values={"x": [""]})
            runs[name] = command, done, table
        return runs[name]

    return run


@pytest.mark.parametrize("name", FEWER)
def test_tiny_preset(name, finished):
    _, done, table = finished(name)

    def value(metric, row):
        return by_seed(table, metric, {"row": row, "set": SETS[name]})[0]

    for method, size in SIZES[name].items():
        assert value("trained", method) == size and 0 < value("loss", method) < 10
    # what each stage saw: 48 examples in batches of 16; 230 in batches of 4
    seen = {"e2e": (48, 3), "instruct": (230, 57)}[name]
    for method in SIZES[name]:
        assert (value("examples", method), value("updates", method)) == seen
    if name == "instruct":  # a tenth of 256
        assert value("scored", "vera") == value("scored", "start") == 26
    else:
        assert value("inputs", "vera") == 5
    text = (done.out / "report.md").read_text()
    assert f"| {SIZES[name]['vera']:,} |" in text and "the start" in text
    check_reports_of_parts(module_of(name).EXPERIMENT, done)


def test_instructions_that_are_all_trained_on_leave_nothing_to_score(tmp_path):
    flags = ["--preset", "tiny", "--out", str(tmp_path), "--data.val_fraction", "0", "--plan"]
    with pytest.raises(ValueError, match="data.val_fraction is 0, and the loss is that of held"):
        instruct.main(flags)


@pytest.mark.parametrize("stage", ["vera/e2e", "vera/instruct", "apet/generation"])
def test_the_verb_test_gives_the_loss_of_the_test_part(stage, tmp_path):
    file = str(RECIPES / f"{stage}.yaml")
    place = f"--trainer.default_root_dir={tmp_path}"
    run = cli.main(["test", "-c", file, "--preset", "tiny", "--trainer.logger=false", place])
    assert 0 < run.trainer.callback_metrics["test/loss"] < 10


@pytest.mark.parametrize("name", FEWER)
def test_second_call_trains_nothing(name, finished, monkeypatch):
    command, _, table = finished(name)

    def fail(*args, **kwargs):
        raise AssertionError("a finished stage was trained, or its texts were written, again")

    monkeypatch.setattr("recipes.work.run_stage", fail)
    monkeypatch.setattr("recipes.methods.generate", fail)
    again = importlib.import_module(f"recipes.vera.{name}").main(command)
    file = again.out / "results.csv"
    pd.testing.assert_frame_equal(
        pd.read_csv(file, keep_default_na=False, na_values={"x": [""]}), table
    )


def test_e2e_outputs_are_those_that_were_scored(finished):
    _, done, table = finished("e2e")
    for row in ("full", "lora", "vera", "start"):
        folder = done.out / "seed0" / f"E2E_{row}.score"
        blocks = (folder / "references.txt").read_text().removesuffix("\n").split("\n\n")
        references = [block.split("\n") for block in blocks]
        lines = (folder / "outputs.txt").read_text().removesuffix("\n").split("\n")
        assert len(lines) == len(references) == 5
        for metric, expected in score(lines, references).items():
            if metric in e2e.SCORES:
                assert by_seed(table, metric, {"row": row})[0] == pytest.approx(expected)


def test_the_start_is_the_base(finished):
    """VeRA's model without its vectors has the loss of the base that all began from."""
    _, done, table = finished("instruct")
    [base] = [node for node in done.nodes.values() if node.name == "base"]
    logged = pd.read_csv(next(base.folder.glob("log*/metrics.csv")))["val/loss"].dropna()
    start = by_seed(table, "loss", {"row": "start"})[0]
    assert start == pytest.approx(logged.iloc[-1], rel=1e-5)


def test_both_turns_are_answered_in_the_judges_form(finished):
    _, done, table = finished("instruct")
    for row in ("lora", "vera", "start"):
        folder = done.out / "seed0" / f"Alpaca_{row}.answers" / "judging"
        questions = read_questions(folder / "question.jsonl")
        lines = (folder / "model_answer" / f"{row}.jsonl").read_text().splitlines()
        answers = [json.loads(line) for line in lines]
        assert [each["question_id"] for each in answers] == [q.question_id for q in questions]
        assert {each["model_id"] for each in answers} == {row} and len(answers) == 4
        assert all(len(each["choices"][0]["turns"]) == 2 for each in answers)
        assert by_seed(table, "answers", {"row": row})[0] == 8


def test_the_second_turn_follows_the_first(monkeypatch, tmp_path):
    """Its prompt holds the first question and what the model answered to it."""
    asked = []

    def record(model, data, prompts, max_new_tokens):
        asked.append(list(prompts))
        return [f"answer {i}" for i, _ in enumerate(prompts)]

    class Given:
        seed, folder = 0, tmp_path

        def __init__(self):
            self.settings = {"row": "vera", "questions": "generated"}
            self.settings |= {"count": 2, "max_new_tokens": 4}

        def datamodule(self, name):
            return None

    monkeypatch.setattr(instruct, "answer", record)
    monkeypatch.setattr(instruct, "loaded", lambda m: SimpleNamespace(model=None))
    list(instruct.measure_answers(Given()))
    questions = read_questions(tmp_path / "question.jsonl")[:2]
    first = [fill_template(question.turns[0]) for question in questions]
    second = [
        follow_up(before, f"answer {i}", question.turns[1])
        for i, (before, question) in enumerate(zip(first, questions, strict=True))
    ]
    assert asked == [first, second]


def test_the_questions_are_looked_for_among_the_data_or_where_the_flag_says(tmp_path, monkeypatch):
    def declared(*flags):
        run = command_line(instruct.EXPERIMENT, ["--preset", "paper", *flags])
        instruct.declare(run)
        return run

    monkeypatch.setenv("RECIPES_DATA", str(tmp_path / "all"))
    roots = {tmp_path / "all": (), tmp_path / "alpaca": ("--data.root", str(tmp_path / "alpaca"))}
    for root, flags in roots.items():
        root.mkdir()
        file = root / "mt_bench" / "question.jsonl"
        [reason] = declared(*flags).missing()
        assert reason.startswith(f"{file} is not there") and "--questions FILE" in reason
        file.parent.mkdir()
        write_questions(file.parent)
        run = declared(*flags)
        assert not run.missing()
        [vera] = [node for node in run.nodes.values() if node.name == "Alpaca_vera.answers"]
        assert instruct.question_file(vera.settings) == file
    monkeypatch.chdir(tmp_path)
    own = write_questions(tmp_path / "own")
    run = declared("--questions", "own/question.jsonl")
    assert not run.missing()
    [vera] = [node for node in run.nodes.values() if node.name == "Alpaca_vera.answers"]
    assert instruct.question_file(vera.settings) == own
    assert "own.jsonl is not there" in declared("--questions", "own.jsonl").missing()[0]
    monkeypatch.delenv("RECIPES_DATA")
    assert "set --data.root, or RECIPES_DATA" in declared().missing()[0]


def test_trials_see_no_response_that_is_scored(tmp_path):
    file = write_instructions(tmp_path)
    data = ["--data.root", str(tmp_path), "--data.file", file.name]
    command = ["--preset", "small", "--seeds", "2", "--out", str(tmp_path), *data]
    run = command_line(instruct.EXPERIMENT, command)
    instruct.declare(run)
    nodes = {node.name: node for node in run.nodes.values() if node.seed == 0}
    [other_seed] = [
        node for node in run.nodes.values() if node.title.endswith("seed 1: Alpaca_vera")
    ]
    part = nodes["training part"]
    part.folder.mkdir(parents=True)
    list(part.function(Measuring(0, part.settings, {}, part.folder)))
    trial, final = (
        InstructionData(**nodes[name].parsed().data.init_args.as_dict())
        for name in ("Alpaca_vera_lr0.004", "Alpaca_vera")
    )
    trial.root = (part / "trials").path  # the node's file, for which `parsed` has a placeholder
    parts = [set(trial.load(name)) for name in ("train", "val")]
    scored, trained = set(final.load("val")), set(final.load("train"))
    assert not parts[0] & parts[1] and parts[0] | parts[1] == trained
    assert scored and not scored & trained
    again = InstructionData(**other_seed.parsed().data.init_args.as_dict())
    assert set(again.load("val")) == scored
    # flags that name other data reach the part that the trials are cut from
    other = command_line(instruct.EXPERIMENT, ["--preset", "small", "--data.file", "other.json"])
    instruct.declare(other)
    nodes = {node.name: node for node in other.nodes.values()}
    assert nodes["training part"].settings["file"] == "other.json"
    assert nodes["Alpaca_vera_lr0.004"].parsed().data.init_args.file == instruct.TRAINING
    assert nodes["Alpaca_vera"].parsed().data.init_args.file == "other.json"


def test_a_response_may_hold_unicodes_line_ends(tmp_path):
    """U+2028 ends no line of a jsonl file."""
    entries = [{"instruction": "say", "input": "", "output": f"a\u2028{n}"} for n in range(4)]
    lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    settings = {"source": "folder", "root": str(tmp_path), "file": "a.jsonl", "val_fraction": 0.25}
    list(instruct.write_training_part(Measuring(0, settings, {}, tmp_path / "node")))
    written = read_instructions(tmp_path / "node" / "trials" / instruct.TRAINING)
    assert len(written) == 3 and all(one.response.startswith("a\u2028") for one in written)


def test_llama_counts():
    assert instruct.llama_counts(*instruct.LLAMA["7B"]) == (1_589_248, 159_907_840)
    assert instruct.llama_counts(*instruct.LLAMA["13B"]) == (2_416_640, 250_347_520)


@pytest.mark.parametrize(
    ("name", "preset", "expected"),
    [
        ("e2e", "paper", ("gpt2-medium", 1024, 0.1, 500, 0.01, 8, 5)),
        ("e2e", "large", ("gpt2-large", 1024, 0.02, 500, 0.01, 8, 5)),
        ("instruct", "paper", ("Llama-2-7b-hf", 1024, 4e-3, 0.1, 0.0, 4, 1)),
    ],
)
def test_the_papers_settings(name, preset, expected):
    """Tables 10 and 11, Section 4.3."""
    experiment = importlib.import_module(f"recipes.vera.{name}").EXPERIMENT
    run = command_line(experiment, ["--preset", preset])
    experiment.declare(run)
    stages = {node.name: node.parsed() for node in run.nodes.values() if isinstance(node, Stage)}
    vera, lora = (stages[f"{SETS[name]}_{row}"] for row in ("vera", "lora"))
    h, data = vera.model.init_args, vera.data.init_args
    found = (h.architecture.rpartition("/")[2], h.rank, h.lr, h.warmup, h.weight_decay)
    assert (*found, data.batch_size, vera.trainer.max_epochs) == expected
    assert lora.model.init_args.lr == (2e-4 if name == "e2e" else 4e-4)
    if name == "e2e":
        assert (h.label_smoothing, data.max_length, h.schedule) == (0.1, 512, "linear")
        tuned = lora.model.init_args
        assert (tuned.rank, tuned.method_args) == (4, {"alpha": 32, "dropout": 0.1})
        for stage in stages.values():  # the data and the model of LoRA's repository
            arguments = stage.model.init_args.model_args
            assert arguments == dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0)
            assert stage.data.init_args.format == "lora"
    else:
        assert (vera.trainer.accumulate_grad_batches, h.quantize, h.schedule) == (
            4,
            "nf4",
            "cosine",
        )
        assert run.grid("instruct_grid")["answers"]["count"] == 80


def test_the_small_preset_of_e2e_has_the_official_data_and_its_own_model():
    small = cli.parse(RECIPES / "vera" / "e2e.yaml", "small")
    assert (small.data.init_args.format, small.model.init_args.model_args) == ("official", None)


# What `paper` needs of a quantised model, tried with one that only says it is.


@pytest.fixture
def quantised(tmp_path, monkeypatch):
    """Makes a LanguageTuning whose base, in its folder, passes for one of 4 bits."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")

    def build(architecture, task, model_args, pretrained, quantize):
        assert pretrained and quantize == "nf4"
        return backbones.build_text(architecture, task, model_args, pretrained)

    monkeypatch.setattr("lightning_modules.vera.language_module.build_text", build)
    return lambda **arguments: LanguageTuning(
        str(tmp_path / "base"), pretrained=True, quantize="nf4", **{"rank": 4, **arguments}
    )


@pytest.mark.parametrize("method", ["vera", "lora"])
def test_checkpoint_of_a_quantised_model_holds_what_trains(quantised, method, tmp_path):
    trainer = L.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    module = quantised(method=method)
    trainer.strategy.connect(module)
    module.configure_model()
    for parameter in module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert {"vera": "vera_", "lora": "lora_"}[method] in min(saved) and len(saved) in (2, 4)

    again = LanguageTuning.load_from_checkpoint(tmp_path / "last.ckpt")
    for name, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name

    other = quantised(method=method)
    other.configure_model()
    with pytest.raises(ValueError, match="does not hold the parameters that train here"):
        other.on_load_checkpoint({"hyper_parameters": dict(module.hparams), "state_dict": {}})


def test_a_pretrained_model_trains_with_its_dropout(quantised):
    module = quantised()
    module.configure_model()
    assert all(part.training for part in module.modules())
