"""Beam search: against all continuations there are, against one prompt at a time, with VeRA."""

import cpu_torchvision  # noqa: F401

import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForCausalLM,
)

from datamodules import E2EData
from datamodules.tokens import train_tokenizer
from lightning_modules.apet import Apet, attach
from lightning_modules.apet import prompt as soft_tokens
from lightning_modules.decoding import NoRepeatAfterPrompt, generate
from lightning_modules.matformer import speculative_generate
from lightning_modules.vera import add_vera, merge


def gpt2(vocab_size: int, spread: float = 0.5, seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=256,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=None,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config).double()


def words(*names: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words; the first ends a text."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=names[0], pad_token=names[0]
    )


def prompt(*ids: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}


def best_of_all(
    model: GPT2LMHeadModel, ids: list[int], ends: set[int], longest: int, n: int
) -> list[int]:
    """The best of all continuations, each scored as LoRA's code does; its last token included."""
    scores = {}
    for length in range(1, longest + 1):
        for tail in itertools.product(range(model.config.vocab_size), repeat=length):
            if ends & set(tail[:-1]) or (length < longest and tail[-1] not in ends):
                continue
            logits = model(torch.tensor([[*ids, *tail]])).logits[0].detach()
            total = 0.0
            for t, token in enumerate(tail):
                now = logits[len(ids) - 1 + t].clone()
                for start in range(t - n + 1 if n else 0):  # n-grams among tail[:t]
                    if tail[start : start + n - 1] == tail[t - n + 1 : t]:
                        now[tail[start + n - 1]] = -torch.inf
                total += F.log_softmax(now, -1)[token].item()
            scores[tail] = total / length**0.8
    return list(max(scores, key=lambda tail: scores[tail]))


@pytest.mark.parametrize("n", [0, 2])
def test_as_many_beams_as_continuations_find_the_best_of_all(n: int) -> None:
    tokenizer = words("</s>", "a", "b", "c")
    found = []
    for seed in range(6):
        model = gpt2(4, spread=0.3, seed=seed).eval()
        ids = [1, 2, 1, 2, 3]
        best = best_of_all(model, ids, {0}, 4, n)
        text = generate(
            model, prompt(*ids), tokenizer, beams=108, max_new_tokens=4, no_repeat_ngram=n,
            length_penalty=0.8,
        )  # fmt: skip
        assert text == [tokenizer.decode(best, skip_special_tokens=True).strip()]
        found.append(best)
    assert len(set(map(len, found))) > 1  # the length penalty has a say
    repeats = [len(set(itertools.pairwise(tail))) < len(tail) - 1 for tail in found]
    assert any(repeats) == (n == 0)


def beam_search(
    model: GPT2LMHeadModel, ids: list[int], end: int, beams: int, longest: int, penalty: float
) -> list[int]:
    """Beam search that goes on while a beam is open; scored as in `best_of_all`."""
    opened: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done = {}
    for length in range(1, longest + 1):
        texts = torch.tensor([[*ids, *tail] for tail, _ in opened])
        logits = F.log_softmax(model(texts).logits[:, -1].detach(), -1)
        longer = [
            ((*tail, token), total + score)
            for (tail, total), scores in zip(opened, logits.tolist(), strict=True)
            for token, score in enumerate(scores)
        ]
        longer.sort(key=lambda one: -one[1])
        done |= {tail: total / length**penalty for tail, total in longer[:beams] if tail[-1] == end}
        opened = [one for one in longer if one[0][-1] != end][:beams]
    done |= {tail: total / longest**penalty for tail, total in opened}
    return list(max(done, key=lambda tail: done[tail]))


def test_beams_go_on_while_a_longer_text_may_be_better() -> None:
    """Under a high length penalty most texts are better than one that has ended already."""
    tokenizer = words("</s>", "a", "b", "c")
    lengths = set()
    for seed in range(20):
        model = gpt2(4, spread=0.6, seed=seed).eval()
        best = beam_search(model, [1, 2, 3], 0, beams=2, longest=12, penalty=3.0)
        text = generate(
            model, prompt(1, 2, 3), tokenizer, beams=2, max_new_tokens=12, length_penalty=3.0
        )
        assert text == [tokenizer.decode(best, skip_special_tokens=True).strip()]
        lengths.add(len(best))
    assert len(lengths) > 1


def test_only_what_was_generated_may_not_be_repeated() -> None:
    torch.manual_seed(0)
    length, size, prefix = 30, 3, 12
    ids = torch.randint(4, (50, prefix + length))
    scores = NoRepeatAfterPrompt(size, prefix)(ids, torch.zeros(50, 4))
    banned = 0
    for row, given in zip(scores, ids[:, prefix:].tolist(), strict=True):
        grams = [tuple(given[i : i + size]) for i in range(length - size + 1)]
        expected = {gram[-1] for gram in grams if list(gram[:-1]) == given[1 - size :]}
        assert {token for token in range(4) if row[token] == -torch.inf} == expected
        banned += len(expected)
    assert 0 < banned < 200
    assert NoRepeatAfterPrompt(size, 40)(ids, torch.zeros(50, 4)).eq(0).all()


@pytest.fixture(scope="module")
def data() -> E2EData:
    return E2EData(source="generated", vocab_size=300, eval_batch_size=4, eval_limit=4)


def test_a_batch_is_as_one_by_one_with_vera_too(data: E2EData) -> None:
    model = gpt2(data.vocab_size)
    settings = {**data.decoding, "beams": 3, "max_new_tokens": 8}
    batch = next(iter(data.prompt_dataloader("test")))
    assert not batch["attention_mask"].all(0).all()  # prompts differ in length

    def texts(**changes: torch.Tensor) -> list[str]:
        return generate(model, batch | changes, data.tokenizer, **settings)

    def one_by_one() -> list[str]:
        rows = [ids[mask.bool()].tolist() for ids, mask, _ in zip(*batch.values(), strict=True)]
        return [generate(model, prompt(*row), data.tokenizer, **settings)[0] for row in rows]

    base = texts()
    assert base == one_by_one() and all(base)
    assert base != texts(attention_mask=torch.ones_like(batch["attention_mask"]))

    add_vera(model, 4, ["c_attn"])
    assert texts() == base
    for name, parameter in model.named_parameters():
        if "vera_b" in name:
            torch.nn.init.normal_(parameter)
    adapted = texts()
    assert adapted == one_by_one() != base
    merge(model)
    assert texts() == adapted


def test_neither_dropout_nor_what_a_published_model_brings_has_a_say(data: E2EData) -> None:
    model = gpt2(data.vocab_size).train()
    batch = next(iter(data.prompt_dataloader("test")))

    def texts() -> list[str]:
        return generate(model, batch, data.tokenizer, beams=2, max_new_tokens=8)

    first = texts()
    assert texts() == first
    assert model.training
    defaults = {"do_sample": True, "temperature": 9.0, "repetition_penalty": 9.0}
    model.generation_config.update(**defaults, no_repeat_ngram_size=1, eos_token_id=5)
    assert texts() == first


@pytest.mark.parametrize("defaults", [{"sequence_bias": [[[3], 1e6]]}, {"guidance_scale": 9.0}])
def test_no_other_default_of_a_published_model_has_a_say(defaults) -> None:
    tokenizer, model = words("end", "one", "two", "three"), gpt2(4)
    first = generate(model, prompt(1, 2), tokenizer, max_new_tokens=8)
    model.generation_config.update(**defaults)
    published = model.generation_config
    assert generate(model, prompt(1, 2), tokenizer, max_new_tokens=8) == first
    assert model.generation_config is published


@pytest.mark.parametrize(
    "bans", [{"suppress_tokens": [2]}, {"bad_words_ids": [[2]]}, {"begin_suppress_tokens": [2]}]
)
def test_a_published_model_s_banned_tokens_are_not_written(bans) -> None:
    """Marian's padding, for example, on which its logits are high."""
    tokenizer, model = words("end", "one", "two", "three"), gpt2(4)
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.tensor([0.0, 0, 1e6, 1e5]).double())
    assert generate(model, prompt(1, 2), tokenizer, max_new_tokens=3) == ["two two two"]
    model.generation_config.update(**bans)
    later = "two" if "begin_suppress_tokens" in bans else "three"
    expected = [f"three {later} {later}"]
    assert generate(model, prompt(1, 2), tokenizer, max_new_tokens=3) == expected
    [name] = bans
    with pytest.raises(ValueError, match=rf"bans tokens \({name}\): set {name} to None"):
        speculative_generate(model, torch.tensor([[1, 2]]), None, 3, 0)


@pytest.mark.parametrize("name", ["min_length", "min_new_tokens"])
def test_a_published_model_s_least_length_has_no_say(name: str) -> None:
    """A summariser's, such as the 56 tokens of BART's for news."""
    tokenizer = words("end", "one", "two", "three")
    model = gpt2(4)
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.tensor([1e6, 0, 0, 0]).double())
    for beams in (1, 2):
        model.generation_config.update(**{name: 0})
        assert generate(model, prompt(1, 2), tokenizer, beams, max_new_tokens=8) == [""]
        model.generation_config.update(**{name: 6})
        assert generate(model, prompt(1, 2), tokenizer, beams, max_new_tokens=8) == [""]


@pytest.mark.parametrize("one_token", [True, False])
def test_a_blank_line_ends(one_token: bool) -> None:
    text = " Good food.\n\n Yes."
    tokenizer = train_tokenizer([text] * 9, 290 if one_token else 259)  # 259: bytes alone
    blank = tokenizer.encode("\n\n", add_special_tokens=False)
    assert len(blank) == (1 if one_token else 2)
    good, yes = (tokenizer.encode(part, add_special_tokens=False) for part in text.split("\n\n"))
    sequence = torch.tensor([[1, *good, *blank, *yes, 2]])
    model = gpt2(len(tokenizer), spread=0.1).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(60):
        loss = model(sequence, labels=sequence).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = []
    model.register_forward_hook(lambda *_: steps.append(1))
    assert generate(model, prompt(1), tokenizer, stop="\n\n") == ["Good food."]
    assert len(steps) == (len(good) + 1 if one_token else sequence.shape[1] - 1)
    for beams in (1, 4):
        assert generate(model, prompt(1), tokenizer, beams, stop="\n\n") == ["Good food."]
        assert generate(model, prompt(1), tokenizer, beams) == [text.strip()]


@pytest.mark.parametrize("prompted", [False, True])
def test_positions_that_start_behind_the_padding_s_index(prompted: bool) -> None:
    """RoBERTa's: transformers counts from 0 in `generate`, and from 2 in the model itself."""
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.5, is_decoder=True,
    )  # fmt: skip
    model = XLMRobertaForCausalLM(config).double().eval()
    if prompted:
        attach(model, Apet(soft_tokens(3)))
    tokenizer = words(*(f"w{number}" for number in range(20)))
    tokenizer.pad_token, rows = "w1", [[3, 4, 5], [6, 5, 9, 2, 6, 5, 3]]
    expected = []
    for row in rows:
        ids = list(row)
        while len(ids) < len(row) + 12 and ids[-1] != 0:
            with torch.no_grad():
                logits = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits
            ids.append(int(logits[0, -1].argmax()))
        expected.append(tokenizer.decode(ids[len(row) :], skip_special_tokens=True).strip())
    padded = {
        "input_ids": torch.tensor([[1] * 4 + rows[0], rows[1]]),
        "attention_mask": torch.tensor([[0] * 4 + [1] * 3, [1] * 7]),
    }
    assert generate(model, padded, tokenizer, max_new_tokens=12) == expected
    assert generate(model, padded, tokenizer, 2, 12) == [
        generate(model, prompt(*row), tokenizer, 2, 12)[0] for row in rows
    ]


def bart() -> tuple[BartForConditionalGeneration, PreTrainedTokenizerFast]:
    torch.manual_seed(1)
    config = BartConfig(
        vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, init_std=0.5,
        max_position_embeddings=8, eos_token_id=0, pad_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    tokenizer = words(*(f"w{number}" for number in range(20)))
    return BartForConditionalGeneration(config).double(), tokenizer


def test_an_encoder_decoder_reads_no_padding() -> None:
    model, tokenizer = bart()
    rows = [[2, 3, 4, 5, 6], [7, 8]]
    ids = torch.tensor([rows[0], [0, 0, 0, *rows[1]]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    alone = [generate(model, prompt(*row), tokenizer, 2, 6)[0] for row in rows]
    assert generate(model, batch, tokenizer, 2, 6) == alone and alone[0] != alone[1]


def test_an_encoder_decoder_s_texts_fit_its_positions() -> None:
    """BART's, which has as many for what it reads as for what it writes."""
    model, tokenizer = bart()
    assert len(generate(model, prompt(*range(2, 10)), tokenizer, max_new_tokens=8)) == 1
    for length, new in ((9, 8), (8, 9)):
        said = f"{length} tokens and max_new_tokens={new} are more than the 8 positions"
        with pytest.raises(ValueError, match=said):
            generate(model, prompt(*range(2, 2 + length)), tokenizer, max_new_tokens=new)


def test_bad_prompts(data: E2EData) -> None:
    model = gpt2(data.vocab_size)
    right = {"input_ids": torch.tensor([[3, 0]]), "attention_mask": torch.tensor([[1, 0]])}
    with pytest.raises(ValueError, match="A prompt ends in padding, expected padding on the left"):
        generate(model, right, data.tokenizer)
    with pytest.raises(ValueError, match="200 tokens and max_new_tokens=64 .* the 256 positions"):
        generate(model, prompt(*[3] * 200), data.tokenizer)
    attach(model, Apet(soft_tokens(8)))
    assert len(generate(model, prompt(*[3] * 184), data.tokenizer)) == 1
    with pytest.raises(ValueError, match="185 tokens, 8 soft tokens .* the 256 positions"):
        generate(model, prompt(*[3] * 185), data.tokenizer)
