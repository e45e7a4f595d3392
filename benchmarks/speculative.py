"""Speed of speculative decoding with nested drafts, against plain and assisted generation.

MatFormer (arXiv 2310.07707), Table 2: S drafts, XL verifies; with one shared cache (App. C.1) the
paper is 1.16 times as fast as XL alone on LAMBADA, 1.14 on TriviaQA. Timed in turn, with the same
prompts:

- plain decoding, of this repository and of transformers;
- submodels as drafts, with a shared cache or a cache each, or limited to the first token ids;
- the first layers as draft;
- transformers' assisted generation, with the extracted submodel as draft;
- an independently trained draft, if one is given.

Every text must equal that of plain decoding. In float32 a pass over several tokens rounds
differently from passes over one, so that a text may diverge where XL's two likeliest tokens tie:
the gap between their logits there is printed, and a gap too large for rounding ends the run. With
--exact all is in float64, nothing is timed, and one different token ends the run.

    python -m benchmarks.speculative CKPT                 MatLM's or an elastic decoder's checkpoint
    python -m benchmarks.speculative CKPT --draft S M --draft-tokens 1 2 --vocabulary 8192
    python -m benchmarks.speculative CKPT --exact --prompts 32 --batch 32 --tokens 320
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.paired import heading, markdown
from datamodules.corpus import BYTES, CorpusData
from lightning_modules.backbones import build_text
from lightning_modules.counting import count_parameters
from lightning_modules.matformer import extract, nest
from lightning_modules.matformer.drafts import drafter
from lightning_modules.matformer.speculative import (
    SpeculationRecord,
    expected_speedup,
    relative_cost,
    speculative_generate,
)
from recipes.generate import load
from recipes.machine import ratio, rounds

PLAIN = "XL alone"
THEIRS = "XL alone, transformers"
COMPILED = "XL alone, compiled"
PAPER = 1.16
TIE = 1e-3  # a larger gap between logits is not due to rounding in float32


@dataclass(frozen=True)
class Candidate:
    """A method of generating the texts.

    Attributes:
        write: called with a `record`, returns the texts' tokens.
        k: drafted tokens at a time; 0 without a draft.
        cost: the draft's multiply-adds per token relative to the verifier's.
    """

    write: Callable[..., Tensor]
    k: int
    cost: float


def prompts(model: Any, tokenizer: Any, text: str | None, count: int, length: int) -> Tensor:
    """Prompts (N, L), taken at even distances from a text."""
    if tokenizer is None:
        return torch.randint(model.config.vocab_size, (count, length))
    if text is None:
        data = CorpusData(max_bytes=200_000)
        words = "".join(data.documents("train"))
    else:
        words = Path(text).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(words, add_special_tokens=False).input_ids)
    starts = torch.linspace(0, len(ids) - length - 1, count).long()
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


def candidates(
    model: Any, ids: Tensor, options: argparse.Namespace, independent: Any
) -> dict[str, Candidate]:
    """The methods that are compared, by name."""
    new = options.tokens
    verifier = drafter(model, None)

    def by_batch(write: Callable[..., Tensor], **kwargs: Any) -> Tensor:
        return torch.cat([write(part, **kwargs) for part in ids.split(options.batch)])

    def ours(
        k: int, draft: Any = None, share_cache: bool = True, compiled: bool = False, **parts: Any
    ) -> Candidate:
        write = partial(
            speculative_generate, model, draft=draft, max_new_tokens=new, draft_tokens=k,
            share_cache=share_cache, eos_token_id=[], compiled=compiled,
            **{f"draft_{name}": value for name, value in parts.items()},
        )  # fmt: skip
        cost = relative_cost(verifier, drafter(model, draft, **parts), ids) if k else 0.0
        return Candidate(partial(by_batch, write), k, cost)

    def transformers(part: Tensor, record: SpeculationRecord, **kwargs: Any) -> Tensor:
        return model.generate(
            part, attention_mask=torch.ones_like(part), max_new_tokens=new, eos_token_id=None,
            do_sample=False, pad_token_id=0, **kwargs,
        )  # fmt: skip

    def assisted(part: Tensor, record: SpeculationRecord, draft: Any, k: int) -> Tensor:
        draft.generation_config.num_assistant_tokens = k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        return transformers(part, record, assistant_model=draft)

    listed = {PLAIN: ours(0), THEIRS: Candidate(partial(by_batch, transformers), 0, 0.0)}
    if options.compile:
        listed[COMPILED] = ours(0, compiled=True)
    for k in options.draft_tokens:
        for name in options.draft:
            title = f"{name} drafts, k = {k}, shared cache"
            shared = listed[title] = ours(k, name)
            if options.compile:
                listed[f"{title}, compiled"] = ours(k, name, compiled=True)
            listed[f"{name} drafts, k = {k}, caches apart"] = ours(k, name, False)
            for count in options.vocabulary:
                title = f"{name} drafts of {count:,} tokens, k = {k}, shared cache"
                listed[title] = ours(k, name, vocabulary=count)
                if options.compile:
                    listed[f"{title}, compiled"] = ours(k, name, compiled=True, vocabulary=count)
            if options.batch == 1:  # assisted generation does not support batches
                write = partial(assisted, draft=extract(model, name).eval(), k=k)
                title = f"{name} drafts, k = {k}, transformers' assisted generation"
                listed[title] = Candidate(partial(by_batch, write), k, shared.cost)
        for layers in options.layers:
            title = f"first {layers} layers draft, k = {k}, shared cache"
            listed[title] = ours(k, layers=layers)
        if independent is not None:
            listed[f"independent draft, k = {k}"] = ours(k, independent, False)
    return listed


@torch.no_grad()
def widest_tie(model: Any, expected: Tensor, text: Tensor) -> float:
    """The largest gap between the two tokens' logits, over rows (B, L) where the text diverges."""
    gaps = [0.0]
    for one, other in zip(expected, text, strict=True):
        if len(places := (one != other).nonzero()):
            at = int(places[0])
            logits = model(one[None, :at], use_cache=False, logits_to_keep=1).logits[0, -1]
            gaps.append(abs(float(logits[one[at]] - logits[other[at]])))
    return max(gaps)


def check(model: Any, texts: dict[str, Tensor], exact: bool) -> dict[str, str]:
    """Compare every text with plain decoding's.

    Returns:
        By name: "yes", or in how many rows it diverges, and the widest tie there.

    Raises:
        RuntimeError: if one differs by more than rounding.
    """
    agreement = {}
    for name, text in texts.items():
        rows = int((text != texts[PLAIN]).any(1).sum())
        gap = widest_tie(model, texts[PLAIN], text)
        if gap > TIE or (exact and rows):
            raise RuntimeError(
                f"{name} writes another text than {PLAIN} in {rows} of {len(text)} rows; where it "
                f"diverges, the logits of the two tokens differ by {gap:.2g}"
            )
        agreement[name] = f"{rows} of {len(text)} diverge at ties ≤ {gap:.0e}" if rows else "yes"
    return agreement


def compare(
    model: Any, ids: Tensor, options: argparse.Namespace, independent: Any
) -> list[list[str]]:
    """Check and time all methods; table rows.

    Raises:
        RuntimeError: if a text is not the one that plain decoding writes.
    """
    listed = candidates(model, ids, options, independent)
    records = {name: SpeculationRecord() for name in listed}
    texts = {}
    for name, one in listed.items():
        texts[name] = one.write(record=records[name])
        check(model, {PLAIN: texts[PLAIN], name: texts[name]}, options.exact)  # stops at once
    same = check(model, texts, options.exact)
    calls = {name: partial(one.write, record=SpeculationRecord()) for name, one in listed.items()}
    repeats, seconds = options.repeats, options.seconds
    measured = rounds(calls, repeats, seconds, ids.device) if repeats else []
    rows = []
    for name, one in listed.items():
        alpha = records[name].acceptance
        has_record = alpha == alpha  # NaN: transformers' generation keeps no record
        row = [
            name,
            f"{expected_speedup(alpha, one.k, one.cost):.2f}" if has_record else "",
            f"{alpha:.1%}" if has_record else "",
            f"{one.cost:.2f}" if one.k else "",
            same[name],
        ]
        if measured:
            seconds = statistics.median(took[name] for took in measured)
            row[1:1] = [
                f"{ratio(measured, PLAIN, name):.2f}",
                f"{ratio(measured, THEIRS, name):.2f}",
                *([f"{ratio(measured, COMPILED, name):.2f}"] if options.compile else []),
                f"{texts[name][:, ids.shape[1] :].numel() / seconds:.1f}",
            ]
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> list[list[str]]:
    """Measure, print Markdown, and return the table's rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("model", nargs="?", help="a checkpoint of MatLM; without it a random decoder (--quick)")
    add("--draft", nargs="*", default=["S"], help="granularities that draft (default: S)")
    add("--draft-tokens", nargs="+", type=int, default=[1, 2, 3], help="k (default: 1 2 3)")
    add("--vocabulary", nargs="*", type=int, default=[], help="sizes of drafts' vocabularies")
    add("--layers", nargs="*", type=int, default=[], help="numbers of first layers that draft")
    add("--independent", help="another checkpoint or folder that drafts")
    add("--text", help="a text file for the prompts (default: installed Python source)")
    add("--prompts", type=int, default=4, help="number of prompts (default: 4)")
    add("--batch", type=int, default=1, help="prompts at a time (default: 1)")
    add("--prompt-tokens", type=int, default=64, help="length of a prompt (default: 64)")
    add("--tokens", type=int, default=64, help="new tokens per prompt (default: 64)")
    add("--repeats", type=int, default=9, help="rounds at most; 0 times nothing (default: 9)")
    add("--seconds", type=float, default=300.0, help="about (default: 300)")
    add("--compile", action="store_true", help="also XL and shared caches with compiled passes")
    add("--exact", action="store_true", help="in float64, compare all texts and time nothing")
    add("--quick", action="store_true", help="a small random decoder, three rounds")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    options = parser.parse_args(argv)
    if not options.model and not options.quick:
        parser.error("give a checkpoint, or --quick")
    device = torch.device(options.device)
    if options.exact:
        options.repeats = 0
    if options.quick:
        model, tokenizer = quick(), None
        options.repeats = min(options.repeats, 3)
        options.prompts, options.tokens, options.prompt_tokens = 2, 16, 8
    else:
        model, tokenizer = load(options.model)
    independent = load(options.independent)[0] if options.independent else None
    dtype = torch.float64 if options.exact or options.quick else torch.float32
    model = model.to(device, dtype).eval()
    if independent is not None:
        independent = independent.to(device, dtype).eval()
    ids = prompts(model, tokenizer, options.text, options.prompts, options.prompt_tokens)
    rows = compare(model, ids.to(device), options, independent)
    print(heading("speculative", argv, device))
    print(
        f"{count_parameters(model):,} parameters; {len(ids)} x {options.tokens} tokens, "
        f"{options.batch} texts at a time, in {str(dtype).removeprefix('torch.')}. "
        "Columns: what acceptance and the draft's cost allow, if a pass over k + 1 tokens takes no "
        "longer than over one; acceptance; the draft's multiply-adds relative to XL's; whether "
        f"every token is that of {PLAIN}."
    )
    header = ["", "predicted", "acceptance", "cost", "same text"]
    if options.repeats:
        compiled = [f"× {COMPILED}"] if options.compile else []
        header[1:1] = [f"× {PLAIN}", "× transformers'", *compiled, "tokens / s"]
        print(
            f"In front of them: how many times as fast as {PLAIN} and as transformers' plain "
            f"decoding (medians of rounds; the paper's best is {PAPER}), and tokens a second."
        )
    print()
    print(markdown(header, rows))
    return rows


def quick() -> Any:
    """A small random decoder, nested."""
    torch.manual_seed(0)
    config = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": BYTES,
        "max_position_embeddings": 64, "use_bias": False, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return nest(build_text("starcoder2", "causal", config), {"ffn": (1 / 8, 1 / 4, 1 / 2, 1)})


if __name__ == "__main__":
    main()
