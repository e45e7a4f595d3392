"""lm-evaluation-harness scores each size of a nested model as that size scores by itself."""

import cpu_torchvision  # noqa: F401

import json

import pytest
import torch

from datamodules.tokens import train_tokenizer
from lightning_modules.backbones import build_text
from lightning_modules.matformer import nest, set_granularity
from recipes import evaluate
from recipes.results import Row, read, tidy

DECODER = {
    "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 259, "max_position_embeddings": 128,
    "initializer_range": 0.3, "use_bias": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QUESTIONS = [
    {"question": f"{a} plus {b} is", "choices": [str(a + b), str(a * b + 7), "fish"], "answer": 0}
    for a in range(2, 6)
    for b in range(3, 7)
]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}}}
output_type: multiple_choice
fewshot_split: train
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with a task whose questions lie beside it."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [json.dumps(one) + "\n" for one in QUESTIONS]
    (tmp_path / "train.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "test.jsonl").write_text("".join(lines[2:]))
    (tmp_path / "sums.yaml").write_text(TASK.format(folder=tmp_path))
    return tmp_path


@pytest.fixture
def model(monkeypatch):
    """A random nested decoder, which stands for a checkpoint."""
    torch.manual_seed(0)
    nested = nest(build_text("starcoder2", "causal", DECODER), (1 / 8, 1 / 4, 1 / 2, 1)).eval()
    monkeypatch.setattr(evaluate, "load", lambda source: (nested, train_tokenizer([], 259)))
    return nested


@torch.no_grad()
def accuracy(model, tokenizer) -> float:
    """The reference: the choice whose tokens are likeliest after the question is the answer."""

    def likelihood(question, choice):
        before, after = (
            tokenizer(t, add_special_tokens=False).input_ids for t in (question, f" {choice}")
        )
        ids = torch.tensor([before + after])
        scores = model(ids, use_cache=False).logits[0, len(before) - 1 : -1].log_softmax(-1)
        return float(scores.gather(1, ids[0, len(before) :, None]).sum())

    right = [
        max(range(3), key=lambda i: likelihood(one["question"], one["choices"][i])) == one["answer"]
        for one in QUESTIONS[2:]
    ]
    return sum(right) / len(right)


def test_every_size_has_the_accuracy_that_it_has_by_itself(model, tasks, tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    out = tmp_path / "scores.csv"
    evaluate.main(
        ["CKPT", "--tasks", "sums", "--task-folder", str(tasks), "--shots", "0", "--out", str(out),
         "--granularity", "S", "0,3", "XL"]
    )  # fmt: skip
    table = read(out)
    scores = table[(table["metric"] == "acc") & (table["set"] == "sums")]
    assert list(scores["row"]) == ["S", "S*1+XL*1", "XL"]
    expected = []
    for chosen in ("S", [0, 3], "XL"):
        set_granularity(model, chosen)
        expected.append(accuracy(model, train_tokenizer([], 259)))
    assert list(scores["value"]) == pytest.approx(expected)
    assert len(set(expected)) > 1  # these weights tell the sizes apart
    assert "sums, acc" in capsys.readouterr().out


def test_many_sizes_and_metrics_fit_a_terminal():
    sizes = ("S", "S*6+M*6", "M", "L", "XL")
    metrics = ("acc", "acc_stderr", "acc_norm", "perplexity")
    rows = [
        Row(size, metric, 0.25, set=task)
        for size in sizes
        for task in ("lambada_openai", "piqa")
        for metric in metrics
    ]
    text = evaluate.shown(tidy(rows, "matformer.evaluate", "", 0)).markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        f"{task}, {metric}"
        for task in ("lambada_openai", "piqa")
        for metric in ("acc", "acc_norm", "perplexity")
    ]
    assert max(map(len, lines)) <= 80


def test_a_task_that_is_not_known_is_named(model, tasks):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    with pytest.raises(ValueError, match="sum_of_sums is no task of lm_eval"):
        evaluate.main(["CKPT", "--tasks", "sum_of_sums", "--task-folder", str(tasks)])


def test_without_the_harness_the_cure_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[harness\]'"):
        evaluate.main(["CKPT", "--tasks", "sums"])


@pytest.mark.parametrize(("flag", "value"), [("shots", -1), ("limit", 0), ("batch-size", 0)])
def test_a_number_that_is_too_small_is_named(flag, value):
    with pytest.raises(ValueError, match=f"^--{flag} {value}: expected at least [01]$"):
        evaluate.main(["CKPT", "--tasks", "sums", f"--{flag}", str(value)])
