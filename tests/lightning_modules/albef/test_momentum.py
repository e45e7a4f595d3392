"""The momentum model is the moving average, and the queue keeps its order."""

import pytest
import torch
from torch import nn

from lightning_modules.albef.alignment import Pairs, align, fuse_pairs, masked_token_loss
from lightning_modules.albef.losses import matching_loss
from lightning_modules.albef.momentum import NO_ID, Momentum, Queue, check_queue
from lightning_modules.self_distillation.masked_text import mask_tokens
from tests.lightning_modules.albef.test_model import small, tokens


def test_momentum_is_the_moving_average():
    torch.manual_seed(0)
    online = nn.Linear(3, 2).double()
    momentum = Momentum(online, decay=0.9)
    expected = online.weight.detach().clone()
    for _ in range(5):
        with torch.no_grad():
            online.weight.add_(torch.randn_like(online.weight))
        momentum.update(online)
        expected = 0.9 * expected + 0.1 * online.weight.detach()
    torch.testing.assert_close(momentum.model.weight, expected, rtol=1e-14, atol=1e-15)
    assert not any(p.requires_grad for p in momentum.parameters())
    assert not momentum.train().model.training


def test_the_queue_overwrites_the_oldest():
    queue = Queue(5, 2)
    assert (queue.idx_queue == NO_ID).all()
    torch.testing.assert_close(queue.image_queue.norm(dim=0), torch.ones(5))
    for start, count in ((0, 3), (3, 3), (6, 1)):  # the second wraps; the last is a remainder
        ids = torch.arange(start, start + count)
        rows = ids[:, None].float().expand(-1, 2)
        queue.add(rows, rows + 100, ids)
    assert queue.idx_queue.tolist() == [[5, 6, 2, 3, 4]]
    assert queue.image_queue[0].tolist() == [5, 6, 2, 3, 4]
    assert queue.text_queue[1].tolist() == [105, 106, 102, 103, 104]
    assert queue.queue_ptr.item() == 2
    with pytest.raises(ValueError, match="queue_size is 5, expected at least the 6 pairs"):
        queue.add(torch.ones(6, 2), torch.ones(6, 2), torch.arange(6))


def test_a_queue_that_batches_do_not_fill_is_refused():
    check_queue(64, 16, 2)
    with pytest.raises(ValueError, match="queue_size is 100.* 32 pairs .* to 96 or 128"):
        check_queue(100, 16, 2)
    with pytest.raises(ValueError, match="set model.queue_size to 32"):
        check_queue(20, 16, 2)


def batch():
    torch.manual_seed(3)
    ids, mask = tokens(4)
    ids[:, 0] = 2
    mask[1, 5:] = 0
    return Pairs(torch.randn(4, 3, 16, 16), ids, mask, torch.tensor([1, 2, 2, 3]))


def test_the_momentum_model_steps_before_it_is_used():
    model, pairs = small(), batch()
    momentum, queue = Momentum(model, decay=0.5), Queue(8, 12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    midway = Momentum(momentum.model, decay=0.5)
    midway.update(model)
    align(model, momentum, queue, pairs, alpha=0.4)
    expected = midway.model.project_image(midway.model.encode_image(pairs.images))
    torch.testing.assert_close(queue.image_queue[:, :4].T, expected)
    assert queue.idx_queue[0, :4].tolist() == [1, 2, 2, 3]


def test_temperature_is_put_back_into_its_range():
    model, pairs = small(), batch()
    with torch.no_grad():
        model.temp.fill_(-1.0)
    align(model, Momentum(model), Queue(8, 12), pairs, alpha=0.4)
    assert model.temp.item() == pytest.approx(0.001)


def losses(model, momentum, queue, pairs):
    torch.manual_seed(4)
    aligned = align(model, momentum, queue, pairs, alpha=0.4)
    fused, labels = fuse_pairs(model, aligned, pairs.mask)
    matching = matching_loss(model.match(fused), labels)
    ids, hidden = mask_tokens(pairs.ids, pairs.mask, 4, [2], 50, probability=0.5)
    states = model.masked_states(ids, pairs.mask, aligned.image)
    with torch.no_grad():
        states_m = momentum.model.masked_states(ids, pairs.mask, aligned.image_m)
    tokens_loss = masked_token_loss(model, momentum, states, states_m, hidden, alpha=0.4)
    return {"itc": aligned.loss, "itm": matching, "mlm": tokens_loss}


@pytest.mark.parametrize("name", ["itc", "itm", "mlm"])
def test_a_step_lowers_each_loss(name):
    model, pairs = small(), batch()
    momentum, queue = Momentum(model), Queue(8, 12)
    state = {k: v.clone() for k, v in queue.state_dict().items()}
    before = losses(model, momentum, queue, pairs)[name]
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)
    queue.load_state_dict(state)
    # the averages stay where they were, so that the targets do
    momentum.decay = 1.0
    assert losses(model, momentum, queue, pairs)[name] < before


def test_fused_pairs_are_the_pair_and_its_two_negatives():
    model, pairs = small(), batch()
    torch.manual_seed(0)
    aligned = align(model, Momentum(model), Queue(8, 12), pairs, alpha=0.4)
    fused, labels = fuse_pairs(model, aligned, pairs.mask)
    assert labels.tolist() == [1] * 4 + [0] * 8
    ids = pairs.index
    for row in range(4):
        image, text = int(aligned.image_negatives[row]), int(aligned.text_negatives[row])
        assert ids[image] != ids[row] and ids[text] != ids[row]
        for place, (t, i) in ((row, (row, row)), (4 + row, (row, image)), (8 + row, (text, row))):
            one = model.fuse(aligned.text[[t]], pairs.mask[[t]], aligned.image[[i]])
            torch.testing.assert_close(fused[place], one[0], rtol=1e-4, atol=1e-5)


def test_every_parameter_learns_in_pretraining():
    """DDP waits for all of them."""
    model, pairs = small(), batch()
    sum(losses(model, Momentum(model), Queue(8, 12), pairs).values()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
