"""Image–text retrieval: contrast finds candidates, image–text matching puts them in order.

ALBEF (arXiv 2107.07651), Section 5.1: for each query the k keys of the highest similarity are fused
with it, and the score of their match orders them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.albef.model import RetrievalModel
from lightning_modules.albef.momentum import gather

BEHIND = 1e4  # keys that were not re-ranked come after all that were, by similarity
CHUNK = 256  # pairs that are fused at a time


@dataclass
class Gallery:
    """Encoded images and texts to search in, in the order of `Gallery.collect`.

    Attributes:
        image_features: unit vectors (I, d).
        image_states: (I, N, C).
        image_ids: (I,).
        text_features: unit vectors (T, d).
        text_states: (T, L, D), padded.
        text_mask: (T, L).
        text_ids: the image that each text is of, (T,).
    """

    image_features: Tensor
    image_states: Tensor
    image_ids: Tensor
    text_features: Tensor
    text_states: Tensor
    text_mask: Tensor
    text_ids: Tensor

    @classmethod
    def of(cls, parts: Iterable["Gallery"]) -> "Gallery":
        """Several galleries behind each other; texts are padded to the longest of them."""
        parts = list(parts)
        length = max(part.text_mask.shape[1] for part in parts)
        columns = []
        for name in cls.__dataclass_fields__:
            tensors = [getattr(part, name) for part in parts]
            if name in ("text_states", "text_mask"):
                tensors = [_lengthen(tensor, length) for tensor in tensors]
            columns.append(torch.cat(tensors))
        return cls(*columns)

    def gathered(self) -> "Gallery":
        """What all ranks hold, where there are several."""
        columns = [
            _gather_rows(_lengthen(value, _longest(value)) if "text_" in name else value)
            for name, value in vars(self).items()
        ]
        return Gallery(*columns)

    def valid(self) -> "Gallery":
        """Without the rows that only filled up a rank: those with a negative id."""
        images, texts = self.image_ids >= 0, self.text_ids >= 0
        columns = [
            value[images if name.startswith("image") else texts]
            for name, value in vars(self).items()
        ]
        return Gallery(*columns)

    @property
    def similarity(self) -> Tensor:
        """Cosine of every image with every text, (I, T)."""
        return self.image_features @ self.text_features.T


@torch.no_grad()
def encode(
    model: RetrievalModel,
    images: Tensor,
    image_ids: Tensor,
    ids: Tensor,
    mask: Tensor,
    text_ids: Tensor,
) -> Gallery:
    """One batch of images (B, 3, H, W) and texts (T, L), encoded."""
    image, text = model.encode_image(images), model.encode_text(ids, mask)
    image_features, text_features = model.project_image(image), model.project_text(text)
    return Gallery(image_features, image, image_ids, text_features, text, mask, text_ids)


@torch.no_grad()
def rerank(
    model: RetrievalModel,
    gallery: Gallery,
    k: int,
    by_text: bool = False,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Scores of keys for queries: the k most similar by their match, the others behind them.

    Args:
        model: fuses and matches.
        gallery: queries and keys.
        k: keys of each query that are fused with it; 0 for similarity alone.
        by_text: texts ask for images; else images for texts.
        rows: queries to score; all of them when None.

    Returns:
        (queries, keys).
    """
    similarity = gallery.similarity.T if by_text else gallery.similarity
    chosen = torch.as_tensor(range(len(similarity)) if rows is None else rows)
    similarity = similarity[chosen.to(similarity.device)]
    k = min(k, similarity.shape[1])
    if k == 0:
        return similarity
    top = similarity.topk(k, dim=1).indices
    queries = chosen.to(top.device).repeat_interleave(k)
    keys = top.flatten()
    texts, images = (queries, keys) if by_text else (keys, queries)
    matches = []
    device = next(model.parameters()).device
    for text, image in zip(texts.split(CHUNK), images.split(CHUNK), strict=True):
        rows_of = (gallery.text_states[text], gallery.text_mask[text], gallery.image_states[image])
        states, mask, context = (part.to(device) for part in rows_of)
        logits = model.match(model.fuse(states, mask, context)).float()
        matches.append((logits[:, 1] - logits[:, 0]).to(similarity.device))
    scores = similarity - BEHIND
    return scores.scatter(1, top, torch.cat(matches).view(-1, k).to(scores))


def rerank_on_all_ranks(
    model: RetrievalModel, gallery: Gallery, k: int, by_text: bool, rank: int, world: int
) -> Tensor:
    """`rerank`, each rank its share of the queries; all ranks get all scores."""
    count = len(gallery.text_ids if by_text else gallery.image_ids)
    # equally many on each rank, so that sharded models stay in step; some queries come twice
    rows = [(rank + world * turn) % count for turn in range(-(-count // world))]
    part = rerank(model, gallery, k, by_text, rows)
    places, scores = gather(torch.tensor(rows, device=part.device)), gather(part)
    complete = torch.empty(count, part.shape[1], device=part.device)
    complete[places] = scores.float()
    return complete


def recall(
    scores: Tensor, query_ids: Tensor, key_ids: Tensor, at: Sequence[int] = (1, 5, 10)
) -> list[float]:
    """R@k: the share of queries with a key of their own id among the k of the highest score.

    A key of another id with an equal score counts as better.

    Args:
        scores: (Q, K).
        query_ids: (Q,).
        key_ids: (K,); each query has one key or more of its id.
        at: values of k.
    """
    relevant = query_ids[:, None] == key_ids[None, :]
    best = scores.masked_fill(~relevant, -torch.inf).max(1).values
    rank = ((scores >= best[:, None]) & ~relevant).sum(1)
    return [(rank < k).double().mean().item() for k in at]


def _lengthen(tensor: Tensor, length: int) -> Tensor:
    """Pad (T, L) or (T, L, D) with zeros to a length; leaves (T,) and what is long enough."""
    if tensor.ndim < 2 or tensor.shape[1] >= length:
        return tensor
    shape = (tensor.shape[0], length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=1)


def _longest(tensor: Tensor) -> int:
    if tensor.ndim < 2:
        return 0
    return int(gather(torch.tensor([tensor.shape[1]], device=tensor.device)).max())


def _gather_rows(tensor: Tensor) -> Tensor:
    """The ranks' rows behind each other; ranks may hold different numbers of them."""
    counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    most = max(counts)
    padded = torch.cat([tensor, tensor.new_zeros(most - len(tensor), *tensor.shape[1:])])
    rows = gather(padded).unflatten(0, (len(counts), most))
    return torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)])
