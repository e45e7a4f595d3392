"""The losses of an ALBEF training step: contrast, image–text matching and masked tokens.

arXiv 2107.07651, Section 3.2.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_modules.albef.losses import (
    contrastive_loss,
    contrastive_targets,
    distilled_cross_entropy,
    draw_negatives,
    matching_labels,
    mean_or_zero,
)
from lightning_modules.albef.model import PretrainModel, RetrievalModel
from lightning_modules.albef.momentum import Momentum, Queue
from lightning_modules.labels import IGNORED


@dataclass
class Pairs:
    """A batch of B images, each with a text of at most L tokens.

    Attributes:
        images: (B, 3, H, W).
        ids: tokens (B, L).
        mask: 1 for tokens, 0 for padding (B, L).
        index: id of each pair's image, (B,); pairs with the same image have the same id.
    """

    images: Tensor
    ids: Tensor
    mask: Tensor
    index: Tensor


@dataclass
class Alignment:
    """The results of `align`.

    Attributes:
        loss: L_itc, a scalar.
        image: image states (B, N, C).
        text: text states (B, L, D).
        image_m: the momentum model's image states (B, N, C).
        image_negatives: index of each text's negative image, (B,); see `draw_negatives`.
        text_negatives: index of each image's negative text, (B,).
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
    """Encode images and texts, contrast them with batch and queue, and draw hard negatives.

    The momentum model is updated first; its features are added to the queue at the end.

    Args:
        model: the online model.
        momentum: its momentum model, changed in place.
        queue: keys of earlier batches, changed in place.
        pairs: the batch.
        alpha: weight of the momentum model's similarities in the targets, 0 to 1.
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
    """Fuse every pair, every text with a negative image, and every image with a negative text.

    Where no negative could be drawn the pair itself is fused, with the label `IGNORED`.

    Args:
        model: the model that computed the states in `aligned`.
        aligned: states and negatives.
        mask: of the texts (B, L).

    Returns:
        Fused states (3B, L, D), and matching labels (3B,).
    """
    own_index = torch.arange(len(mask), device=mask.device)
    other_image = torch.where(
        aligned.image_negatives == IGNORED, own_index, aligned.image_negatives
    )
    other_text = torch.where(aligned.text_negatives == IGNORED, own_index, aligned.text_negatives)
    texts = torch.cat([own_index, own_index, other_text])
    images = torch.cat([own_index, other_image, own_index])
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
    """L_mlm (Eqs 3 and 7), a scalar: the mean over the masked tokens.

    Args:
        model: the online model.
        momentum: its momentum model.
        states: fused states (B, L, D) of the masked texts.
        states_m: the momentum model's.
        labels: (B, L), the true ids of masked tokens, `IGNORED` elsewhere.
        alpha: weight of the momentum model's prediction, 0 to 1.
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
    """Run a second model on the pairs, negatives and masked texts of a step.

    Args:
        model: the second model, such as the teacher.
        pairs: the batch.
        aligned: result of `align` with the first model; its negatives are used again.
        masked_ids: the masked texts (B, L).

    Returns:
        Fused states of the pairs and their negatives (3B, L, D), and of the masked texts (B, L, D).
    """
    image, text = model.encode_image(pairs.images), model.encode_text(pairs.ids, pairs.mask)
    fused, _ = fuse_pairs(model, replace(aligned, image=image, text=text), pairs.mask)
    return fused, model.masked_states(masked_ids, pairs.mask, image)
