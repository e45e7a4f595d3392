"""The experiments on language models, from the command line to the report, on generated text."""

import importlib
import json
from pathlib import Path

import lightning as L
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from datamodules.instructions import fill_template
from lightning_modules import backbones
from lightning_modules.generation_metrics import score
from lightning_modules.vera import LanguageTuning
from recipes.legacy import StageResult, read_history
from recipes.vera import e2e, instruct

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


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Each experiment run once at `tiny`: its command line and its folder."""
    runs = {}

    def run(name):
        if name not in runs:
            command = ["--out", str(tmp_path_factory.mktemp(name)), *FEWER[name]]
            runs[name] = command, main_of(name)(command)
        return runs[name]

    return run


def main_of(name):
    return importlib.import_module(f"recipes.vera.{name}").main


def metrics_of(experiment):
    return json.loads((experiment.out / "metrics.json").read_text())


@pytest.mark.parametrize("name", FEWER)
def test_tiny_preset(name, finished):
    _, experiment = finished(name)
    metrics = metrics_of(experiment)
    (found,) = metrics["seeds"]
    for method, size in SIZES[name].items():
        assert found[method]["trained"] == size
        assert 0 < found[method]["loss"] < 10 and found[method]["seconds"] > 0
        assert (experiment.out / "seed0" / method / "checkpoints" / "last.ckpt").is_file()
    text = (experiment.out / "report.md").read_text()
    assert metrics["provenance"] in text and f"| {SIZES[name]['vera']:,} |" in text


@pytest.mark.parametrize("name", FEWER)
def test_second_call_trains_nothing(name, finished, monkeypatch):
    command, experiment = finished(name)
    before = metrics_of(experiment)

    def fail(*args, **kwargs):
        raise AssertionError("a finished stage was trained, or its texts were written, again")

    monkeypatch.setattr("recipes.legacy.run_stage", fail)
    monkeypatch.setattr(e2e, "generate", fail)
    main_of(name)(command)
    assert metrics_of(experiment)["seeds"] == before["seeds"]


def test_e2e_outputs_are_those_that_were_scored(finished):
    _, experiment = finished("e2e")
    metrics = metrics_of(experiment)
    blocks = (experiment.out / "references.txt").read_text().removesuffix("\n").split("\n\n")
    references = [block.split("\n") for block in blocks]
    data = experiment.datamodule("e2e")
    assert references == data.references("test") and len(references) == 5
    for method in ("full", "lora", "vera", "start"):
        file = "vera/start.txt" if method == "start" else f"{method}/outputs.txt"
        lines = (experiment.out / "seed0" / file).read_text().removesuffix("\n").split("\n")
        scores = metrics["start"] if method == "start" else metrics["seeds"][0][method]
        assert score(lines, references).items() <= scores.items()


def test_e2e_start_is_the_base(finished):
    """VeRA's model without its vectors writes what the base that all began from writes."""
    command, _ = finished("e2e")
    experiment = e2e.with_tokenizer(
        e2e.from_command_line("vera.e2e", e2e.__file__, "e2e", "", command), "e2e"
    )
    checkpoint = experiment.out / "seed0" / "base" / "checkpoints" / "last.ckpt"
    base = e2e.decode(StageResult(checkpoint, {}, 0.0), experiment.datamodule("e2e"), "base")
    assert base == (experiment.out / "seed0/vera/start.txt").read_text().split("\n")[:-1]


def test_instruct_start_is_the_base(finished):
    _, experiment = finished("instruct")
    base = read_history(experiment.out / "seed0" / "base")["val/loss"][-1]
    assert metrics_of(experiment)["seeds"][0]["start"]["loss"] == pytest.approx(base, rel=1e-5)


def test_instruct_answers_in_the_judges_form(finished):
    _, experiment = finished("instruct")
    folder = experiment.out / "judging"
    questions = read_lines(folder / "question.jsonl")
    data = experiment.datamodule("instruct")
    assert len(questions) == 4
    for asked, prompt in zip(questions, data.prompts("val"), strict=False):
        (turn,) = asked["turns"]
        assert "###" not in turn and set(turn.split()) <= set(prompt.split())
    files = sorted(file.stem for file in (folder / "model_answer").iterdir())
    assert files == ["lora", "reference", "start", "vera"]
    for model in files:
        answers = read_lines(folder / "model_answer" / f"{model}.jsonl")
        assert [each["question_id"] for each in answers] == [q["question_id"] for q in questions]
        assert {each["model_id"] for each in answers} == {model}
        texts = [each["choices"][0]["turns"][0] for each in answers]
        if model == "reference":
            assert [[text] for text in texts] == data.references("val")[:4]


def read_lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("given", ["", "one two\n\nthree"])
def test_question_undoes_the_template(given):
    asked = instruct.question(fill_template("Do it.\n\nNow.", given))
    assert asked == "Do it.\n\nNow." + (f"\n\n{given}" if given else "")


def test_llama_counts():
    assert instruct.llama_counts(*instruct.LLAMA["7B"]) == (1_589_248, 159_907_840)
    assert instruct.llama_counts(*instruct.LLAMA["13B"]) == (2_416_640, 250_347_520)


@pytest.mark.parametrize("name", FEWER)
def test_unknown_preset(name, capsys):
    with pytest.raises(SystemExit):
        main_of(name)(["--preset", "tinny"])
    message = capsys.readouterr().err
    assert "unknown preset 'tinny': expected tiny, small, paper" in message


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

    again = LanguageTuning.load_from_checkpoint(tmp_path / "last.ckpt", pretrained=True)
    for name, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name

    other = quantised(method=method)
    other.configure_model()
    with pytest.raises(ValueError, match="holds other parameters than train here"):
        other.on_load_checkpoint({"hyper_parameters": dict(module.hparams), "state_dict": {}})


def test_a_pretrained_model_trains_with_its_dropout(quantised):
    module = quantised()
    module.configure_model()
    assert all(part.training for part in module.modules())
