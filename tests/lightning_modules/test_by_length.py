"""An encoder that runs texts by length has the outputs and gradients of the one that does not."""

import copy
import io

import pytest
import torch

from lightning_modules import by_length
from lightning_modules.backbones import build_text
from lightning_modules.by_length import run_by_length

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def texts(count=21, size=30, left=False):
    """Ids and masks of texts of 1 to 30 words, one of them empty."""
    lengths = torch.arange(count) * 7 % (size + 1)
    lengths[0] = size
    mask = (torch.arange(size) < lengths[:, None]).long()
    mask = mask.flip(1) if left else mask
    ids = torch.randint(2, 50, (count, size)).where(mask.bool(), 1)
    return {"input_ids": ids, "attention_mask": mask}


def built(architecture="bert", task="classification"):
    torch.manual_seed(0)
    args = {**SIZES, "num_labels": 3} if task == "classification" else SIZES
    return build_text(architecture, task, args).double()


class Sizes:
    """Counts the tokens that an encoder computes, batch by batch."""

    def __init__(self, model):
        self.shapes = []
        embeddings = model.get_input_embeddings()
        embeddings.register_forward_hook(lambda _m, args, _o: self.shapes.append(args[0].shape))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("task", ["classification", "masked"])
def test_logits_and_gradients_are_the_same(architecture, task, left):
    plain, model = built(architecture, task), built(architecture, task)
    run_by_length(model.base_model)
    inputs = texts(left=left)
    words = inputs["attention_mask"].bool()
    words = words if task == "masked" else words.any(1)
    for one in (plain, model):
        one(**inputs).logits[words].square().sum().backward()
    with torch.no_grad():
        expected, found = plain(**inputs).logits[words], model(**inputs).logits[words]
    torch.testing.assert_close(found, expected)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None
        else:
            torch.testing.assert_close(other.grad, one.grad, msg=name, atol=1e-9, rtol=1e-6)


def test_parts_are_as_long_as_their_longest_text():
    model = built()
    run_by_length(model.base_model)
    sizes = Sizes(model)
    inputs = texts(20)
    model(**inputs)
    lengths = inputs["attention_mask"].sum(1).clamp(min=1).sort().values
    assert sizes.shapes == [(8, lengths[7]), (8, lengths[15]), (4, lengths[19])]


def test_hidden_states_have_the_shape_of_the_batch():
    model = built().base_model
    run_by_length(model)
    inputs = texts()
    inputs = {name: one[1:] for name, one in inputs.items()}  # the first text is as long as a batch
    assert inputs["attention_mask"].sum(1).max() < 30
    hidden = model(**inputs).last_hidden_state
    assert hidden.shape == (20, 30, 16)
    assert hidden[inputs["attention_mask"] == 1].all() and hidden.isfinite().all()


@pytest.mark.parametrize(
    "change",
    [
        {"attention_mask": None},
        {"attention_mask": torch.ones(21, 1, 30, 30)},
        {"position_ids": torch.arange(30)[None]},
        {"output_hidden_states": True},
    ],
)
def test_other_inputs_run_as_before(change):
    plain, model = built().base_model, built().base_model
    run_by_length(model)
    sizes = Sizes(model)
    inputs = {**texts(), **change}
    torch.testing.assert_close(
        model(**inputs).last_hidden_state, plain(**inputs).last_hidden_state, atol=0, rtol=0
    )
    assert sizes.shapes == [(21, 30)]


def test_on_another_device_it_runs_as_before():
    seen = []

    class Encoder(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            seen.append(input_ids.shape)

    encoder = Encoder()
    run_by_length(encoder)
    encoder(**{name: value.to("meta") for name, value in texts().items()})
    assert seen == [(21, 30)]


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_runs_by_length_with_its_own_weights(copied):
    model, inputs = built().base_model, texts()
    run_by_length(model)
    other = copied(model)
    sizes = Sizes(other)
    expected = model(**inputs).last_hidden_state
    assert torch.equal(other(**inputs).last_hidden_state, expected)
    assert [shape[0] for shape in sizes.shapes] == [8, 8, 5]
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    assert not other(**inputs).last_hidden_state.any()
    assert torch.equal(model(**inputs).last_hidden_state, expected)


def test_a_part_has_a_few_texts(monkeypatch):
    monkeypatch.setattr(by_length, "TEXTS", 3)
    model = built()
    run_by_length(model.base_model)
    sizes = Sizes(model)
    model(**texts(7))
    assert [shape[0] for shape in sizes.shapes] == [3, 3, 1]
