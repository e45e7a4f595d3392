"""Speculative decoding writes what the model writes alone: to the token, or in distribution."""

import cpu_torchvision  # noqa: F401

import copy
import functools

import pytest
import torch
from scipy.stats import chisquare
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from datamodules.tokens import train_tokenizer
from lightning_modules.apet import Apet, attach
from lightning_modules.apet import prompt as soft_tokens
from lightning_modules.matformer import drafts, views
from lightning_modules.matformer.nest import nest, set_granularity
from lightning_modules.matformer.speculative import (
    SpeculationRecord,
    best_length,
    expected_speedup,
    relative_cost,
    speculative_generate,
)
from lightning_modules.matformer.views import first_layers

VOCABULARY = 23
SIZES = {
    "llama": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "starcoder2": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    },
    "gpt_neox": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
}  # fmt: skip


def build(kind: str = "llama", seed: int = 0, **changes):
    """A decoder with weights so large that its texts are not one token again and again."""
    torch.manual_seed(seed)
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.3}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **{**SIZES[kind], **common, **ends, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def like(model, noise: float, seed: int = 1):
    """A draft that often agrees: the model with some noise in its weights."""
    torch.manual_seed(seed)
    draft = copy.deepcopy(model)
    for parameter in draft.parameters():
        parameter.data += noise * torch.randn_like(parameter) * parameter.std()
    return draft


@torch.no_grad()
def greedy(model, prompt: list[int], count: int) -> list[int]:
    """The reference: the whole text is read again for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


def prompts(batch: int = 3, length: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.manual_seed(seed))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("draft_tokens", [0, 1, 4, "adaptive"])
def test_greedy_is_plain_greedy(kind, draft_tokens):
    model, record = build(kind), SpeculationRecord()
    ids = prompts()
    written = speculative_generate(model, ids, like(model, 0.1), 40, draft_tokens, record=record)
    assert written.tolist() == [greedy(model, row, 40) for row in ids.tolist()]
    if draft_tokens != 0:
        assert 0 < record.accepted < record.tested <= record.drafted
        assert record.rounds < 39


@pytest.mark.parametrize("share_cache", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_first_layers_draft(layers, share_cache):
    model, record = build(initializer_range=0.15), SpeculationRecord()
    ids = prompts(2)
    written = speculative_generate(
        model, ids, None, 40, 3, share_cache, draft_layers=layers, record=record
    )
    assert written.tolist() == [greedy(model, row, 40) for row in ids.tolist()]
    if layers == 3:
        assert record.acceptance == 1 and record.rounds == 10
        assert record.drafted == 2 * (39 - 10)  # none beyond the last token that is asked for
    else:
        assert 0 < record.acceptance < 1


@pytest.mark.parametrize("share_cache", [True, False])
def test_a_draft_of_the_first_tokens(monkeypatch, share_cache):
    monkeypatch.setattr(views, "LEAST_WEIGHTS", 1)  # all linear layers take the form for few rows
    model, record = nest(build(initializer_range=0.15), AXES["ffn"]), SpeculationRecord()
    ids = prompts(2)
    written = speculative_generate(
        model, ids, 1, 40, 3, share_cache, draft_vocabulary=12, record=record
    )
    assert written.tolist() == [greedy(model, row, 40) for row in ids.tolist()]
    fewer = record.acceptance
    speculative_generate(model, ids, 1, 40, 3, share_cache, record=(record := SpeculationRecord()))
    assert 0 < fewer < record.acceptance < 1
    assert written[:, 5:].max() >= 12


def test_first_layers_share_the_weights_and_stop_early():
    model = build()
    short = first_layers(model, 1)
    assert len(short.model.layers) == 1 and len(model.model.layers) == 3
    assert short.model.layers[0] is model.model.layers[0]
    ids = prompts()
    assert not torch.equal(short(ids).logits, model(ids).logits)
    assert torch.equal(first_layers(model, 3)(ids).logits, model(ids).logits)


def test_prompts_of_unequal_length():
    model = build()
    rows = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5]]
    mask = torch.tensor([[0] * (7 - len(row)) + [1] * len(row) for row in rows])
    ids = torch.tensor([[0] * (7 - len(row)) + row for row in rows])
    written = speculative_generate(model, ids, like(model, 0.1), 30, 4, attention_mask=mask)
    for row, text in zip(rows, written.tolist(), strict=True):
        assert text[7 - len(row) :] == greedy(model, row, 30)


def test_positions_that_start_behind_the_padding_s_index():
    """RoBERTa's: a verifier's own, where its draft counts from 0."""
    sizes = {**SIZES["llama"], "is_decoder": True, "max_position_embeddings": 64}
    model = decoder("xlm-roberta", initializer_range=0.3, **sizes)
    for draft in (like(model, 0.1), decoder("bert", **sizes)):
        rows = [[3, 4, 5], [6, 5, 9, 2, 6, 5, 3]]
        mask = torch.tensor([[0] * 4 + [1] * 3, [1] * 7])
        ids = torch.tensor([[1] * 4 + rows[0], rows[1]])
        written = speculative_generate(model, ids, draft, 20, 3, attention_mask=mask)
        assert written[0, 4:].tolist() == greedy(model, rows[0], 20)
        assert written[1].tolist() == greedy(model, rows[1], 20)


def test_end_tokens_and_padding():
    model, ids = build(), prompts(4)
    texts = [greedy(model, row, 40) for row in ids.tolist()]
    end = texts[0][5 + 6]
    written = speculative_generate(
        model, ids, like(model, 0.1), 40, 4, eos_token_id=end, pad_token_id=22
    )
    lengths = [text.index(end, 5) - 4 if end in text[5:] else 40 for text in texts]
    assert len(set(lengths)) > 1 and written.shape[1] == 5 + max(lengths)
    for text, row, length in zip(texts, written.tolist(), lengths, strict=True):
        assert row[: 5 + length] == text[: 5 + length]
        assert set(row[5 + length :]) <= {22}


def test_a_finished_row_is_not_counted():
    model, ids = build(), prompts(2)
    end = greedy(model, ids[1].tolist(), 1)[-1]  # so that the second row ends at once
    alone, beside = SpeculationRecord(), SpeculationRecord()
    for record, rows in ((alone, ids[:1]), (beside, ids)):
        speculative_generate(
            model, rows, None, 20, 3, draft_layers=1, eos_token_id=end, record=record
        )
    assert alone == beside and alone.rounds > 1


def test_stop_strings_end_a_text_where_transformers_ends_it():
    tokenizer = train_tokenizer([], 259)
    model = build(vocab_size=259)
    ids = prompts(1)
    free = greedy(model, ids[0].tolist(), 30)
    string = tokenizer.decode(free[5 + 9 : 5 + 11])
    stop = [string] if string.strip("\ufffd") else []
    if not stop:
        pytest.fail("these weights write no text to stop at: take another seed")
    expected = model.generate(
        ids, max_new_tokens=30, do_sample=False, stop_strings=stop, tokenizer=tokenizer,
        attention_mask=torch.ones_like(ids), pad_token_id=0,
    )  # fmt: skip
    written = speculative_generate(
        model, ids, like(model, 0.05), 30, 4, stop_strings=stop, tokenizer=tokenizer
    )
    assert 5 < written.shape[1] < 35
    assert torch.equal(written, expected)


def distribution(model, prompt: list[int], temperature: float) -> dict[tuple[int, int, int], float]:
    """The probability of each continuation of three tokens, by the product rule."""
    with torch.no_grad():

        def after(*more: int) -> torch.Tensor:
            logits = model(torch.tensor([[*prompt, *more]]), use_cache=False).logits
            return (logits[0, -1] / temperature).softmax(-1)

        return {
            (a, b, c): float(pa * pb * pc)
            for a, pa in enumerate(after())
            for b, pb in enumerate(after(a))
            for c, pc in enumerate(after(a, b))
        }


@pytest.mark.parametrize(
    ("draft_tokens", "layers", "tokens"),
    [(1, None, None), (2, None, 3), (3, None, None), (1, 1, None), (2, 1, None), (3, 1, 3)],
)
def test_samples_follow_the_verifier_s_distribution(draft_tokens, layers, tokens):
    model = build(vocab_size=4, initializer_range=0.2)
    draft = like(model, 0.5) if layers is None else None
    expected = distribution(model, [1, 2], temperature=0.9)
    record = SpeculationRecord()
    written = speculative_generate(
        model, torch.tensor([[1, 2]] * 6000), draft, 3, draft_tokens, do_sample=True,
        draft_layers=layers, draft_vocabulary=tokens, temperature=0.9, record=record,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    assert 0.3 < record.acceptance < 0.97
    counts = dict.fromkeys(expected, 0)
    for row in written[:, 2:].tolist():
        counts[tuple(row)] += 1
    often = [key for key, p in expected.items() if p * 6000 >= 5]
    seen = [counts[key] for key in often]
    due = [expected[key] * 6000 for key in often]
    rest = 6000 - sum(seen), 6000 - sum(due)
    assert chisquare([*seen, rest[0]], [*due, rest[1]]).pvalue > 0.001
    # the test can tell: the draft's own samples are not the verifier's
    other = draft if draft is not None else first_layers(model, 1)
    wrong = distribution(other, [1, 2], temperature=0.9)
    due = [wrong[key] * 6000 for key in often]
    assert chisquare([*seen, rest[0]], [*due, 6000 - sum(due)]).pvalue < 1e-6


def test_samples_are_reproducible():
    model, ids = build(), prompts()
    first, second = (
        speculative_generate(
            model, ids, like(model, 0.1), 20, do_sample=True,
            generator=torch.Generator().manual_seed(5),
        )
        for _ in range(2)
    )  # fmt: skip
    assert torch.equal(first, second)


def test_expected_speedup():
    assert expected_speedup(1.0, 4, 0.0) == 5
    assert expected_speedup(0.8, 2, 0.5) == pytest.approx((1 - 0.8**3) / (0.2 * 2))
    assert expected_speedup(0.5, 0, 0.5) == 1


@pytest.mark.parametrize(("accepted", "tested", "rate"), [(0, 0, 0.5), (5, 8, 0.6), (8, 8, 0.9)])
def test_an_adaptive_draft_is_as_long_as_the_acceptance_so_far_asks(accepted, tested, rate):
    best = max(range(1, 17), key=lambda k: expected_speedup(rate, k, 0.1))
    assert best_length(SpeculationRecord(tested=tested, accepted=accepted), 0.1) == best < 16


def test_the_relative_cost_is_that_of_one_token():
    """Here the layers of XL, not of S, are large enough for FewRowsLinear, which doubles a row."""
    d, layers = 256, 4
    model = nest(
        build("starcoder2", hidden_size=d, intermediate_size=4 * d, num_hidden_layers=layers),
        {"ffn": (1 / 8, 1 / 4, 1 / 2, 1)},
    )
    cost = relative_cost(drafts.drafter(model, None), drafts.drafter(model, "S"), prompts())
    attention, head = 4 * d * d, VOCABULARY * d
    s, xl = (layers * (attention + 2 * d * neurons) + head for neurons in (d // 2, 4 * d))
    assert cost == pytest.approx(s / xl, rel=0.01)  # attention's products come on top


def test_dropout_is_off_and_the_mode_comes_back():
    model = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    ids = prompts()
    expected = speculative_generate(model, ids, None, 10, draft_layers=2)
    model.train()
    assert torch.equal(speculative_generate(model, ids, None, 10, draft_layers=2), expected)
    assert model.training
    draft, record = copy.deepcopy(model), SpeculationRecord()
    speculative_generate(model, ids, draft, 10, record=record)
    assert record.acceptance == 1 and draft.training
    model(expected, labels=expected).loss.backward()  # what was written can be trained on
    assert not expected.is_inference()


def test_long_texts_end_at_the_last_position():
    model = build("gpt2", n_positions=32, max_position_embeddings=32)
    ids = prompts(2, 20)
    written = speculative_generate(model, ids, like(model, 0.05), 12, 6)
    assert written.tolist() == [greedy(model, row, 12) for row in ids.tolist()]


def test_finished_rows_stay_within_the_positions_of_a_draft_that_has_fewer():
    model, ids = build("gpt2"), prompts(4, 7)
    draft = build("gpt2", 1, n_positions=27, max_position_embeddings=27)
    written = speculative_generate(model, ids, draft, 20, 4)
    assert written.tolist() == [greedy(model, row, 20) for row in ids.tolist()]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
        ("mpt", {"n_layers": 2, "n_heads": 4, "d_model": 32}),
    ],
)
def test_distances_by_slot_are_refused_where_rows_may_differ(kind, settings):
    width = {"hidden_size": 32, "num_heads": 4, "window_size": 4} if kind == "gpt_neo" else {}
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **settings, **width)
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval(), prompts(2, 5)
    with pytest.raises(ValueError, match="decode its prompts one at a time"):
        speculative_generate(model, ids, like(model, 0.05), 8, 3)
    alone = speculative_generate(model, ids[:1], like(model, 0.05), 8, 3)
    assert alone.tolist() == [greedy(model, ids[0].tolist(), 8)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"max_new_tokens": 252},
            "5 tokens and max_new_tokens=252 are more than the 256 positions",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"draft_tokens": -1}, "draft_tokens is -1"),
        ({"draft_tokens": "often"}, "draft_tokens is 'often'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"draft": None, "draft_layers": 4}, "draft_layers is 4, expected 1 to the model's 3"),
        ({"draft": None, "draft_vocabulary": 24}, "expected 1 to the model's 23 tokens"),
        ({"draft": "S"}, "is not nested"),
        ({"stop_strings": ["a"]}, "stop_strings need the tokenizer"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "ends in padding"),
        ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, "expected (B, L) with a token"),
        ({"draft": build(vocab_size=24)}, "a vocabulary of 24 tokens and the verifier of 23"),
        ({"draft": build(hidden_size=64)}, "more than the verifier's"),
        ({"draft": build(max_position_embeddings=8)}, "more than the 8 positions of the draft"),
    ],
)
def test_bad_input_is_said_in_a_sentence(settings, said):
    arguments = {"input_ids": prompts(1), "draft": None, "max_new_tokens": 4, **settings}
    with pytest.raises(ValueError) as error:
        speculative_generate(build(), **arguments)
    assert said in str(error.value)


def decoder(kind: str, **settings):
    """A decoder of a family that `build` does not know."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, pad_token_id=1, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("rwkv", {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
        ("xlm", {"emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    ],
)
@pytest.mark.parametrize("place", ["model", "draft"])
def test_a_decoder_without_a_cache_is_refused(kind, settings, place):
    models = {"model": build(), "draft": build()}
    models[place] = decoder(kind, **settings)
    said = f"the {place}, {type(models[place]).__name__}, has no key/value cache"
    with pytest.raises(ValueError, match=said):
        speculative_generate(input_ids=prompts(), **models)


def test_soft_tokens_of_the_model_s_own_are_refused():
    model = decoder("cpmant", hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(ValueError, match="the model has 32 soft tokens"):
        speculative_generate(model, prompts(), None)


BART = {
    "d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "init_std": 0.3, "max_position_embeddings": 64,
}  # fmt: skip


GIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "initializer_range": 0.3,
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bart", "trocr", "whisper", "git"])
def test_positions_by_slot_are_right_in_a_single_row_only(kind):
    """These models take no positions, or no mask: padding and rejected tokens would count."""
    size = {**BART, "hidden_size": 32} if kind == "trocr" else dict(BART)
    if kind == "whisper":  # which has a name of its own for them, and bans tokens at first
        size["max_target_positions"] = size.pop("max_position_embeddings")
        size["begin_suppress_tokens"] = None
    model, ids = decoder(kind, **(GIT if kind == "git" else size)), prompts(2)
    alone = speculative_generate(model, ids[:1], like(model, 0.05), 12, 3)
    assert alone.tolist() == [greedy(model, ids[0].tolist(), 12)]
    plain = speculative_generate(model, ids, None, 12, 0)
    assert plain.tolist() == [greedy(model, row, 12) for row in ids.tolist()]
    with pytest.raises(ValueError, match="decode its prompts one at a time, without padding"):
        speculative_generate(model, ids, like(model, 0.05), 12, 3)
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="decode its prompts one at a time, without padding"):
        speculative_generate(model, ids[:1], None, 12, 0, attention_mask=mask)
    with pytest.raises(ValueError, match="more than the 64 positions of the model"):
        speculative_generate(model, ids[:1], None, 60, 0)


@pytest.mark.parametrize("place", ["model", "draft"])
def test_soft_tokens_are_refused(place):
    """They take slots of the cache that no token has."""
    models = {"model": build(), "draft": build()}
    attach(models[place], Apet(soft_tokens(2)))
    with pytest.raises(ValueError, match=f"the {place} has 2 soft tokens"):
        speculative_generate(input_ids=prompts(), **models)


def test_a_rotary_embedding_that_changes_is_refused_where_it_does():
    """Phi-3's, which has one for texts of up to 4,096 tokens, and another for longer ones."""
    rotation = {
        "rope_type": "longrope", "original_max_position_embeddings": 12, "rope_theta": 1e4,
        "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
    }  # fmt: skip
    size = {**SIZES["llama"], "max_position_embeddings": 64, "initializer_range": 0.3}
    model = decoder("phi3", **size, rope_parameters=rotation, original_max_position_embeddings=12)
    draft = like(model, 0.1)
    for length, new in ((4, 8), (13, 8)):
        ids = prompts(2, length)
        written = speculative_generate(model, ids, draft, new, 3, eos_token_id=[])
        assert written.tolist() == [greedy(model, row, new) for row in ids.tolist()]
    with pytest.raises(ValueError, match="another rotary embedding for texts of more than 12"):
        speculative_generate(model, prompts(2, 5), draft, 8, 3)


def test_a_sliding_window_is_refused():
    model = build("starcoder2", sliding_window=16)
    with pytest.raises(ValueError, match="cannot be cut back"):
        speculative_generate(model, prompts(), None, 8)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "bloom"])
def test_without_a_draft_windows_slide_and_positions_may_have_no_limit(kind):
    sizes = {
        "mistral": {**SIZES["llama"], "sliding_window": 8},
        "gemma3_text": {**SIZES["llama"], "sliding_window": 8, "head_dim": 8,
                        "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "max_position_embeddings": None},
    }  # fmt: skip
    SIZES[kind] = sizes[kind]
    model = build(kind)
    del SIZES[kind]
    ids = prompts(2)
    written = speculative_generate(model, ids, None, 20, draft_tokens=0)
    assert written.tolist() == [greedy(model, row, 20) for row in ids.tolist()]


def test_a_separate_draft_is_compared_at_the_granularities_that_are_set():
    verifier, draft = nest(build(), AXES["ffn"]), nest(build(seed=1), AXES["ffn"])
    set_granularity(verifier, "L")
    with pytest.raises(ValueError, match="more than the verifier's"):
        speculative_generate(verifier, prompts(), draft, 4)
    set_granularity(draft, "S")
    speculative_generate(verifier, prompts(), draft, 4)


AXES = {
    "ffn": {"ffn": (1 / 8, 1 / 4, 1 / 2, 1)},
    "heads": {"heads": (1 / 2, 1)},
    "depth": {"depth": (1 / 3, 2 / 3, 1)},
    "all": {"ffn": (1 / 4, 1), "heads": (1 / 2, 1), "depth": (2 / 3, 1)},
}


@pytest.mark.parametrize("share_cache", [True, False])
@pytest.mark.parametrize("axes", AXES)
def test_submodels_draft(axes, share_cache):
    model, record = nest(build(initializer_range=0.15), AXES[axes]), SpeculationRecord()
    ids = prompts()
    expected = [greedy(model, row, 40) for row in ids.tolist()]
    written = speculative_generate(model, ids, 0, 40, 3, share_cache, record=record)
    assert written.tolist() == expected
    assert 0 < record.acceptance < 1
    assert all(layer.granularity == len(layer.widths) - 1 for layer in model.nesting.layers)


def test_a_submodel_shares_the_cache_unless_it_has_fewer_heads(monkeypatch):
    seen = []
    monkeypatch.setattr(drafts.Reader, "read", spy(drafts.Reader.read, seen))
    for axes, shared in {"ffn": True, "heads": False, "depth": True, "all": False}.items():
        seen.clear()
        speculative_generate(nest(build(), AXES[axes]), prompts(), 0, 6)
        assert (len(set(map(id, seen))) == 1) is shared, axes


def spy(read, seen):
    def noted(self, *args, **kwargs):
        seen.append(self.cache)
        return read(self, *args, **kwargs)

    return noted


def test_any_granularity_may_verify():
    model = nest(build(initializer_range=0.15), AXES["ffn"])
    set_granularity(model, "L")
    ids = prompts(1)
    expected = greedy(model, ids[0].tolist(), 20)
    assert speculative_generate(model, ids, [0, 1, 2], 20)[0].tolist() == expected
    with pytest.raises(ValueError, match="would draft at 3; set_granularity"):
        speculative_generate(model, ids, [0, 0, 3], 20)


class TestCompiled:
    """With a cache of fixed size and compiled passes; compiled to Python here, which is quick."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        compiler = functools.partial(torch.compile, backend="eager")
        monkeypatch.setattr(drafts.torch, "compile", compiler)
        torch._dynamo.reset()

    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_writes_the_same_and_compiles_once(self, kind):
        model, ids, record = build(kind), prompts(), SpeculationRecord()
        texts = [greedy(model, row, 20) for row in ids.tolist()]
        graphs = []
        for _ in range(2):
            draft = like(model, 0.1)
            written = speculative_generate(model, ids, draft, 20, 2, compiled=True, record=record)
            assert written.tolist() == texts
            graphs.append(counters["stats"]["unique_graphs"])
        assert 0 < graphs[0] == graphs[1]
        assert 0 < record.accepted < record.tested

    @pytest.mark.parametrize(
        "axes, share_cache", [("ffn", True), ("ffn", False), ("depth", True), ("all", True)]
    )
    def test_submodels_draft(self, axes, share_cache):
        model = nest(build(initializer_range=0.15), AXES[axes])
        ids = prompts()
        expected = [greedy(model, row, 20) for row in ids.tolist()]
        written = speculative_generate(model, ids, 0, 20, 2, share_cache, compiled=True)
        assert written.tolist() == expected

    def test_prompts_of_unequal_length(self):
        model = build()
        rows = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5]]
        mask = torch.tensor([[0] * (7 - len(row)) + [1] * len(row) for row in rows])
        ids = torch.tensor([[0] * (7 - len(row)) + row for row in rows])
        draft = like(model, 0.1)
        written = speculative_generate(model, ids, draft, 30, 4, attention_mask=mask, compiled=True)
        for row, text in zip(rows, written.tolist(), strict=True):
            assert text[7 - len(row) :] == greedy(model, row, 30)

    @pytest.mark.parametrize("share_cache", [True, False])
    def test_a_window_that_is_not_reached(self, share_cache):
        model = nest(build("starcoder2", sliding_window=128), AXES["ffn"])
        ids = prompts()
        expected = [greedy(model, row, 20) for row in ids.tolist()]
        written = speculative_generate(model, ids, 0, 20, 2, share_cache, compiled=True)
        assert written.tolist() == expected
