"""Generates text with a trained language model; with speculative decoding if a draft is named.

python -m recipes generate runs/…/last.ckpt --prompt 'def main(' --draft S
python -m recipes generate FOLDER --prompt 'Once upon a time' --draft OTHER_FOLDER --sample
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from datamodules.tokens import load_tokenizer, tokenizer_from
from lightning_modules.backbones import build_text
from lightning_modules.matformer import MatLM, set_granularity
from lightning_modules.matformer.speculative import SpeculationRecord, speculative_generate
from recipes.nodes import device
from recipes.predict import described


def main(argv: Sequence[str] | None = None) -> str:
    """Print a continuation of a prompt, and return it.

    Raises:
        ValueError: for arguments that do not fit the model.
        FileNotFoundError: there is no such checkpoint or folder.
    """
    options = command_line().parse_args(argv)
    model, tokenizer = load(options.model)
    if options.granularity is not None:
        set_granularity(model, options.granularity)
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    if not ids.numel():
        raise ValueError("the prompt is empty: give --prompt TEXT, or text on the standard input")
    tokens = options.tokens
    if tokens is None:
        positions = getattr(model.config, "max_position_embeddings", math.inf)
        tokens = max(1, min(128, positions - ids.shape[1]))
    target_device = device()
    draft: Any = None
    if options.draft is not None:
        is_path = Path(options.draft).exists()
        draft = load(options.draft)[0].to(target_device) if is_path else options.draft
    draft_options = (options.draft, options.draft_layers, options.draft_vocabulary)
    drafts = any(one is not None for one in draft_options)
    record = SpeculationRecord()
    start = time.perf_counter()
    new_tokens = speculative_generate(
        model.to(target_device),
        ids.to(target_device),
        draft,
        tokens,
        draft_length(options.draft_tokens) if drafts else 0,
        do_sample=options.sample,
        draft_layers=options.draft_layers,
        draft_vocabulary=options.draft_vocabulary,
        compiled=options.compile,
        temperature=options.temperature,
        eos_token_id=tokenizer.eos_token_id,
        stop_strings=options.stop,
        tokenizer=tokenizer,
        generator=torch.Generator(target_device).manual_seed(options.seed),
        record=record,
    )[0, ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    text = tokenizer.decode(new_tokens, skip_special_tokens=True)
    print(text)
    summary = f"{len(new_tokens)} tokens, {len(new_tokens) / seconds:.1f} a second"
    if drafts:
        summary += (
            f"; {record.acceptance:.0%} of the drafted tokens accepted, "
            f"{len(new_tokens) / max(1, record.rounds):.2f} tokens a pass of the verifier"
        )
    print(summary, file=sys.stderr)
    return text


def command_line() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes generate",
        description="Generates text with a language model; --draft makes decoding speculative.",
    )
    add = parser.add_argument
    add("model", metavar="CKPT", help="a checkpoint of MatLM, or a folder of transformers")
    add("--prompt", metavar="TEXT", help="default: the standard input")
    add("--tokens", type=int, metavar="N", help="new tokens at most; default 128, or what fits")
    add("--granularity", metavar="G", help="size that generates: XL (default), L, S*6+M*6")
    add("--draft", metavar="G", help="draft model: a granularity, a checkpoint or a folder")
    add("--draft-layers", type=int, metavar="N", help="draft with only the first N layers")
    add("--draft-vocabulary", type=int, metavar="N", help="draft only token ids below N")
    add("--draft-tokens", default="4", metavar="K", help="tokens per draft, or adaptive; default 4")
    add("--compile", action="store_true", help="compile the model: a minute first, then faster")
    add("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    add("--temperature", type=float, default=1.0, metavar="T", help="of sampling; default 1")
    add("--seed", type=int, default=0, help="of sampling; default 0")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop at this text; repeatable")
    return parser


def load(source: str) -> tuple[Any, Any]:
    """A decoder and its tokenizer, from a checkpoint of MatLM or a folder of transformers.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the checkpoint is of another module than MatLM, or does not name its module.
    """
    if Path(source).is_dir():
        return build_text(source, "causal", {}, pretrained=True).eval(), load_tokenizer(source)
    description, module = described(source)
    if module is not MatLM:
        raise ValueError(f"{source} is a checkpoint of {module.__name__}, expected one of MatLM")
    model = MatLM.load_from_checkpoint(source, map_location="cpu", weights_only=True).model
    return model.eval(), tokenizer_from(description["tokenizer"])


def draft_length(text: str) -> Any:
    """A number of tokens, or "adaptive"."""
    return int(text) if text.isdigit() else text
