"""Exports from a checkpoint alone, loaded by others in a process without this repository."""

import json

import numpy as np
import pytest
import torch

from lightning_modules.apet import LabelWords
from lightning_modules.counting import count_macs
from lightning_modules.matformer import extract
from lightning_modules.matformer.nesting import nesting_of
from lightning_modules.vera import strip
from recipes import cli
from recipes.export import example_of, main
from recipes.predict import Predictor
from tests.lightning_modules.matformer.test_export import in_a_clean_process
from tests.recipes.stage_runs import RECIPES

SHORT = ["--trainer.max_epochs=-1", "--trainer.max_steps=3", "--trainer.limit_val_batches=1"]
QUIET = [f"--trainer.{part}=false" for part in ("enable_progress_bar", "logger")]
STAGES = {
    "nested": ["matformer/matvit", "--data.batch_size=64"],
    "low_rank": ["pela/finetune", "--model.ratio=2.0", "--data.batch_size=64"],
    "sentences": ["vera/glue", "--data.task=RTE", "--model.targets=[query]"],
    "prompts": ["vera/e2e", "--data.limit=40"],
    "label_words": ["apet/decoder", '--model.method_args.operations=["add","concat"]'],
    "answers": ["apet/generation", '--model.method_args.operations=["add","concat"]'],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A few steps of each kind of stage."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (stage, *options) in STAGES.items():
        file = str(RECIPES / f"{stage}.yaml")
        place = [f"--checkpoint.dirpath={folder / name}", f"--trainer.default_root_dir={folder}"]
        cli.main(["fit", "-c", file, "--preset", "tiny", *options, *SHORT, *QUIET, *place])
    return {name: folder / name / "last.ckpt" for name in STAGES}


CASES = {
    "largest": ("nested", []),
    "uniform": ("nested", ["--granularity", "S"]),
    "budget": ("nested", ["--max_params", "BETWEEN"]),
    "low_rank": ("low_rank", []),
    "sentences": ("sentences", []),
    "prompts": ("prompts", []),
    "label_words": ("label_words", []),
    "answers": ("answers", []),
}


@pytest.fixture(scope="module")
def exported(checkpoints, tmp_path_factory):
    """Every folder, and what the clean process made of the same inputs."""
    root = tmp_path_factory.mktemp("exports")
    folders, inputs = {}, {}
    for case, (name, options) in CASES.items():
        folders[case] = root / case
        if case == "budget":  # half-way between M and L
            options[1] = str(sum(size(checkpoints[name], one) for one in "ML") / 2)
        main([str(checkpoints[name]), str(folders[case]), *options])
        inputs[case] = example_of(Predictor(checkpoints[name], device="cpu"))
    in_a_clean_process(list(folders.values()), list(inputs.values()))
    outputs = {
        case: torch.load(folder / "outputs.pt", weights_only=True)
        for case, folder in folders.items()
    }
    return folders, inputs, outputs


def expected(checkpoint, inputs, granularity=None):
    module = Predictor(checkpoint, granularity, device="cpu").module
    with torch.no_grad():
        if isinstance(inputs, dict):
            words = isinstance(module.model, LabelWords)
            return (module.model.model if words else module.model)(**inputs).logits
        return module.predict_step((inputs, torch.zeros(len(inputs), dtype=torch.long)), 0)


@pytest.mark.parametrize("case", CASES)
def test_exports_give_equal_outputs(checkpoints, exported, case):
    folders, inputs, outputs = exported
    name, options = CASES[case]
    granularity = options[1] if options[:1] == ["--granularity"] else None
    if case == "budget":
        granularity = widths(checkpoints[name], folders[case])
        assert len(set(granularity)) == 2  # neither M nor L: between them
    result = expected(checkpoints[name], inputs[case], granularity)
    torch.testing.assert_close(outputs[case], result, atol=1e-5, rtol=1e-4)


def size(checkpoint, granularity):
    """Parameters of a submodel."""
    small = extract(Predictor(checkpoint, device="cpu").module.model, granularity)
    return sum(parameter.numel() for parameter in small.parameters())


def widths(checkpoint, folder):
    """The granularity of each layer of an exported Mix'n'Match submodel."""
    sizes = json.loads((folder / "manifest.json").read_text())["widths"].values()
    layers = nesting_of(Predictor(checkpoint, device="cpu").module.model).layers
    return [layer.widths.index(width) for layer, width in zip(layers, sizes, strict=True)]


def test_classes_and_preprocessing_go_along(exported):
    folders, _, _ = exported
    config = json.loads((folders["uniform"] / "config.json").read_text())
    assert config["label_names"] == list("ABCDEFGHIJ")
    assert config["pretrained_cfg"]["input_size"] == [3, 16, 16]
    config = json.loads((folders["sentences"] / "config.json").read_text())
    assert list(config["id2label"].values()) == ["entailment", "not_entailment"]
    assert (folders["sentences"] / "tokenizer.json").is_file()
    for folder in folders.values():
        modes = {file.stat().st_mode & 0o777 for file in folder.iterdir() if file.suffix != ".pt"}
        assert len(modes) == 1


def test_milliseconds_are_measured_and_kept(checkpoints, tmp_path):
    main([str(checkpoints["nested"]), str(tmp_path / "out"), "--max_ms", "10000"])
    table = json.loads((tmp_path / "out" / "latency.json").read_text())
    assert np.shape(table["milliseconds"]) == (2, 4)
    assert widths(checkpoints["nested"], tmp_path / "out") == [3, 3]
    file = tmp_path / "file" / "m.onnx"  # a file, with the times beside it
    main([str(checkpoints["nested"]), str(file), "--to", "onnx", "--max_ms", "10000"])
    assert file.is_file() and file.with_name("latency.json").is_file()


def test_multiply_adds_are_those_of_one_input(checkpoints, tmp_path):
    model = Predictor(checkpoints["nested"], device="cpu").module.model
    macs = count_macs(extract(model, "M"), (1, 3, 16, 16))
    for budget, chosen in ((macs, [1, 1]), (macs - 1, [0, 1])):
        main([str(checkpoints["nested"]), str(tmp_path / "out"), "--max_macs", str(budget)])
        assert widths(checkpoints["nested"], tmp_path / "out") == chosen


def test_an_adapter_for_peft_and_as_lora(checkpoints, tmp_path):
    import peft

    inputs = example_of(Predictor(checkpoints["sentences"], device="cpu"))
    result = expected(checkpoints["sentences"], inputs)
    for kind in ("peft", "lora"):
        main([str(checkpoints["sentences"]), str(tmp_path / kind), "--to", kind])
        base = strip(Predictor(checkpoints["sentences"], device="cpu").module.model)
        model = peft.PeftModel.from_pretrained(base, tmp_path / kind).eval()
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, result, atol=1e-5, rtol=1e-4)


def test_onnx(checkpoints, tmp_path):
    import onnxruntime

    file = str(tmp_path / "s.onnx")
    main([str(checkpoints["nested"]), file, "--to", "onnx", "--granularity", "S"])
    images = example_of(Predictor(checkpoints["nested"], device="cpu"))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    logits = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
    result = expected(checkpoints["nested"], images, "S")
    torch.testing.assert_close(logits, result, atol=1e-4, rtol=1e-3)


def test_a_program_of_a_low_rank_model(checkpoints, tmp_path):
    file = str(tmp_path / "low.pt2")
    main([str(checkpoints["low_rank"]), file, "--to", "pt2"])
    images = example_of(Predictor(checkpoints["low_rank"], device="cpu"))
    logits = torch.export.load(file).module()(images)
    torch.testing.assert_close(logits, expected(checkpoints["low_rank"], images))


BAD = [
    ("sentences", ["--granularity", "S"], "is no nested model, it has one size"),
    ("nested", ["--granularity", "XS"], "unknown granularity 'XS'"),
    ("nested", ["--granularity", "S", "--max_params", "1M"], "give one of them"),
    ("nested", ["--max_params", "10"], "below the smallest submodel"),
    ("nested", ["--to", "peft"], "has no VeRA adapter"),
    ("nested", ["--to", "transformers"], "this is a model of timm"),
    ("nested", ["--to", "onnx"], "expected a name that ends in .onnx"),
    ("nested", ["--to", "pt2"], "expected a name that ends in .pt2"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_what_cannot_be_is_said(checkpoints, tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        main([str(checkpoints[name]), str(tmp_path / "out"), *options])


def test_a_file_in_the_folder_s_place_is_said(checkpoints, tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ValueError, match="taken is a file: expected a folder"):
        main([str(checkpoints["nested"]), str(tmp_path / "taken")])
    assert (tmp_path / "taken").read_text() == "x"


def test_only_an_export_is_written_over(checkpoints, tmp_path):
    """Not a downloaded model, whose folder has a config.json and a README.md as well."""
    for name in ("config.json", "README.md"):
        (tmp_path / name).write_text("{}")
    arguments = [str(checkpoints["nested"]), str(tmp_path)]
    with pytest.raises(ValueError, match="holds other files: expected a new folder"):
        main(arguments)
    assert (tmp_path / "config.json").read_text() == "{}"
    for name, to in (("nested", []), ("sentences", ["--to", "lora"])):
        for _ in range(2):
            main([str(checkpoints[name]), str(tmp_path / name), *to])


def test_a_missing_checkpoint_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not there"):
        main([str(tmp_path / "none.ckpt"), str(tmp_path / "out")])
