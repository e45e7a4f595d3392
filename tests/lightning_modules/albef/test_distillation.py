"""What the student and its teacher are compared on: the same runs, without padding."""

import copy

import pytest
import torch

from lightning_modules.albef import Repair, skipped
from lightning_modules.albef.alignment import Pairs, align, fuse_pairs, replay
from lightning_modules.albef.distillation import (
    attention_scores,
    score_names,
    state_masks,
    state_names,
    tinybert,
)
from lightning_modules.albef.momentum import Momentum, Queue
from lightning_modules.pela import (
    Features,
    factorize,
    feature_distillation,
    low_rank_layers,
)
from tests.lightning_modules.albef.test_model import SIZES, small, tokens


def both_run(student, teacher, padding=0):
    """The student's step and the teacher's replay: features and masks."""
    torch.manual_seed(3)
    ids, mask = tokens(4)
    mask[1, 5:] = 0
    ids[1, 5:] = padding
    pairs = Pairs(torch.randn(4, 3, 16, 16), ids, mask, torch.arange(4))
    masked_ids = ids.clone()
    masked_ids[:, 2] = 4
    names = state_names(student) + score_names(student)
    with Features(student, names) as of_student, Features(teacher, names) as of_teacher:
        momentum, queue = Momentum(student), Queue(8, 12)
        aligned = align(student, momentum, queue, pairs, alpha=0.4)
        fuse_pairs(student, aligned, pairs.mask)
        student.masked_states(masked_ids, mask, aligned.image)
        with torch.no_grad():
            replay(teacher, pairs, aligned, masked_ids)
        features = of_student.take(), of_teacher.take()
    return features, state_masks(student, mask, aligned.text_negatives), aligned, pairs


def test_an_equal_teacher_is_at_distance_zero():
    """It has seen the same pairs, negatives and masked tokens, run for run."""
    student = small()
    (one, other), masks, *_ = both_run(student, copy.deepcopy(student))
    assert len(one) == len(other) == len(masks) + 2 + 2 * 2 * 5
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
    states = one[: len(masks)], other[: len(masks)]
    assert feature_distillation(*states, masks, "released") == 0
    assert tinybert(student, (one, other), masks, []) == 0


@pytest.mark.parametrize("kind", ["pela", "tinybert"])
def test_padding_takes_no_part(kind):
    student = small()
    torch.manual_seed(9)
    teacher = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    losses = []
    for padding in (0, 30):
        features, masks, *_ = both_run(student, teacher, padding)
        if kind == "pela":
            states = [side[: len(masks)] for side in features]
            losses.append(feature_distillation(*states, masks, "paper"))
        else:
            losses.append(tinybert(student, features, masks, []))
    assert losses[0] > 0
    torch.testing.assert_close(losses[0], losses[1])


def test_masks_lie_beside_their_features():
    student = small()
    (one, _), masks, aligned, pairs = both_run(student, copy.deepcopy(student))
    for feature, mask in zip(one, masks, strict=False):
        assert mask is None or mask.shape == feature.shape[:2]
    fused = masks[-2]  # the last fusion layer's first run: pairs, and both kinds of negatives
    assert torch.equal(fused[8:], pairs.mask[aligned.text_negatives])


def test_scores_are_those_of_the_attention():
    """Softmax of them, by hand, gives the layer's own output."""
    student = small()
    (one, _), masks, _, pairs = both_run(student, copy.deepcopy(student))
    scores = attention_scores(student, one[len(masks) :])
    assert len(scores) == 2 + 2 * 5
    layer, states = student.bert.layers[0].attention.self, one[3]  # of the embeddings, unmasked
    hidden = (pairs.mask == 0)[:, None, None, :]
    weights = scores[2].masked_fill(hidden, -torch.inf).softmax(-1)
    values = layer.value(states).unflatten(-1, (2, 16)).transpose(1, 2)
    expected = (weights @ values).transpose(1, 2).flatten(2)
    additive = torch.zeros(hidden.shape).masked_fill(hidden, -1e9)
    torch.testing.assert_close(layer(states, additive)[0], expected, rtol=1e-4, atol=1e-6)


def test_tinybert_by_hand():
    student, teacher = small(), small()
    with torch.no_grad():
        teacher.bert.embeddings.word_embeddings.weight.mul_(2)
    features, masks, *_ = both_run(student, teacher)
    logits, targets = torch.randn(3, 2), torch.randn(3, 2)
    expected = -(targets.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    for place, mask in enumerate(masks):
        squares = (features[0][place] - features[1][place]).square()
        expected = expected + (squares.mean() if mask is None else squares[mask == 1].mean())
    sides = [attention_scores(student, side[len(masks) :]) for side in features]
    texts = [mask for mask in masks if mask is not None][2:]
    for place, (one, other) in enumerate(zip(*sides, strict=True)):
        squares = (one - other).square()
        if place >= 2:
            mask = texts[place - 2]
            rows = [
                squares[row][:, : int(length), : int(length)].flatten()
                for row, length in enumerate(mask.sum(1))
            ]
            squares = torch.cat(rows)
        expected = expected + squares.mean()
    loss = tinybert(student, features, masks, [(logits, targets)])
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)


def test_a_low_rank_model_is_no_teacher(tmp_path):
    """Least of all the student itself, which a repair of its own checkpoint would begin with."""
    dense, repaired = tmp_path / "dense.pt", tmp_path / "repaired.pt"
    model = small()
    torch.save(model.state_dict(), dense)
    torch.save(factorize(model, 2.0, skip=skipped(model)).state_dict(), repaired)
    for start, teacher_from in ((repaired, None), (dense, repaired)):
        module = Repair(
            sizes=SIZES, queue_size=6, rwp_weight=0.0, init_from=start, teacher_from=teacher_from
        )
        refused = r"repaired\.pt is not the dense original \(.* is low-rank\).*model.teacher_from"
        with pytest.raises(ValueError, match=refused):
            module.build_teacher()
    module = Repair(sizes=SIZES, queue_size=6, init_from=repaired, teacher_from=dense)
    assert not low_rank_layers(module.build_teacher())
