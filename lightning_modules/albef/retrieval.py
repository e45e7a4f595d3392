"""Image–text retrieval: candidates by similarity, re-ranked by image–text matching.

ALBEF (arXiv 2107.07651), Section 5.1: each query is fused with the k keys of highest similarity,
which are then ranked by the matching head's score.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.albef.model import RetrievalModel
from lightning_modules.albef.momentum import gather

CHUNK = 256  # pairs fused at a time


@dataclass
class Gallery:
    """Encoded images and texts to search in.

    Attributes:
        image_features: unit vectors (I, d).
        image_states: (I, N, C).
        image_ids: (I,), negative for padding that gives all ranks equally many examples.
        text_features: unit vectors (T, d).
        text_states: (T, L, D), padded.
        text_mask: 1 for tokens, 0 for padding (T, L).
        text_ids: id of the image that each text belongs to, (T,); negative for padding.
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
        """The concatenation of several galleries, with texts padded to the longest of them."""
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
        """The galleries of all ranks, concatenated."""
        columns = [
            _gather_rows(_lengthen(value, _longest(value)) if "text_" in name else value)
            for name, value in vars(self).items()
        ]
        return Gallery(*columns)

    def valid(self) -> "Gallery":
        """The gallery without padding, which has negative ids."""
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
    """Encode a batch.

    Args:
        model: the encoders and projections.
        images: (B, 3, H, W).
        image_ids: (B,).
        ids: tokens (T, L).
        mask: 1 for tokens, 0 for padding (T, L).
        text_ids: id of the image that each text belongs to, (T,).
    """
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
    """Score all keys for each query: the k most similar by matching, the others ranked below them.

    Args:
        model: the fusion layers and matching head.
        gallery: queries and keys.
        k: number of keys to fuse with each query; 0 for similarity alone.
        by_text: texts are the queries and images the keys; otherwise the reverse.
        rows: indices of the queries to score; all of them when None.

    Returns:
        Scores (queries, keys).
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
        pair_states = (
            gallery.text_states[text],
            gallery.text_mask[text],
            gallery.image_states[image],
        )
        states, mask, context = (part.to(device) for part in pair_states)
        logits = model.match(model.fuse(states, mask, context)).float()
        matches.append((logits[:, 1] - logits[:, 0]).to(similarity.device))
    matching_scores = torch.cat(matches).view(-1, k).to(similarity)
    # shift the other keys' similarities just below the re-ranked scores: with a larger shift
    # float32 would round their differences away
    below = (
        similarity - similarity.amax(1, keepdim=True) + matching_scores.amin(1, keepdim=True) - 1
    )
    return below.scatter(1, top, matching_scores)


def rerank_on_all_ranks(
    model: RetrievalModel, gallery: Gallery, k: int, by_text: bool, rank: int, world: int
) -> Tensor:
    """`rerank` with the queries distributed over the ranks; all ranks get all scores.

    Args:
        model: as for `rerank`.
        gallery: the same on all ranks.
        k: as for `rerank`.
        by_text: as for `rerank`.
        rank: of this process.
        world: number of processes.

    Returns:
        Scores (queries, keys).
    """
    count = len(gallery.text_ids if by_text else gallery.image_ids)
    # sharded models need equally many queries on each rank, so that some are scored twice
    rows = [(rank + world * turn) % count for turn in range(-(-count // world))]
    part = rerank(model, gallery, k, by_text, rows)
    queries, scores = gather(torch.tensor(rows, device=part.device)), gather(part)
    complete = torch.empty(count, part.shape[1], device=part.device)
    complete[queries] = scores.float()
    return complete


def recall(
    scores: Tensor, query_ids: Tensor, key_ids: Tensor, at: Sequence[int] = (1, 5, 10)
) -> list[float]:
    """Recall R@k: the share of queries with a key of their id among the k highest scores.

    A key of another id with an equal score ranks higher, and so do all where a score is NaN, as
    those of a diverged model are.

    Args:
        scores: (Q, K).
        query_ids: (Q,).
        key_ids: (K,); at least one key has each query's id.
        at: values of k.

    Returns:
        One share, 0 to 1, for each value of k.
    """
    relevant = query_ids[:, None] == key_ids[None, :]
    best = scores.masked_fill(~relevant, -torch.inf).max(1).values
    rank = (~(scores < best[:, None]) & ~relevant).sum(1)
    return [(rank < k).double().mean().item() for k in at]


def _lengthen(tensor: Tensor, length: int) -> Tensor:
    """Pad (T, L) or (T, L, D) with zeros to L = length; (T,) and longer tensors are unchanged."""
    if tensor.ndim < 2 or tensor.shape[1] >= length:
        return tensor
    shape = (tensor.shape[0], length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=1)


def _longest(tensor: Tensor) -> int:
    """The largest L of a tensor (T, L, …) over all ranks; 0 for (T,)."""
    if tensor.ndim < 2:
        return 0
    return int(gather(torch.tensor([tensor.shape[1]], device=tensor.device)).max())


def _gather_rows(tensor: Tensor) -> Tensor:
    """The rows of all ranks, concatenated; ranks may hold different numbers of them."""
    counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    longest = max(counts)
    padded = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
    rows = gather(padded).unflatten(0, (len(counts), longest))
    return torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)])
