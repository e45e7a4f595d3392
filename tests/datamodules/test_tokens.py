"""Tokenizers train alike, lose nothing, and pad on either side."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, BertTokenizerFast

from datamodules.tokens import (
    load_tokenizer,
    pad,
    tokenizer_from,
    tokenizer_state,
    train_tokenizer,
)


def test_pad_left() -> None:
    samples = [{"input_ids": [5], "labels": 0}, {"input_ids": torch.tensor([6, 7]), "labels": 1}]
    batch = pad(samples, {"input_ids": 9}, left=True)
    assert batch["input_ids"].tolist() == [[9, 5], [6, 7]]
    assert batch["labels"].tolist() == [0, 1]


def test_trained_tokenizer_is_reproducible_lossless_and_saved(tmp_path: Path) -> None:
    texts = ["The Eagle is a pub.", "The Mill is a pub near Café Rouge.", "£20"] * 3
    first, second = train_tokenizer(texts, 300), train_tokenizer(texts, 300)
    assert first.get_vocab() == second.get_vocab()
    for text in [*texts, "unseen ¿ 漢字 text"]:
        assert first.decode(first(text)["input_ids"], skip_special_tokens=True) == text
    first.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("The Mill", "£20") == first("The Mill", "£20")
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


@pytest.mark.parametrize("kind", ["starcoder2", "gemma2", "llama"])
def test_a_model_s_folder_without_a_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    """For some kinds of model transformers makes a tokenizer that knows no word."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(OSError, match="The tokenizer '.*' cannot be loaded, .*: correct --data.to"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["trained", "bert"])
def test_a_checkpoint_s_state_makes_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    if kind == "trained":
        tokenizer = train_tokenizer(["The Eagle is a pub.", "£20"], 300)
    else:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "eagle", "mill", "##s"]
        (tmp_path / "vocab.txt").write_text("\n".join(words))
        tokenizer = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
    tokenizer("a text that is cut", truncation=True, max_length=3)  # leaves a mark in the backend
    state = tokenizer_state(tokenizer)
    torch.save(state, tmp_path / "state.pt")
    again = tokenizer_from(torch.load(tmp_path / "state.pt", weights_only=True))
    for pair in (("The Mills",), ("The Mill", "an Eagle, and much more")):
        assert dict(again(*pair)) == dict(tokenizer(*pair))
    assert again.pad_token_id == tokenizer.pad_token_id
    assert again.mask_token == tokenizer.mask_token
