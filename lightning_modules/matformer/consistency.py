"""Scores of submodels, and their agreement with the largest one.

MatFormer (arXiv 2310.07707), Section 3.4 and Appendix F.1: a submodel is consistent with XL when
both predict the same class or greedy token, and when the KL divergence of their output
distributions is small.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_modules.labels import IGNORED

SCORED = 2**26  # logits, or similarities, computed at a time: 256 MB in float32


class SubmodelMetrics(nn.Module):
    """Running averages over examples, for several submodels scored on the same data.

    For each: `accuracy` and `loss` (softmax cross-entropy) against the label, `agreement` (share
    of examples with the reference's top class) and `kl`, KL(reference ‖ submodel) in nats.
    Examples labelled -100 (padding) are left out.

    Args:
        labels: names of the submodels.
    """

    NAMES = ("accuracy", "loss", "agreement", "kl")

    def __init__(self, labels: list[str]):
        super().__init__()
        self.labels = labels
        # a list and not a dict: labels may hold characters that a module's name may not
        self.means = nn.ModuleList(
            nn.ModuleDict({name: MeanMetric() for name in self.NAMES}) for _ in labels
        )

    def update(self, label: str, logits: Tensor, targets: Tensor, reference: Tensor) -> None:
        """Add one batch.

        Args:
            label: one of `labels`.
            logits: (B, C) of the submodel.
            targets: (B,) class indices.
            reference: (B, C) logits of the largest model on the same batch.
        """
        valid = targets != IGNORED
        if not valid.any():
            return
        logits, reference = logits[valid].float(), reference[valid].float()
        targets = targets[valid]
        best = logits.argmax(-1)
        means = self.means[self.labels.index(label)]
        means["accuracy"].update((best == targets).float())  # type: ignore[index]
        means["loss"].update(F.cross_entropy(logits, targets, reduction="none"))  # type: ignore[index]
        means["agreement"].update((best == reference.argmax(-1)).float())  # type: ignore[index]
        divergence = F.kl_div(
            logits.log_softmax(-1), reference.log_softmax(-1), reduction="none", log_target=True
        )
        means["kl"].update(divergence.sum(-1))  # type: ignore[index]

    def compute(self) -> dict[str, dict[str, Tensor]]:
        """The averages so far, over all processes, by label and by entry of NAMES."""
        return {
            label: {name: mean.compute() for name, mean in means.items()}  # type: ignore
            for label, means in zip(self.labels, self.means, strict=True)
        }

    def reset(self) -> None:
        """Start new averages."""
        for means in self.means:
            for mean in means.values():  # type: ignore[operator]
                mean.reset()


def logits_in_pieces(
    model: Any, forward: Callable[[Tensor], Tensor], ids: Tensor, size: int
) -> Iterator[Tensor]:
    """Next-token logits (B, ≤ size, V) of tokens (B, L), those of the last token left out.

    The hidden states of all tokens are computed with the first piece. Each further piece is a pass
    of one token in which the output embedding gets that piece's hidden states instead of the
    token's: so what a model does to its logits behind that embedding, such as scaling or capping
    them, is done to every piece.

    Args:
        model: of transformers, whose output embedding `forward` calls once.
        forward: from tokens (B, L) to logits (B, L, V).
        ids: the tokens.
        size: positions at a time.
    """
    pieces: deque[Tensor] = deque()

    def narrow(head: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        if not pieces:
            pieces.extend(inputs[0][:, :-1].split(size, dim=1))
        return pieces.popleft()

    def piece() -> Tensor:  # a function, because a suspended generator would keep its variables
        with model.get_output_embeddings().register_forward_pre_hook(narrow):
            return forward(ids)

    yield piece()
    ids = ids[:, :1]
    while pieces:
        yield piece()


def score_tokens(
    metrics: SubmodelMetrics,
    models: Mapping[str, Callable[[Tensor, int], Iterator[Tensor]]],
    batch: Mapping[str, Tensor],
    vocabulary: int,
) -> None:
    """Add one batch of tokens in pieces, so that a vocabulary of 256,000 fits memory.

    As many rows at a time as have SCORED logits, or pieces of one row that have no more.

    Args:
        metrics: updated in place; an example is a token.
        models: by label, a function from tokens (B, L) and a number of positions to their logits,
            so many positions at a time (`logits_in_pieces`); the first one's logits are the
            reference.
        batch: `input_ids` and `labels` (B, L); labels[:, 1:] are predicted.
        vocabulary: V.
    """
    tokens = max(1, SCORED // vocabulary)
    rows = max(1, tokens // batch["input_ids"].shape[1])
    for ids, labels in zip(
        batch["input_ids"].split(rows), batch["labels"].split(rows), strict=True
    ):
        streams = {label: model(ids, tokens) for label, model in models.items()}
        for targets in labels[:, 1:].split(tokens, dim=1):
            reference = None
            for label, stream in streams.items():
                logits = next(stream).flatten(0, 1)
                reference = logits if reference is None else reference
                metrics.update(label, logits, targets.flatten(), reference)


def classification_loss(logits: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Mean classification loss of a batch.

    Args:
        logits: (B, C).
        targets: (B,) class indices, or (B, C) soft targets (mixup).
        kind: "softmax" (cross-entropy) or "sigmoid" (binary cross-entropy summed over classes, as
            Scenic's ViT recipe has it).

    Raises:
        ValueError: for another kind.
    """
    if kind == "softmax":
        targets = targets.float() if targets.ndim == 2 else targets
        return F.cross_entropy(logits.float(), targets)
    if kind == "sigmoid":
        if targets.ndim == 1:
            targets = F.one_hot(targets, logits.shape[-1])
        loss = F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="none")
        return loss.sum(-1).mean()
    raise ValueError(f"unknown loss {kind!r}: expected 'softmax' or 'sigmoid'")


def normalised(features: Tensor) -> Tensor:
    """Features (B, D) divided by their Euclidean length, in float32."""
    return F.normalize(features.float(), dim=-1)


@torch.no_grad()
def nearest_neighbour_accuracy(
    queries: Tensor, query_labels: Tensor, documents: Tensor, document_labels: Tensor
) -> float:
    """1-NN accuracy: share of queries whose most similar document has the query's class.

    Section 4.2.2; similarity is the cosine.

    Args:
        queries: (Q, D), features.
        query_labels: (Q,), class indices.
        documents: (N, D), features from the same or another submodel.
        document_labels: (N,), class indices.
    """
    documents = normalised(documents).T
    rows = max(1, SCORED // documents.shape[1])
    hits = [
        document_labels[(normalised(chunk) @ documents).argmax(-1)] == labels
        for chunk, labels in zip(queries.split(rows), query_labels.split(rows), strict=True)
    ]
    return torch.cat(hits).float().mean().item()
