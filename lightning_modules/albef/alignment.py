"""A step of ALBEF's training: contrast first, then matching and masked tokens on fused states."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_modules.albef.losses import (
    IGNORED,
    contrastive_loss,
    contrastive_targets,
    distilled_cross_entropy,
    draw_negatives,
    matching_labels,
    mean_or_zero,
)
from lightning_modules.albef.model import PretrainModel, RetrievalModel
from lightning_modules.albef.momentum import Momentum, Queue


@dataclass
class Pairs:
    """A batch of B images, each with a text of at most L tokens.

    Attributes:
        images: (B, 3, H, W).
        ids: tokens (B, L).
        mask: 1 for tokens, 0 for padding (B, L).
        index: which image each is, (B,); several texts of one image have the same.
    """

    images: Tensor
    ids: Tensor
    mask: Tensor
    index: Tensor


@dataclass
class Alignment:
    """What `align` computed.

    Attributes:
        loss: L_itc.
        image: states (B, N, C).
        text: states (B, L, D).
        image_m: the momentum model's image states (B, N, C).
        image_negatives: for each text an image that is not its own, (B,).
        text_negatives: for each image a text that is not its own, (B,).
    """

    loss: Tensor
    image: Tensor
    text: Tensor
    image_m: Tensor
    image_negatives: Tensor
    text_negatives: Tensor


def align(
    model: RetrievalModel, momentum: Momentum, queue: Queue, pairs: Pairs, alpha: float
) -> Alignment:
    """Encode both sides, contrast them with batch and queue, and draw hard negatives.

    The momentum model makes its step first, and its features join the queue.

    Args:
        model: the online model.
        momentum: of the same structure.
        queue: further keys.
        pairs: the batch.
        alpha: weight of the momentum model's similarities in the targets.
    """
    model.limit_temperature()
    momentum.update(model)
    image, text = model.encode_image(pairs.images), model.encode_text(pairs.ids, pairs.mask)
    image_features, text_features = model.project_image(image), model.project_text(text)
    with torch.no_grad():
        average: RetrievalModel = momentum.model  # type: ignore[assignment]
        image_m = average.encode_image(pairs.images)
        image_features_m = average.project_image(image_m)
        text_features_m = average.project_text(average.encode_text(pairs.ids, pairs.mask))
        image_keys = torch.cat([image_features_m.T, queue.image_queue.to(image_features_m)], 1)
        text_keys = torch.cat([text_features_m.T, queue.text_queue.to(text_features_m)], 1)
        positive = pairs.index[:, None] == torch.cat([pairs.index, queue.idx_queue[0]])
        targets = (
            contrastive_targets(model.similarity(image_features_m, text_keys), positive, alpha),
            contrastive_targets(model.similarity(text_features_m, image_keys), positive, alpha),
        )
        queue.add(image_features_m, text_features_m, pairs.index)
    image_logits = model.similarity(image_features, text_keys)
    text_logits = model.similarity(text_features, image_keys)
    count = len(pairs.index)
    return Alignment(
        contrastive_loss(image_logits, text_logits, *targets),
        image,
        text,
        image_m,
        image_negatives=draw_negatives(text_logits[:, :count], pairs.index),
        text_negatives=draw_negatives(image_logits[:, :count], pairs.index),
    )


def fuse_pairs(model: RetrievalModel, aligned: Alignment, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Fused states and labels of [each pair, each text with its negative image, and the reverse].

    Where no negative could be drawn the pair stands in, with the label `IGNORED`.

    Args:
        model: may be another than the one that was aligned, of the states that `aligned` holds.
        aligned: states and negatives.
        mask: of the texts (B, L).

    Returns:
        States (3B, L, D), and labels (3B,).
    """
    here = torch.arange(len(mask), device=mask.device)
    other_image = torch.where(aligned.image_negatives == IGNORED, here, aligned.image_negatives)
    other_text = torch.where(aligned.text_negatives == IGNORED, here, aligned.text_negatives)
    texts = torch.cat([here, here, other_text])
    images = torch.cat([here, other_image, here])
    fused = model.fuse(aligned.text[texts], mask[texts], aligned.image[images])
    return fused, matching_labels(aligned.image_negatives, aligned.text_negatives)


def masked_token_loss(
    model: PretrainModel,
    momentum: Momentum,
    states: Tensor,
    states_m: Tensor,
    labels: Tensor,
    alpha: float,
) -> Tensor:
    """L_mlm (Eqs 3 and 7), over the masked tokens alone.

    Args:
        model: the online model.
        momentum: of the same structure.
        states: fused states (B, L, D) of the masked texts.
        states_m: the momentum model's.
        labels: (B, L), `IGNORED` where no token was masked.
        alpha: weight of the momentum model's prediction.
    """
    chosen = labels != IGNORED
    average: PretrainModel = momentum.model  # type: ignore[assignment]
    logits = model.predict_tokens(states[chosen])
    with torch.no_grad():
        logits_m = average.predict_tokens(states_m[chosen])
    return mean_or_zero(distilled_cross_entropy(logits, labels[chosen], logits_m, alpha))


def replay(
    model: PretrainModel, pairs: Pairs, aligned: Alignment, masked_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Run another model on what a step ran: the same pairs, negatives and masked tokens.

    Args:
        model: such as the teacher.
        pairs: the batch.
        aligned: of the model that made the step; its negatives are used.
        masked_ids: the masked texts (B, L).

    Returns:
        Fused states of the pairs and their negatives (3B, L, D), and of the masked texts (B, L, D).
    """
    image, text = model.encode_image(pairs.images), model.encode_text(pairs.ids, pairs.mask)
    fused, _ = fuse_pairs(model, replace(aligned, image=image, text=text), pairs.mask)
    return fused, model.masked_states(masked_ids, pairs.mask, image)
