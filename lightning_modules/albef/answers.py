"""Visual question answering: the loss of generated answers, and the ranking of candidates.

ALBEF, arXiv 2107.07651, Section 5.3.
"""

import torch
from torch import Tensor

from lightning_modules.albef.losses import distilled_cross_entropy
from lightning_modules.albef.model import AnswerModel
from lightning_modules.modes import precise


def answer_loss(
    logits: Tensor,
    logits_m: Tensor,
    ids: Tensor,
    mask: Tensor,
    weights: Tensor,
    questions: int,
    alpha: float,
) -> Tensor:
    """Cross-entropy summed over an answer's tokens, weighted by answer and averaged over questions.

    Args:
        logits: next-token logits (S, A, vocabulary) of S answers to the batch's questions.
        logits_m: the momentum model's, (S, A, vocabulary).
        ids: the answers' tokens, [CLS] first, (S, A).
        mask: 1 for tokens, 0 for padding, (S, A).
        weights: share of people who gave the answer, (S,).
        questions: number of questions in the batch.
        alpha: weight of the momentum model's prediction, 0 to 1.

    Returns:
        A scalar.
    """
    real = mask[:, 1:].bool()
    token_losses = distilled_cross_entropy(
        logits[:, :-1][real], ids[:, 1:][real], logits_m[:, :-1][real], alpha
    )
    losses = token_losses.new_zeros(real.shape).masked_scatter(real, token_losses)
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
    """Log-likelihoods of the k candidate answers whose first tokens are the likeliest.

    Args:
        model: the answer decoder with its encoders.
        question: fused states (B, L, D).
        question_mask: (B, L).
        ids: the candidates' tokens, [CLS] first, (C, A).
        mask: 1 for tokens, 0 for padding, (C, A).
        k: number of candidates of each question to score completely.

    Returns:
        (B, C); minus infinity for the other candidates.
    """
    count, k = len(question), min(k, len(ids))
    start = ids[:1, :1].expand(count, 1)
    first = model.decode(start, torch.ones_like(start), question, question_mask)[:, 0]
    top = precise(first).log_softmax(-1)[:, ids[:, 1]].topk(k, dim=1).indices
    scores = torch.full((count, len(ids)), -torch.inf, device=question.device)
    for row in range(count):  # one question at a time, with its k answers as a batch
        answers, real = ids[top[row]], mask[top[row]]
        states = question[row].expand(k, -1, -1)
        logits = model.decode(answers, real, states, question_mask[row].expand(k, -1))
        likelihood = precise(logits[:, :-1]).log_softmax(-1)
        tokens = likelihood.gather(2, answers[:, 1:, None])[..., 0]
        scores[row, top[row]] = (tokens * real[:, 1:]).sum(1).to(scores)
    return scores
