"""Which tokens are hidden, and the loss against its formula and transformers'."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from lightning_modules.self_distillation.masked_text import hidden_logits, mask_tokens, token_loss

CLS, SEP, PAD, MASK, VOCABULARY = 0, 1, 2, 3, 30
SPECIAL = [CLS, SEP, PAD, MASK]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def text(examples=400, length=40):
    ids = torch.randint(4, VOCABULARY, (examples, length), generator=seeded())
    lengths = torch.randint(5, length + 1, (examples,), generator=seeded(1))
    attention = torch.arange(length) < lengths[:, None]
    ids[:, 0] = CLS
    ids = ids.scatter(1, lengths[:, None] - 1, SEP).masked_fill(~attention, PAD)
    return ids, attention.long()


def mask(ids, attention, **settings):
    return mask_tokens(ids, attention, MASK, SPECIAL, VOCABULARY, **settings)


def test_shares_of_the_hidden_tokens():
    ids, attention = text()
    corrupted, labels = mask(ids, attention, probability=0.3, generator=seeded())
    hidden = labels != -100
    ordinary = ids >= 4
    assert not (hidden & ~ordinary).any()  # nor padding, which has a special id here
    assert torch.equal(labels[hidden], ids[hidden])
    assert torch.equal(corrupted[~hidden], ids[~hidden])

    def close(share, expected, count):
        return abs(share - expected) < 5 * (expected * (1 - expected) / count) ** 0.5

    count = int(ordinary.sum())
    assert close(hidden.sum() / count, 0.3, count)
    masked, kept = corrupted[hidden] == MASK, corrupted[hidden] == ids[hidden]
    count = int(hidden.sum())
    assert close(masked.double().mean(), 0.8, count)
    assert close(kept.double().mean(), 0.1 + 0.1 / 26, count)  # a draw may be the token itself
    drawn = corrupted[hidden][~masked & ~kept]
    assert set(drawn.tolist()) == set(range(4, VOCABULARY))


def test_padding_is_known_by_the_attention_mask():
    ids, attention = text()
    ids = ids.masked_fill(attention == 0, 7)  # an ordinary id
    _, labels = mask(ids, attention, probability=0.9)
    assert (labels[attention == 0] == -100).all()
    _, labels = mask(ids, None, probability=0.9)
    assert (labels[attention == 0] != -100).any()


def test_equation_2_to_the_letter():
    ids, attention = text()
    corrupted, labels = mask(ids, attention, as_mask=1.0, as_random=0.0)
    assert (corrupted[labels != -100] == MASK).all() and (labels != -100).any()


def test_the_seed_decides():
    ids, attention = text()
    one, two, other = (mask(ids, attention, generator=seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probability": 0.0}, "mask probability is 0.0: expected one between 0 and 1"),
        ({"as_mask": 0.8, "as_random": 0.3}, "as_mask 0.8 and as_random 0.3.*at most 1 together"),
        ({"mask_id": None}, "mask_id is None: expected an id below vocab_size 30"),
        ({"special_ids": range(30)}, "all 30 ids are special"),
    ],
)
def test_bad_settings(settings, message):
    known = {"mask_id": MASK, "special_ids": SPECIAL, "vocab_size": VOCABULARY}
    with pytest.raises(ValueError, match=message):
        mask_tokens(*text(), **(known | settings))


def test_the_loss_is_its_formula():
    logits = torch.randn(3, 4, 5, dtype=torch.float64, generator=seeded())
    labels = torch.tensor([[-100, 2, -100, 4], [0, -100, -100, -100], [-100] * 4])
    chances = logits.exp() / logits.exp().sum(-1, keepdim=True)
    first = -(chances[0, 1, 2].log() + chances[0, 3, 4].log()) / 2
    expected = (first - chances[1, 0, 0].log()) / 2  # the third example hides nothing
    torch.testing.assert_close(token_loss(logits[labels != -100], labels), expected)


def test_nothing_hidden_is_no_loss():
    logits = torch.randn(0, 5, requires_grad=True)
    loss = token_loss(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss == 0 and logits.grad is not None


MODELS = {
    "bert": {},
    "roberta": {"max_position_embeddings": 40},
    "distilbert": {"hidden_dim": 32},
    "electra": {"embedding_size": 8},
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_head_sees_hidden_tokens_only(kind):
    """The same logits and gradients as the whole model's, picked afterwards."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}
    size |= {"num_attention_heads": 2, "intermediate_size": 32, "pad_token_id": PAD}
    config = AutoConfig.for_model(kind, **size | MODELS[kind])
    model = AutoModelForMaskedLM.from_config(config).double().eval()
    ids, attention = text(6, 20)
    corrupted, labels = mask(ids, attention, probability=0.3, generator=seeded())
    ours = hidden_logits(model, corrupted, labels, attention_mask=attention)
    whole = model(input_ids=corrupted, attention_mask=attention).logits
    assert whole.shape[:2] == ids.shape  # nothing of it stays on the model
    torch.testing.assert_close(ours, whole[labels != -100])
    weight = next(model.base_model.parameters())
    one, other = (
        torch.autograd.grad(logits.square().sum(), weight)[0]
        for logits in (ours, whole[labels != -100])
    )
    torch.testing.assert_close(one, other)
    nothing = hidden_logits(model, corrupted, torch.full_like(labels, -100))
    assert nothing.shape == (0, VOCABULARY)


def test_a_transformers_model_in_autocast():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = BertForMaskedLM(config).eval()
    ids, attention = text(1, 20)  # of one example: its tokens' mean is transformers' loss
    corrupted, labels = mask(ids, attention, probability=0.5, generator=seeded())
    theirs = model(input_ids=corrupted, attention_mask=attention, labels=labels).loss
    logits = hidden_logits(model, corrupted, labels, attention_mask=attention)
    ours = token_loss(logits, labels)
    torch.testing.assert_close(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        logits = hidden_logits(model, corrupted, labels, attention_mask=attention)
        loss = token_loss(logits, labels)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert abs(loss - ours) < 0.05
