"""Speculative decoding: nested drafts against plain decoding and transformers' assisted generation.

MatFormer (arXiv 2310.07707), Table 2: S drafts, XL verifies; with one shared cache (App. C.1) the
paper is 1.16 times as fast as XL alone on LAMBADA, 1.14 on TriviaQA. Compared here, in turns and
with the same prompts: drafts by submodels (shared cache, and caches apart), by the first layers, by
the same submodel extracted as a model of its own, and an independently trained draft if one is
named; plain decoding by this repository and by transformers; transformers' assisted generation with
the same two models. Every text must equal plain decoding's, token for token.

    python -m benchmarks.speculative CKPT                 MatLM's or an elastic decoder's checkpoint
    python -m benchmarks.speculative CKPT --draft S M --draft-tokens 1 2 3 --layers 10
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.paired import machine, markdown, ratio, rounds
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

PLAIN = "XL alone"
PAPER = 1.16


def prompts(model: Any, tokenizer: Any, text: str | None, batch: int, length: int) -> Tensor:
    """The first tokens (B, L) of windows that lie evenly over a text."""
    if tokenizer is None:
        return torch.randint(model.config.vocab_size, (batch, length))
    if text is None:
        data = CorpusData(max_bytes=200_000)
        words = "".join(data.documents("train"))
    else:
        words = Path(text).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(words, add_special_tokens=False).input_ids)
    starts = torch.linspace(0, len(ids) - length - 1, batch).long()
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


def contenders(
    model: Any, ids: Tensor, options: argparse.Namespace, independent: Any
) -> dict[str, tuple[Callable[..., Tensor], int, float]]:
    """By name: what writes the texts, k, and the draft's cost relative to the verifier's."""
    mask = torch.ones_like(ids)
    new = options.tokens
    ours = partial(speculative_generate, model, ids, max_new_tokens=new, eos_token_id=[])

    def cost(draft: Any, layers: int | None = None) -> float:
        return relative_cost(drafter(model, None), drafter(model, draft, layers=layers), ids)

    def transformers(**kwargs: Any) -> Tensor:
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0, **kwargs,
        )  # fmt: skip

    def assisted(record: SpeculationRecord, draft: Any, k: int) -> Tensor:
        draft.generation_config.num_assistant_tokens = k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        return transformers(assistant_model=draft)

    found: dict[str, tuple[Callable[..., Tensor], int, float]] = {
        PLAIN: (lambda record: ours(None, draft_tokens=0, record=record), 0, 0.0),
        "XL alone, transformers": (lambda record: transformers(), 0, 0.0),
    }
    for k in options.draft_tokens:
        for name in options.draft:
            small, part = extract(model, name).eval(), cost(name)
            for share in (True, False):
                title = f"{name} drafts, k = {k}, {'shared cache' if share else 'caches apart'}"
                found[title] = (partial(_ours, ours, name, k, share, None), k, part)
            title = f"{name} drafts, k = {k}, transformers' assisted generation"
            if len(ids) == 1:  # it knows no batches
                found[title] = (partial(assisted, draft=small, k=k), k, part)
        for layers in options.layers:
            title = f"first {layers} layers draft, k = {k}, shared cache"
            found[title] = (partial(_ours, ours, None, k, True, layers), k, cost(None, layers))
        if independent is not None:
            title = f"independent draft, k = {k}"
            found[title] = (partial(_ours, ours, independent, k, False, None), k, cost(independent))
    return found


def _ours(
    ours: Callable[..., Tensor], draft: Any, k: int, share: bool, layers: int | None,
    record: SpeculationRecord,
) -> Tensor:  # fmt: skip
    return ours(draft, draft_tokens=k, share_cache=share, draft_layers=layers, record=record)


def compare(
    model: Any, ids: Tensor, options: argparse.Namespace, independent: Any
) -> list[list[str]]:
    """Table rows.

    Raises:
        RuntimeError: if a text is not the one that plain decoding writes.
    """
    found = contenders(model, ids, options, independent)
    records, texts = {}, {}
    for name, (write, _, _) in found.items():
        records[name] = SpeculationRecord()
        texts[name] = write(record=records[name])
    for name, text in texts.items():
        if options.exact and not torch.equal(text, texts[PLAIN]):
            raise RuntimeError(f"{name} writes another text than {PLAIN}")
    calls = {
        name: partial(write, record=SpeculationRecord()) for name, (write, _, _) in found.items()
    }
    measured = rounds(calls, options.repeats, options.seconds, ids.device)
    rows = []
    for name, (_, k, cost) in found.items():
        alpha = records[name].acceptance
        speed = sorted(took[name] for took in measured)[len(measured) // 2]
        speedup = 1 / ratio(measured, name, PLAIN)
        same = torch.equal(texts[name], texts[PLAIN])
        rows.append(
            [
                name,
                f"{speedup:.2f}",
                f"{expected_speedup(alpha, k, cost):.2f}" if alpha == alpha else "",
                f"{alpha:.1%}" if alpha == alpha else "",
                f"{cost:.2f}" if k else "",
                f"{ids.shape[0] * options.tokens / speed:.1f}",
                "yes" if same else "no",
            ]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> list[list[str]]:
    """Measure, print Markdown, and return the table's rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("model", nargs="?", help="a checkpoint of MatLM; without it a random decoder (--quick)")
    add("--draft", nargs="+", default=["S"], help="granularities that draft (default: S)")
    add("--draft-tokens", nargs="+", type=int, default=[1, 2, 3], help="k (default: 1 2 3)")
    add("--layers", nargs="*", type=int, default=[], help="drafts by so many first layers")
    add("--independent", help="another checkpoint or folder that drafts")
    add("--text", help="a text file for the prompts (default: installed Python source)")
    add("--prompts", type=int, default=1, help="sequences in a batch (default: 1)")
    add("--prompt-tokens", type=int, default=64, help="of each (default: 64)")
    add("--tokens", type=int, default=64, help="new ones of each (default: 64)")
    add("--repeats", type=int, default=9, help="rounds at most (default: 9)")
    add("--seconds", type=float, default=300.0, help="about (default: 300)")
    add("--double", action="store_true", help="in float64, where rounding decides no token")
    add("--quick", action="store_true", help="a small random decoder, three rounds")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(arguments)
    if not options.model and not options.quick:
        parser.error("give a checkpoint, or --quick")
    options.exact = options.double or options.quick
    device = torch.device(options.device)
    if options.quick:
        model, tokenizer = quick(), None
        options.repeats, options.tokens, options.prompt_tokens = 3, 16, 8
    else:
        model, tokenizer = load(options.model)
    independent = load(options.independent)[0] if options.independent else None
    dtype = torch.float64 if options.exact else torch.float32
    model = model.to(device, dtype).eval()
    if independent is not None:
        independent = independent.to(device, dtype).eval()
    ids = prompts(model, tokenizer, options.text, options.prompts, options.prompt_tokens)
    rows = compare(model, ids.to(device), options, independent)
    command = shlex.join(["python", "-m", "benchmarks.speculative", *arguments])
    print(f"`{command}` · {machine(device)} · {time.strftime('%Y-%m-%d')}\n")
    print(
        f"{count_parameters(model):,} parameters, {len(ids)} x {options.tokens} tokens. Speed-up "
        f"over {PLAIN} (median of rounds; the paper's best is {PAPER}), what acceptance and the "
        "draft's cost allow if a pass over k + 1 tokens takes no longer than over one, acceptance, "
        "the draft's multiply-adds relative to XL's, tokens a second, and whether the text is "
        "plain decoding's, token for token.\n"
    )
    header = ["", "speed-up", "predicted", "acceptance", "cost", "tokens / s", "same text"]
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
