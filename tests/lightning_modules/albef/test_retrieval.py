"""Retrieval's metric and re-ranking, answers and Grad-CAM, each against a calculation by hand."""

import pytest
import torch

from lightning_modules.albef.answers import answer_loss, rank_answers
from lightning_modules.albef.grounding import choose_box, grad_cam, overlap
from lightning_modules.albef.retrieval import Gallery, encode, recall, rerank
from tests.lightning_modules.albef.test_model import small, tokens


def test_recall_by_hand():
    scores = torch.tensor(
        [
            [0.9, 0.8, 0.1, 0.0],  # its texts 0 and 1 are first and second
            [0.9, 0.1, 0.5, 0.7],  # its text 2 is third
            [0.4, 0.3, 0.2, 0.4],  # its text 3 shares the first place
        ]
    )
    images, texts = torch.tensor([5, 6, 7]), torch.tensor([5, 5, 6, 7])
    assert recall(scores, images, texts, at=(1, 2, 3)) == pytest.approx([1 / 3, 2 / 3, 1.0])
    # the first text's image shares its place with another, the last one's is second
    assert recall(scores.T, texts, images, at=(1, 2)) == pytest.approx([2 / 4, 4 / 4])


def test_a_diverged_model_recalls_nothing():
    scores = torch.full((3, 20), torch.nan)
    assert recall(scores, torch.arange(3), torch.arange(20)) == [0, 0, 0]


@pytest.fixture
def searched():
    model, (ids, mask) = small("retrieval"), tokens(6)
    images, owners = torch.randn(3, 3, 16, 16), torch.tensor([0, 0, 1, 1, 2, 2])
    mask[1, 4:] = 0
    return model, encode(model, images, torch.arange(3), ids, mask, owners)


@pytest.mark.parametrize("by_text", [False, True])
def test_reranking_scores_the_most_similar_pairs_by_their_match(searched, by_text):
    model, gallery = searched
    scores = rerank(model, gallery, k=2, by_text=by_text)
    similarity = gallery.image_features @ gallery.text_features.T
    similarity = similarity.T if by_text else similarity
    assert scores.shape == similarity.shape
    for query in range(len(scores)):
        order = similarity[query].argsort(descending=True)
        for place, key in enumerate(order.tolist()):
            text, image = (query, key) if by_text else (key, query)
            if place < 2:
                fused = model.fuse(
                    gallery.text_states[[text]],
                    gallery.text_mask[[text]],
                    gallery.image_states[[image]],
                )
                logits = model.match(fused)[0]
                expected = (logits[1] - logits[0]).item()
                assert scores[query, key].item() == pytest.approx(expected, abs=1e-5)
        # those that were not fused come behind all that were, by similarity
        assert set(scores[query].topk(2).indices.tolist()) == set(order[:2].tolist())
        rest = [key for key in scores[query].argsort(descending=True).tolist() if key in order[2:]]
        assert rest == order[2:].tolist()
    rest, expected = (  # similarities that differ by little do not become equal
        one.topk(one.shape[1]).values[:, 2:] - one.amin(1, keepdim=True)
        for one in (scores, similarity)
    )
    torch.testing.assert_close(rest, expected)
    some = rerank(model, gallery, k=2, by_text=by_text, rows=[2, 0])
    torch.testing.assert_close(some, scores[[2, 0]])
    torch.testing.assert_close(rerank(model, gallery, k=0, by_text=by_text), similarity)


def test_galleries_of_different_lengths_are_joined(searched):
    model, gallery = searched
    ids, mask = tokens(1, length=3)
    other = encode(
        model, torch.randn(1, 3, 16, 16), torch.tensor([-100]), ids, mask, torch.tensor([-100])
    )
    joined = Gallery.of([gallery, other])
    assert (
        joined.text_states.shape == (7, 7, 32) and joined.text_mask[6].tolist() == [1] * 3 + [0] * 4
    )
    back = joined.gathered().valid()
    for name, value in vars(gallery).items():
        assert torch.equal(getattr(back, name), value), name


def test_grad_cam_is_autograds():
    """The attention is written out here, from the layer's own weights."""
    model, (ids, mask) = small("retrieval"), tokens()
    mask[1, 5:] = 0
    images = torch.randn(2, 3, 16, 16)
    block = 3
    heat = grad_cam(model, images, ids, mask, block)
    assert heat.shape == (2, 2, 2)
    layer = model.bert.layers[block]
    attention = layer.crossattention.self
    kept = []

    def by_hand(module, args, kwargs, output):
        hidden, context = args[0], kwargs["encoder_hidden_states"]
        split = lambda x: x.unflatten(-1, (2, 16)).transpose(1, 2)  # noqa: E731
        q, k, v = (
            split(module.query(hidden)),
            split(module.key(context)),
            split(module.value(context)),
        )
        weights = (q @ k.transpose(2, 3) / 4).softmax(-1)
        kept.append(weights)
        return (weights @ v).transpose(1, 2).flatten(2), weights

    handle = attention.register_forward_hook(by_hand, with_kwargs=True)
    fused = model.fuse(model.encode_text(ids, mask), mask, model.encode_image(images))
    handle.remove()
    [gradient] = torch.autograd.grad(model.match(fused)[:, 1].sum(), kept)
    product = kept[0] * gradient.clamp(min=0)
    for row in range(2):
        length = int(mask[row].sum())
        expected = product[row, :, :length, 1:].mean(0).mean(0).reshape(2, 2)
        torch.testing.assert_close(heat[row], expected, rtol=1e-4, atol=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert attention.config._attn_implementation == "sdpa" and not attention._forward_hooks
    with torch.inference_mode():  # as Lightning validates
        torch.testing.assert_close(grad_cam(model, images, ids, mask, block), heat)
    with pytest.raises(ValueError, match="block is 1, expected a fusion layer, 2 to 4"):
        grad_cam(model, images, ids, mask, 1)


def test_the_box_with_most_heat_for_its_size():
    heat = torch.zeros(4, 4)
    heat[:2, 2:] = 1.0
    boxes = torch.tensor([[0.0, 0, 40, 40], [40, 0, 40, 40], [0, 0, 80, 80]])
    assert choose_box(heat, (80, 80), boxes) == 1
    assert overlap(boxes[0], boxes[1]) == 0 and overlap(boxes[0], boxes[0]) == 1
    assert overlap(boxes[0], boxes[2]) == pytest.approx(0.25)


def test_answers_are_ranked_by_their_likelihood():
    model, (ids, mask) = small("vqa"), tokens()
    question = model.encode_question(torch.randn(2, 3, 16, 16), ids, mask)
    answers = torch.tensor([[2, 7, 3, 0], [2, 8, 9, 3], [2, 10, 3, 0]])
    real = (answers != 0).long()
    scores = rank_answers(model, question, mask, answers, real)
    for row in range(2):
        for place in range(3):
            answer = answers[place][real[place] == 1]
            one = answer[None], torch.ones(1, len(answer)), question[[row]], mask[[row]]
            log_p = model.decode(*one)[0].log_softmax(-1)
            expected = sum(log_p[i, answer[i + 1]] for i in range(len(answer) - 1))
            torch.testing.assert_close(scores[row, place], expected, rtol=1e-4, atol=1e-4)
    fewer = rank_answers(model, question, mask, answers, real, k=1)
    assert torch.isinf(fewer).sum(1).tolist() == [2, 2]


def test_the_answers_loss_by_hand():
    torch.manual_seed(0)
    logits, logits_m = torch.randn(2, 2, 3, 5).double()
    ids, mask = torch.tensor([[2, 4, 3], [2, 3, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    weights = torch.tensor([0.3, 0.7]).double()
    loss = answer_loss(logits, logits_m, ids, mask, weights, questions=2, alpha=0.4)
    expected = 0.0
    for row, places in ((0, (0, 1)), (1, (0,))):
        for place in places:
            log_p, q = logits[row, place].log_softmax(-1), logits_m[row, place].softmax(-1)
            hard, soft = -log_p[ids[row, place + 1]], -(q * log_p).sum()
            expected += weights[row] * (0.6 * hard + 0.4 * soft) / 2
    assert loss.item() == pytest.approx(float(expected), rel=1e-12)
