"""Visual question answering: learning to write answers, and ranking candidates by likelihood."""

import torch
from torch import Tensor

from lightning_modules.albef.losses import distilled_cross_entropy, precise
from lightning_modules.albef.model import AnswerModel


def answer_loss(
    logits: Tensor,
    logits_m: Tensor,
    ids: Tensor,
    mask: Tensor,
    weights: Tensor,
    questions: int,
    alpha: float,
) -> Tensor:
    """Cross-entropy of the answers' tokens, summed over an answer and weighted by who gave it.

    Args:
        logits: of the token after each, (S, A, vocabulary).
        logits_m: of the momentum model, likewise.
        ids: the answers' tokens, [CLS] first, (S, A).
        mask: (S, A).
        weights: share of people who gave the answer, (S,).
        questions: in the batch; what the sum is divided by.
        alpha: weight of the momentum model's prediction.
    """
    real = mask[:, 1:].bool()
    losses = torch.zeros(real.shape, device=logits.device)
    token_losses = distilled_cross_entropy(
        logits[:, :-1][real], ids[:, 1:][real], logits_m[:, :-1][real], alpha
    )
    losses = losses.to(token_losses).masked_scatter(real, token_losses)
    return (losses.sum(1) * weights).sum() / questions


@torch.no_grad()
def rank_answers(
    model: AnswerModel,
    question: Tensor,
    question_mask: Tensor,
    ids: Tensor,
    mask: Tensor,
    k: int = 128,
) -> Tensor:
    """Log-likelihood of the candidate answers, those of the k likeliest first tokens.

    Args:
        model: writes answers.
        question: fused states (B, L, D).
        question_mask: (B, L).
        ids: the candidates' tokens, [CLS] first, (C, A).
        mask: (C, A).
        k: candidates of each question that are scored to the end.

    Returns:
        (B, C); minus infinity for candidates that were left out.
    """
    count, k = len(question), min(k, len(ids))
    start = ids[:1, :1].expand(count, 1)
    first = model.decode(start, torch.ones_like(start), question, question_mask)[:, 0]
    top = precise(first).log_softmax(-1)[:, ids[:, 1]].topk(k, dim=1).indices
    scores = torch.full((count, len(ids)), -torch.inf, device=question.device)
    for row in range(count):  # a question at a time: k answers are batch enough
        answers, real = ids[top[row]], mask[top[row]]
        states = question[row].expand(k, -1, -1)
        logits = model.decode(answers, real, states, question_mask[row].expand(k, -1))
        likelihood = precise(logits[:, :-1]).log_softmax(-1)
        tokens = likelihood.gather(2, answers[:, 1:, None])[..., 0]
        scores[row, top[row]] = (tokens * real[:, 1:]).sum(1).to(scores)
    return scores
