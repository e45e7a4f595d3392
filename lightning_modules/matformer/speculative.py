"""Speculative decoding: a submodel drafts some tokens, the model verifies them in one pass.

MatFormer (arXiv 2310.07707), Table 2 and Appendix C.1, after Leviathan et al. (arXiv 2211.17192).
Let d_1 … d_k be the drafted tokens, drawn from q_1 … q_k, and p_1 … p_{k+1} the verifier's
distributions at the same positions and after the last:

* greedy: tokens are accepted up to the first that differs from arg max p_j, which replaces it;
* sampling: d_j is accepted with probability min(1, p_j(d_j) / q_j(d_j)); in place of the first
  token that is rejected, one is drawn from max(0, p_j - q_j), normalised.

Either way each pass of the verifier adds one token of its own, and the result has exactly the
distribution of the verifier alone. Where a submodel keeps all attention heads, its keys and values
have the verifier's shape: both then use one cache, in which the verifier's pass overwrites the
draft's entries (App. C.1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import StopStringCriteria

from lightning_modules.backbones import positions_of, soft_tokens
from lightning_modules.decoding import BANS, end_tokens
from lightning_modules.matformer.drafts import Reader, Slots, drafter
from lightning_modules.matformer.nest import Granularity
from lightning_modules.matformer.views import at_set_granularity
from lightning_modules.modes import evaluating, precise

LONGEST_DRAFT = 16  # the most tokens of a draft with draft_tokens="adaptive"


@dataclass
class SpeculationRecord:
    """Counts of a `speculative_generate`, over all sequences of the batch.

    Attributes:
        rounds: passes of the verifier, without the first over the prompt.
        drafted: tokens drafted for sequences that were not finished.
        tested: drafted tokens up to and including each round's first rejected one.
        accepted: drafted tokens that were accepted.
    """

    rounds: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The estimated probability that a drafted token is accepted; nan without any."""
        return self.accepted / self.tested if self.tested else math.nan


def expected_speedup(acceptance: float, draft_tokens: int, cost: float) -> float:
    """Expected speed-up over plain decoding, if a pass over k + 1 tokens takes as long as over one.

    (1 - α^{k+1}) / ((1 - α)(c·k + 1)); Leviathan et al. (arXiv 2211.17192), Theorem 3.8.

    Args:
        acceptance: α, the probability that a drafted token is accepted, independent of the others.
        draft_tokens: k.
        cost: c, the draft's pass over one token relative to the verifier's.
    """
    tokens = sum(acceptance**j for j in range(draft_tokens + 1))
    return tokens / (cost * draft_tokens + 1)


@torch.inference_mode()
def speculative_generate(
    model: Any,
    input_ids: Tensor,
    draft: Granularity | dict[str, Any] | nn.Module | None = "S",
    max_new_tokens: int = 64,
    draft_tokens: int | Literal["adaptive"] = 4,
    share_cache: bool = True,
    do_sample: bool = False,
    *,
    draft_layers: int | None = None,
    draft_vocabulary: int | None = None,
    compiled: bool = False,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: Any = None,
    generator: torch.Generator | None = None,
    record: SpeculationRecord | None = None,
) -> Tensor:
    """Continue prompts as the model alone would, but with fewer passes of the model.

    The model's logits alone decide: of its generation_config only the end tokens count.

    Args:
        model: the verifier, a decoder of transformers, at the granularity that is set. Dropout is
            off while it decodes.
        input_ids: prompts (B, L), padded on the left.
        draft: what drafts: a granularity of a nested model; or another model with the same
            vocabulary; or None for the model itself (with `draft_layers`).
        max_new_tokens: the most new tokens of a sequence.
        draft_tokens: k; "adaptive" chooses the k of each round by `expected_speedup`, from the
            acceptance so far and the multiply-adds of draft and verifier. 0 decodes without a
            draft.
        share_cache: draft and verifier use one cache where they can: if the draft is a submodel
            with all heads, or the model's first layers. Otherwise each has its own.
        do_sample: draw from the verifier's distribution instead of taking the likeliest token.
        draft_layers: number of its first layers that the draft uses before the output layer.
        draft_vocabulary: number of first tokens of the vocabulary that the draft may propose
            (tokenizers number frequent tokens first), which makes its output layer smaller.
        compiled: compile the passes of draft and verifier (torch.compile), with a cache of fixed
            size. The first call with new shapes takes a minute or two, later ones are faster: small
            models spend much of their time between operations. On a CPU a C++ compiler is needed.
        attention_mask: (B, L), 0 where a prompt is padded; all 1 when None.
        temperature: divides the logits of draft and verifier before sampling.
        eos_token_id: tokens that end a sequence; those of the model's generation_config when None.
        pad_token_id: fills shorter sequences; the first end token when None.
        stop_strings: texts that end a sequence once it contains one; needs `tokenizer`.
        tokenizer: the model's tokenizer.
        generator: random numbers for sampling; torch's default generator when None.
        record: counts are added to it.

    Returns:
        Token ids (B, L + T), prompts and continuations, padded on the right; T is the length of
        the longest continuation.

    Raises:
        ValueError: if the draft is larger than the verifier or has another vocabulary, a prompt is
            too long for the model, padded on the right or empty, the model has layers without
            full attention, no key/value cache or soft tokens (APET's prompt), it counts positions
            itself and rows differ, its generation_config bans tokens, or an argument is out of
            range.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ends = _end_tokens(model, eos_token_id)
    _check_bans(model)
    _check(model, input_ids, mask, max_new_tokens, draft_tokens, temperature)
    models = [model, *([draft] if isinstance(draft, nn.Module) else [])]
    for one, name in zip(models, ("model", "draft"), strict=False):
        _check_positions(one, input_ids, max_new_tokens, name)
        _check_cache(one, name)
    cut = draft_tokens != 0 or compiled
    _check_layers(model, input_ids, max_new_tokens, cut)
    _check_rows(model, mask, cut)
    _check_rotation(model, mask, max_new_tokens)
    if stop_strings and tokenizer is None:
        raise ValueError("stop_strings need the tokenizer that wrote the prompts: give tokenizer")
    stop = StopStringCriteria(tokenizer, list(stop_strings)) if stop_strings else None
    record = SpeculationRecord() if record is None else record
    with evaluating(*models):
        longest = LONGEST_DRAFT if draft_tokens == "adaptive" else draft_tokens
        max_slots = _max_slots(input_ids, max_new_tokens + longest) if compiled else None
        verifier = Reader(at_set_granularity(model), max_slots=max_slots)
        shared = verifier.cache if share_cache else None
        drafting = drafter(model, draft, shared, draft_layers, draft_vocabulary, max_slots)
        loop = _Loop(verifier, drafting, do_sample, temperature, generator, record)
        adapted = draft_tokens == "adaptive"
        cost = relative_cost(verifier, drafting, input_ids) if adapted else 0.0
        limits = [limit for one in models if (limit := positions_of(one)) is not None]
        slots = Slots(input_ids, mask, min(limits, default=None))
        latest = loop.begin(slots)
        rows = [_Row(prompt, ends, stop, max_new_tokens) for prompt in input_ids]
        new: list[list[int]] = latest[:, None].tolist()
        while True:
            for row, tokens in zip(rows, new, strict=True):
                row.extend(tokens)
            if all(row.finished for row in rows):
                break
            remaining = max(max_new_tokens - len(row.new) for row in rows if not row.finished)
            k = best_length(record, cost) if draft_tokens == "adaptive" else draft_tokens
            active = torch.tensor([not row.finished for row in rows], device=input_ids.device)
            new = loop.round(slots, min(k, remaining - 1), active)
    fill = pad_token_id if pad_token_id is not None else (ends[0] if ends else 0)
    longest = max(len(row.new) for row in rows)
    written = [row.new + [fill] * (longest - len(row.new)) for row in rows]
    with torch.inference_mode(False):  # an ordinary tensor, which autograd accepts as an input
        return torch.cat([input_ids, torch.tensor(written, device=input_ids.device)], 1)


class _Row:
    """One sequence of the batch, and when it ends."""

    def __init__(
        self, prompt: Tensor, ends: list[int], stop: StopStringCriteria | None, limit: int
    ) -> None:
        self.prompt, self.ends, self.stop, self.limit = prompt, ends, stop, limit
        self.new: list[int] = []
        self.finished = False

    def extend(self, tokens: list[int]) -> None:
        """Add tokens up to the one that ends the sequence."""
        for token in tokens:
            if self.finished:
                return
            self.new.append(token)
            self.finished = token in self.ends or len(self.new) == self.limit or self._stops()

    def _stops(self) -> bool:
        if self.stop is None:
            return False
        written = torch.tensor([self.new], device=self.prompt.device)
        return bool(self.stop(torch.cat([self.prompt[None], written], 1), None))


@dataclass
class _Loop:
    """Rounds of draft and verification."""

    verifier: Reader
    drafter: Reader
    do_sample: bool
    temperature: float
    generator: torch.Generator | None
    record: SpeculationRecord

    def begin(self, slots: Slots) -> Tensor:
        """Read the prompts and append the first new token; returns it, (B,)."""
        length = slots.valid.sum(1)
        _, latest = self._choose(self.verifier.read(slots)[:, -1])
        slots.add(latest, length)
        return latest

    def round(self, slots: Slots, k: int, active: Tensor) -> list[list[int]]:
        """Draft k tokens and verify them.

        Args:
            slots: the tokens so far, changed in place; neither cache holds the last slot yet.
            k: number of tokens to draft.
            active: (B,), True for rows that are not finished, whose acceptance is counted.

        Returns:
            The new tokens of each row.
        """
        base = len(slots)
        position = slots.positions[:, -1]
        drafted, proposals = [slots.tokens[:, :0]], []
        for j in range(k):
            q, token = self._choose(self.drafter.read(slots)[:, -1])
            slots.add(token, position + j + 1)
            drafted.append(token[:, None])
            proposals.append(q)
        if self.drafter.cache is self.verifier.cache:
            self.verifier.cache.cut(base - 1)  # the verifier overwrites the draft's entries
        logits = self.verifier.read(slots, keep=k + 1)
        tokens = torch.cat(drafted, 1)
        if self.do_sample:
            accepted, latest = self._verify_samples(tokens, proposals, logits)
        else:
            best = logits.argmax(-1)
            accepted = (tokens == best[:, :k]).cumprod(1).sum(1)
            latest = best.gather(1, accepted[:, None])[:, 0]
        kept = int(accepted[active].max())
        slots.cut(base + kept)
        slots.valid[:, base:] = torch.arange(kept, device=active.device) < accepted[:, None]
        for reader in (self.verifier, self.drafter):
            reader.cache.cut(base + kept)
        slots.add(latest, position + accepted + 1)
        counts = accepted[active]
        self.record.rounds += 1
        self.record.drafted += k * len(counts)
        self.record.accepted += int(counts.sum())
        self.record.tested += int((counts + 1).clamp(max=k).sum())
        return [
            [*row[:n], token]
            for row, n, token in zip(
                tokens.tolist(), accepted.tolist(), latest.tolist(), strict=True
            )
        ]

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The distribution (B, V) of logits (B, V), and a token (B,) drawn from it.

        Greedy decoding needs no distribution: then the logits and the likeliest token.
        """
        if not self.do_sample:
            return logits, logits.argmax(-1)
        probabilities = self._probabilities(logits)
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)
        return probabilities, drawn[:, 0]

    def _probabilities(self, logits: Tensor) -> Tensor:
        return (precise(logits) / self.temperature).softmax(-1)

    def _verify_samples(
        self, tokens: Tensor, proposals: list[Tensor], logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The number of accepted tokens (B,), and the token (B,) that the verifier draws."""
        p = self._probabilities(logits)
        # q stays zero after the last drafted token, so that the next token is drawn from p
        q = torch.zeros_like(p)
        for j, proposal in enumerate(proposals):
            q[:, j, : proposal.shape[1]] = proposal
        chosen = tokens[..., None]
        uniform = torch.rand(tokens.shape, generator=self.generator, dtype=p.dtype, device=p.device)
        passes_test = (
            uniform * q[:, :-1].gather(2, chosen)[..., 0] < p[:, :-1].gather(2, chosen)[..., 0]
        )
        accepted = passes_test.long().cumprod(1).sum(1)
        index = accepted[:, None, None].expand(-1, 1, p.shape[-1])
        residual = (p - q).clamp(min=0).gather(1, index)[:, 0]
        # where p equals q up to rounding, the rejection is a rounding error as well: draw from p
        residual = torch.where(
            residual.sum(1, keepdim=True) > 0, residual, p.gather(1, index)[:, 0]
        )
        return accepted, torch.multinomial(residual, 1, generator=self.generator)[:, 0]


def _max_slots(prompts: Tensor, most: int) -> int:
    """The most slots that a batch can need, rounded up so that few sizes are compiled.

    In each round all rows get as many new slots as the row that accepts most tokens. `most` is the
    number of tokens that one row can accept, those beyond its end in its last round included.
    """
    batch, length = prompts.shape
    return 64 * math.ceil((length + batch * most) / 64)


def relative_cost(verifier: Reader, drafting: Reader, input_ids: Tensor) -> float:
    """Multiply-adds of the draft's pass over one token, divided by the verifier's.

    Counted for two tokens, because FewRowsLinear doubles a single one, but only in large layers.
    """
    flops = []
    two = input_ids[:1, :1].expand(1, 2)
    for reader in (drafting, verifier):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            reader.model(two, use_cache=False)
        flops.append(counter.get_total_flops())
    return flops[0] / flops[1]


def best_length(record: SpeculationRecord, cost: float) -> int:
    """The draft length with the largest expected speed-up.

    The acceptance is estimated with one accepted and one rejected token added (Laplace's rule), so
    that it is neither 0 nor 1 in the first rounds.
    """
    acceptance = (record.accepted + 1) / (record.tested + 2)
    return max(range(1, LONGEST_DRAFT + 1), key=lambda k: expected_speedup(acceptance, k, cost))


def _end_tokens(model: Any, given: int | Sequence[int] | None) -> list[int]:
    """The given end tokens, or those of the model's generation_config."""
    if given is None:
        given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return end_tokens(given)


def _check_bans(model: Any) -> None:
    """Refuse tokens that the model's generation_config bans, which its logits do not know."""
    published = getattr(model, "generation_config", None)
    if banning := [name for name in BANS if getattr(published, name, None)]:
        raise ValueError(
            f"the generation_config of this {type(model).__name__} bans tokens "
            f"({', '.join(banning)}): set {' and '.join(banning)} to None there, or write with "
            "lightning_modules.decoding.generate"
        )


def _check_positions(model: Any, ids: Tensor, new: int, name: str) -> None:
    longest = positions_of(model)
    if longest is not None and ids.shape[1] + new > longest:
        raise ValueError(
            f"a prompt of {ids.shape[1]} tokens and max_new_tokens={new} are more than the "
            f"{longest} positions of the {name}: shorten the prompt or max_new_tokens"
        )


def _check(
    model: Any, ids: Tensor, mask: Tensor, new: int, draft: int | str, temperature: float
) -> None:
    if new < 1:
        raise ValueError(f"max_new_tokens is {new}, expected 1 or more")
    if draft != "adaptive" and (not isinstance(draft, int) or draft < 0):
        raise ValueError(f"draft_tokens is {draft!r}, expected 0 or more, or 'adaptive'")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, expected a number above 0")
    if ids.ndim != 2 or not ids.shape[1]:
        raise ValueError(f"input_ids has shape {tuple(ids.shape)}, expected (B, L) with a token")
    if mask.shape != ids.shape or not mask[:, -1].all():
        raise ValueError(
            "a prompt ends in padding, or its attention_mask has another shape: pad on the left"
        )


def _check_layers(model: Any, ids: Tensor, new: int, cut: bool) -> None:
    """Refuse layers without full attention; without cutting the cache, windows may slide."""
    config = model.config
    usable = {"full_attention"} if cut else {"full_attention", "sliding_attention"}
    kinds = set(getattr(config, "layer_types", None) or []) - usable
    window = getattr(config, "sliding_window", None) if cut else None
    if kinds or (window is not None and len(ids) * new + ids.shape[1] > window):
        raise ValueError(
            f"{type(model).__name__} has {', '.join(sorted(kinds)) or 'a sliding window'}, whose "
            "cache cannot be cut back: speculative decoding needs full attention in all layers"
        )


def _check_rotation(model: Any, mask: Tensor, new: int) -> None:
    """Refuse texts that cross the position behind which Phi-3's LongRoPE turns keys otherwise."""
    rotation = getattr(model.config, "rope_parameters", None) or {}
    if rotation.get("rope_type") != "longrope":
        return
    border, lengths = rotation["original_max_position_embeddings"], mask.sum(1)
    if int(lengths.min()) <= border < int(lengths.max()) + new:
        raise ValueError(
            f"{type(model).__name__} has another rotary embedding for texts of more than {border} "
            "tokens, with which the cached keys would have to be computed again: stay below that, "
            "or write with lightning_modules.decoding.generate"
        )


def _inputs(model: Any) -> set[str]:
    """The names of a model's arguments; of peft's, those of the model inside."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(signature(inner.forward).parameters)


def _check_cache(model: Any, name: str) -> None:
    """Refuse a model without a cache, or with more in it than the tokens."""
    config = model.config
    if getattr(model, "_is_stateful", False) or "past_key_values" not in _inputs(model):
        raise ValueError(
            f"the {name}, {type(model).__name__}, has no key/value cache from which rejected "
            "tokens can be cut: write with lightning_modules.decoding.generate"
        )
    if soft := soft_tokens(model) or (config.model_type == "cpmant" and config.prompt_length):
        raise ValueError(
            f"the {name} has {soft} soft tokens before its input, in slots of the cache that "
            "no token has: write with lightning_modules.decoding.generate"
        )


def _check_rows(model: Any, mask: Tensor, cut: bool) -> None:
    """Refuse rows of which the model would count padding or rejected tokens as positions.

    Rejected tokens stay in the cache where rows differ in what they accept; BLOOM counts by the
    attention mask, which GIT widens by the patches of a picture, as if it had read one.
    """
    kind, rows = model.config.model_type, len(mask)
    counts = ("position_ids" not in _inputs(model) and kind != "bloom") or kind == "git"
    relative = kind in ("mpt", "roformer")  # padding before a text changes no distance within it
    local = "local" in getattr(model.config, "attention_layers", [])
    if (cut and rows > 1 and (counts or local)) or (counts and not relative and not mask.all()):
        raise ValueError(
            f"{type(model).__name__} counts positions by the slots of its cache, padding and "
            "rejected tokens included: decode its prompts one at a time, without padding"
        )
