"""The features by which PELA and TinyBERT compare a low-rank ALBEF with its dense original.

A step runs the text layers on the texts and on their masked copies, and the fusion layers on the
pairs with their negatives and on the masked texts. The output of each run of a layer is one
feature, and its padding is masked. `Features` orders features by layer, then by run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.albef.model import ALBEF
from lightning_modules.pela.losses import feature_distillation

Masks = list[Tensor | None]


def state_names(model: ALBEF) -> list[str]:
    """Names of the compared layers: embeddings and blocks, of the ViT and then of the BERT."""
    vision: Any = model.visual_encoder
    return _names(model, [vision.norm_pre, *vision.blocks, model.bert.embeddings, *_layers(model)])


def state_masks(model: ALBEF, mask: Tensor, text_negatives: Tensor) -> Masks:
    """The padding mask of each feature of `state_names`.

    Args:
        model: the student or the teacher.
        mask: of the batch's texts (B, L).
        text_negatives: for each image the index of its negative text, (B,).

    Returns:
        A mask (batch of the run, L) for each feature of texts, None for features of images.
    """
    vision: Any = model.visual_encoder
    images: Masks = [None] * (1 + len(vision.blocks))
    text_masks, fusion_masks = _layer_masks(model, mask, text_negatives)
    return [*images, *text_masks[:2], *text_masks, *fusion_masks]  # the first two: embeddings


def score_names(model: ALBEF) -> list[str]:
    """Names of the query and key layers of self-attention: the ViT's, then the BERT's."""
    vision: Any = model.visual_encoder
    fused = [block.attn.qkv for block in vision.blocks]
    pairs = [(layer.attention.self.query, layer.attention.self.key) for layer in _layers(model)]
    return _names(model, [*fused, *(module for pair in pairs for module in pair)])


def attention_scores(model: ALBEF, features: Sequence[Tensor]) -> list[Tensor]:
    """Q Kᵀ / √d before the softmax, (B, heads, N, N), from the features of `score_names`."""
    vision: Any = model.visual_encoder
    features, scores = list(features), []
    for block in vision.blocks:
        qkv = features.pop(0).unflatten(-1, (3, block.attn.num_heads, -1))
        q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores.append(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5)
    for layer in _layers(model):
        attention: Any = layer.attention.self
        runs = [features.pop(0) for _ in range(4)]  # two of the queries, two of the keys
        for query, key in zip(runs[:2], runs[2:], strict=True):
            q, k = (
                side.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
                for side in (query, key)
            )
            scores.append(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5)
    return scores


def tinybert(
    student: ALBEF,
    features: tuple[Sequence[Tensor], Sequence[Tensor]],
    masks: Masks,
    predictions: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """TinyBERT's distillation (arXiv 1909.10351, Eqs 7–11), layer by layer.

        L = Σ_states MSE(S, T) + Σ_layers MSE(A_s, A_t) + Σ_predictions CE(softmax(z_t), z_s)

    with A the attention scores before the softmax (the MSE also averages over heads). Student and
    teacher are equally wide and deep, so that TinyBERT's learned projections are the identity, and
    each layer is matched with the teacher's layer of the same index.

    Args:
        student: gives the structure of the features.
        features: the student's and the teacher's, of `state_names` and then `score_names`.
        masks: from `state_masks`.
        predictions: logits (student's, teacher's) for matching, and for masked tokens.

    Returns:
        A scalar, computed in float32.
    """
    states = [side[: len(masks)] for side in features]
    images = len([mask for mask in masks if mask is None]) - 1
    texts = [mask for mask in masks[images + 1 :] if mask is not None][2:]
    with torch.autocast(features[0][0].device.type, enabled=False):
        # feature_distillation returns the mean over features, and L has their sum
        loss = feature_distillation(states[0], states[1], masks, "released") * len(masks)
        scores = [attention_scores(student, side[len(masks) :]) for side in features]
        for index, (of_student, of_teacher) in enumerate(zip(*scores, strict=True)):
            squares = (of_student.float() - of_teacher.float()).square()
            if index < images:
                loss = loss + squares.mean()
                continue
            mask = texts[index - images].to(squares)
            real = (mask[:, None, :, None] * mask[:, None, None, :]).expand_as(squares)
            loss = loss + (squares * real).sum() / real.sum()
        for logits, target in predictions:
            if len(logits):
                loss = loss + F.cross_entropy(logits.float(), target.float().softmax(-1))
        return loss


def _layers(model: ALBEF) -> list[Any]:
    return list(model.bert.layers)


def _layer_masks(model: ALBEF, mask: Tensor, text_negatives: Tensor) -> tuple[Masks, Masks]:
    """Masks of the text layers' and of the fusion layers' features, two runs of each layer."""
    first = model.bert.text_layers
    fused = torch.cat([mask, mask, mask[text_negatives]])
    return [mask, mask] * first, [fused, mask] * (len(_layers(model)) - first)


def _names(model: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in modules]
