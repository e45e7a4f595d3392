"""E2E: official files and LoRA's, real and generated; sequences, prompts and references."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from datamodules import E2EData
from datamodules.e2e import Row, read_e2e, read_lora, slots, write_e2e
from datamodules.prompted import group

MR = "name[Café Ö], priceRange[£20-25]"


@pytest.fixture(scope="module")
def data() -> E2EData:
    return E2EData(source="generated", vocab_size=500, batch_size=4)


def test_three_headers_line_ends_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    expected = [Row(MR, 'A "fine", £20 café.'), Row("name[X]", "Two  spaces .")]
    body = f'"{MR}","A ""fine"", £20 café."\r\nname[X],Two  spaces .\r\n'
    for header in ("mr,ref\r\n", '"mr","ref"\n', "\ufeffmr,ref\r\n"):
        path.write_bytes((header + body).encode())
        assert read_e2e(path) == expected
    path.write_bytes(f'MR\n"{MR}"\nname[X]\n'.encode())
    assert read_e2e(path) == [Row(MR, None), Row("name[X]", None)]
    assert group(read_e2e(path)) == {MR: [], "name[X]": []}


def test_loras_format(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("name : X | area : riverside||X is there . \n")
    rows = [Row("name : X | area : riverside", "X is there .")]
    assert read_lora(tmp_path / "test.txt") == rows
    assert E2EData(root=str(tmp_path), format="lora").examples("test") == rows


def test_grouping_is_by_string_wherever_the_rows_are() -> None:
    rows = [Row("a", "1"), Row("b", "2"), Row("a", "3")]
    assert group(rows) == {"a": ["1", "3"], "b": ["2"]}


def test_slots() -> None:
    mr = "name[The Eagle, Ltd], customer rating[5 out of 5], area[city centre]"
    assert slots(mr) == {
        "name": "The Eagle, Ltd",
        "customer rating": "5 out of 5",
        "area": "city centre",
    }
    with pytest.raises(ValueError, match="is 'name', expected slot"):
        slots("name")


def test_generated_files_have_the_official_form(tmp_path: Path) -> None:
    write_e2e(tmp_path)
    raw = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert raw["trainset.csv"].startswith(b"mr,ref\r\n")
    assert raw["testset_w_refs.csv"].startswith(b'"mr","ref"\n')
    assert raw["testset.csv"].startswith(b"MR\n")
    assert "£".encode() in raw["trainset.csv"] and "é".encode() in raw["trainset.csv"]
    parts = [set(group(read_e2e(tmp_path / name))) for name in sorted(raw) if name != "testset.csv"]
    assert sum(map(len, parts)) == len(set().union(*parts))
    mrs = [row.mr for row in read_e2e(tmp_path / "testset.csv")]
    assert mrs == list(group(read_e2e(tmp_path / "testset_w_refs.csv")))
    assert all(slots(mr)["name"] for mr in mrs)


def test_sequence_is_mr_begin_text_end_and_only_the_text_counts(data: E2EData) -> None:
    tokenizer = data.tokenizer
    sample = data.val_dataloader().dataset[0, 0, True]
    row = data.examples("val")[0]
    ids, labels = sample["input_ids"], sample["labels"].tolist()
    mr = tokenizer(row.mr, add_special_tokens=False)["input_ids"]
    text = tokenizer(" " + (row.ref or ""), add_special_tokens=False)["input_ids"]
    assert ids == [*mr, tokenizer.bos_token_id, *text, tokenizer.eos_token_id]
    assert labels == [-100] * (len(mr) + 1) + [*text, tokenizer.eos_token_id]
    assert (data.val_dataloader().dataset[0, 0, False]["labels"] == -100).all()


def test_batches(data: E2EData) -> None:
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    outside = batch["attention_mask"] == 0
    assert outside.any() and (batch["labels"][outside] == -100).all()
    assert (batch["attention_mask"][:, 0] == 1).all()  # padded on the right
    prompts = list(data.prompt_dataloader("test"))
    places = torch.cat([batch["labels"] for batch in prompts]).tolist()
    assert places == list(range(len(data.references("test")))) == list(range(16))
    assert (prompts[0]["input_ids"][:, -1] == data.tokenizer.bos_token_id).all()  # on the left
    assert all(len(texts) == 2 for texts in data.references("test"))


def test_double_spaces_go_from_training_text_and_stay_in_references(tmp_path: Path) -> None:
    write_e2e(tmp_path)
    (tmp_path / "testset_w_refs.csv").write_text("mr,ref\nname[X],a  b .\n")
    (tmp_path / "devset.csv").write_text("mr,ref\nname[X],a  b .\n")
    data = E2EData(root=str(tmp_path))
    assert data.references("test") == [["a  b ."]]
    labels = data.val_dataloader().dataset[0, 0, True]["labels"]
    assert data.tokenizer.decode(labels[labels != -100][:-1]) == " a b ."


def test_a_part_without_texts_can_only_be_predicted(tmp_path: Path) -> None:
    write_e2e(tmp_path)
    for name in ("trainset.csv", "testset_w_refs.csv"):
        (tmp_path / name).write_text("MR\nname[X]\n")
    data = E2EData(root=str(tmp_path))
    for part in ("train", "test"):
        with pytest.raises(ValueError, match=f"the {part} part of E2E has meaning .* without text"):
            data.examples(part)
    assert data.prompts("predict") == ["name[X]"]


def test_limits(data: E2EData) -> None:
    limited = E2EData(source="generated", limit=10, eval_limit=3)
    assert len(limited.examples("train")) == 10
    assert [len(texts) for texts in limited.references("test")] == [2, 2, 2]
    with pytest.raises(ValueError, match="has max_length=5 or more tokens"):
        short = E2EData(source="generated", max_length=5)
        next(iter(short.train_dataloader()))


def test_a_trainer_takes_it(scratch: Path, data: E2EData) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    class Writer(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            size = data.vocab_size
            config = GPT2Config(vocab_size=size, n_positions=256, n_embd=16, n_layer=1, n_head=2)
            self.model = GPT2LMHeadModel(config)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(**batch).loss

        def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
            self.log("loss", self.model(**batch).loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(Writer(), datamodule=data)
    assert trainer.global_step == 2
    assert trainer.callback_metrics == {}  # two steps do not reach a validation
    trainer.validate(Writer(), data, verbose=False)
    assert trainer.callback_metrics["loss"].isfinite()


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text('mr,ref\na,b\n"c\nd",e\nf\n')
    with pytest.raises(ValueError, match=r"a\.csv, line 5: the row has 1 columns, expected 2"):
        read_e2e(path)
    path.write_text("source,ref\na,b\n")
    with pytest.raises(ValueError, match="line 1: the columns are source, ref, expected mr and"):
        read_e2e(path)
    path.write_text("a||b||c\n")
    with pytest.raises(ValueError, match="line 1: there are 2 separators"):
        read_lora(path)
    monkeypatch.delenv("RECIPES_DATA", raising=False)
    with pytest.raises(ValueError, match="set --data.root, or RECIPES_DATA"):
        E2EData().examples("train")
    with pytest.raises(FileNotFoundError, match="trainset.csv is not there"):
        E2EData(root=str(tmp_path)).examples("train")
    with pytest.raises(ValueError, match="format is 'csv', expected official or lora"):
        E2EData(format="csv")  # type: ignore[arg-type]


def test_real_files(recipes_data: Path) -> None:
    """Counts of data/e2e_nlg/PROVENANCE.md; LoRA's format has the same rows in the same order."""
    root = str(recipes_data / "e2e_nlg")
    for format, mrs in (("official", (4862, 547, 630)), ("lora", (4862, 547, 630))):
        data = E2EData(root=root, format=format)  # type: ignore[arg-type]
        counts = [len(data.examples(part)) for part in ("train", "val", "test")]
        assert counts == [42061, 4672, 4693]
        found = tuple(len(data.references(part)) for part in ("train", "val", "test"))
        assert found == mrs
    data = E2EData(root=root)
    alone = [row.mr for row in read_e2e(recipes_data / "e2e_nlg" / "testset.csv")]
    assert alone == data.prompts("test")
    names = {name for row in data.examples("train") for name in slots(row.mr)}
    assert len(names) == 8 and "customer rating" in names
