"""The benchmark of speculative decoding compares what it says, and refuses a text that differs."""

import cpu_torchvision  # noqa: F401

from types import SimpleNamespace

import pytest
import torch

from benchmarks import speculative


def test_quick_compares_every_kind_of_draft(capsys):
    few = ["--draft-tokens", "2", "--layers", "2", "--vocabulary", "100"]
    rows = speculative.main(["--quick", *few])
    names = [row[0] for row in rows]
    assert names[:2] == ["XL alone", "XL alone, transformers"]
    kinds = ["shared cache", "caches apart", "assisted generation", "first 2 layers", "100 tokens"]
    for kind in kinds:
        assert any(kind in name for name in names)
    for name, ours, theirs, speed, predicted, acceptance, cost, same in rows:
        assert min(map(float, (ours, theirs, speed))) > 0 and same == "yes"
        assert (cost != "") == ("k = 2" in name)
        assert (acceptance != "") == (predicted != "")
    assert "python -m benchmarks.speculative --quick" in capsys.readouterr().out


def test_exact_compares_and_times_nothing(monkeypatch, capsys):
    monkeypatch.setattr(speculative, "rounds", None)
    rows = speculative.main(["--quick", "--exact", "--draft-tokens", "2", "--batch", "2"])
    assert [row[-1] for row in rows] == ["yes"] * 4
    assert "2 x 16 tokens, 2 texts at a time, in float64" in capsys.readouterr().out


def test_a_model_that_writes_its_end_token(monkeypatch):
    """All go on behind an end token, and none may be kept from writing it."""
    model = speculative.quick()
    plain = speculative.speculative_generate(
        model.double().eval(), torch.randint(speculative.BYTES, (2, 8)), None, 16, draft_tokens=0
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = int(plain[0, 12])
    prompts = plain[:, :8]
    monkeypatch.setattr(speculative, "quick", lambda: model)
    monkeypatch.setattr(speculative, "prompts", lambda *_: prompts)
    rows = speculative.main(["--quick", "--exact", "--draft-tokens", "2"])
    assert [row[-1] for row in rows] == ["yes"] * 5  # assisted generation is among them


def decoder(*logits):
    """A model that always answers with these logits."""

    def answer(ids, **kwargs):
        return SimpleNamespace(logits=torch.tensor(logits).expand(1, 1, -1))

    return answer


def test_only_ties_are_forgiven_and_only_in_float32():
    plain = torch.tensor([[5, 1, 1, 1], [5, 1, 1, 1]])
    other = torch.tensor([[5, 1, 2, 0], [5, 1, 1, 1]])
    texts = {speculative.PLAIN: plain, "S": other}
    tie = decoder(0.0, 3.0, 2.9999)
    said = speculative.check(tie, texts, exact=False)
    assert said == {speculative.PLAIN: "yes", "S": "1 of 2 diverge at ties ≤ 1e-04"}
    for model, exact in ((tie, True), (decoder(0.0, 3.0, 2.9), False)):
        with pytest.raises(RuntimeError, match="S writes another text than XL alone in 1 of 2"):
            speculative.check(model, texts, exact)


def test_a_text_that_differs_stops_it(monkeypatch):
    def other(model, ids, draft, **kwargs):
        written = torch.full((len(ids), 16), int(draft is not None))
        return torch.cat([ids, written], 1)

    monkeypatch.setattr(speculative, "speculative_generate", other)
    with pytest.raises(RuntimeError, match="writes another text"):
        speculative.main(["--quick", "--exact"])
