"""Generates text with a trained language model; with speculative decoding if a draft is named.

python -m recipes generate runs/…/last.ckpt --prompt 'def main(' --draft S
python -m recipes generate FOLDER --prompt 'Once upon a time' --draft OTHER_FOLDER --sample
"""

import argparse
import math
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from datamodules.tokens import load_tokenizer, tokenizer_from
from lightning_modules.backbones import build_text
from lightning_modules.decoding import end_tokens
from lightning_modules.matformer import MatLM, set_granularity
from lightning_modules.matformer.speculative import SpeculationRecord, speculative_generate
from lightning_modules.standalone import BUILD, LOADER
from recipes.nodes import device
from recipes.predict import described


def main(argv: Sequence[str] | None = None) -> str:
    """Print a continuation of a prompt, and return it.

    Raises:
        ValueError: for arguments that do not fit the model.
        FileNotFoundError: there is no such checkpoint or folder.
    """
    options = command_line().parse_args(argv)
    refuse_idle(options)
    model, tokenizer = load(options.model)
    if options.granularity is not None:
        set_granularity(model, options.granularity)
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    begin = [tokenizer.bos_token_id] if options.bos else []
    if None in begin:
        raise ValueError(f"the tokenizer of {options.model} has no BOS token: leave --bos out")
    tokens_of_prompt = tokenizer(prompt, add_special_tokens=False).input_ids
    if not tokens_of_prompt:
        raise ValueError("the prompt is empty: give --prompt TEXT, or text on the standard input")
    ids = torch.tensor([[*begin, *tokens_of_prompt]])
    tokens = options.tokens
    if tokens is None:
        positions = getattr(model.config, "max_position_embeddings", None) or math.inf
        tokens = max(1, min(128, positions - ids.shape[1]))
    target_device = device()
    draft: Any = options.draft
    if draft is not None and Path(draft).exists():
        draft = load_draft(draft, tokenizer, options.model).to(target_device)
    drafts = has_draft(options)
    record = SpeculationRecord()
    start = time.perf_counter()
    new_tokens = speculative_generate(
        model.to(target_device),
        ids.to(target_device),
        draft,
        tokens,
        draft_length(options.draft_tokens or "4") if drafts else 0,
        do_sample=options.sample,
        draft_layers=options.draft_layers,
        draft_vocabulary=options.draft_vocabulary,
        compiled=options.compile,
        temperature=1.0 if options.temperature is None else options.temperature,
        eos_token_id=[tokenizer.eos_token_id, *end_tokens(model.generation_config.eos_token_id)],
        stop_strings=options.stop,
        tokenizer=tokenizer,
        generator=torch.Generator(target_device).manual_seed(options.seed or 0),
        record=record,
    )[0, ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    text = tokenizer.decode(new_tokens, skip_special_tokens=True)
    print(text)
    summary = f"{len(new_tokens)} tokens, {len(new_tokens) / seconds:.1f} a second"
    if drafts:
        # a text of one token, or one that ends at once, leaves nothing to draft
        share = f"{record.acceptance:.0%}" if record.tested else "none"
        summary += (
            f"; {share} of the drafted tokens accepted, "
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
    add("--bos", action="store_true", help="begin with a BOS token, as for Llama and Gemma")
    add("--tokens", type=int, metavar="N", help="new tokens at most; default 128, or what fits")
    add("--granularity", metavar="G", help="size that generates: XL (default), L, S*6+M*6")
    add("--draft", metavar="G", help="draft model: a granularity, a checkpoint or a folder")
    add("--draft-layers", type=int, metavar="N", help="draft with only the first N layers")
    add("--draft-vocabulary", type=int, metavar="N", help="draft only token ids below N")
    add("--draft-tokens", metavar="K", help="tokens per draft, or adaptive; default 4")
    add("--compile", action="store_true", help="compile the model: a minute first, then faster")
    add("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    add("--temperature", type=float, metavar="T", help="of sampling; default 1")
    add("--seed", type=int, metavar="N", help="of sampling; default 0")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop at this text; repeatable")
    return parser


def has_draft(options: argparse.Namespace) -> bool:
    """Whether the options name a draft: another size or model, or a part of the model."""
    named = (options.draft, options.draft_layers, options.draft_vocabulary)
    return any(one is not None for one in named)


def refuse_idle(options: argparse.Namespace) -> None:
    """Refuse options that have no effect.

    Raises:
        ValueError: naming the option and the one that it needs.
    """
    drafts = "--draft, --draft-layers or --draft-vocabulary"
    for name, used, needed in (
        ("draft_tokens", has_draft(options), drafts),
        ("temperature", options.sample, "--sample"),
        ("seed", options.sample, "--sample"),
    ):
        if getattr(options, name) is not None and not used:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(options, name)} has no effect without "
                f"{needed}: add that, or leave this out"
            )
    if "" in options.stop:
        raise ValueError("--stop '' is in every text, expected a text that is not empty")


def load(source: str) -> tuple[Any, Any]:
    """A decoder and its tokenizer, from a checkpoint of MatLM or a folder of transformers.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the checkpoint is of another module than MatLM, or does not name its module; or
            the folder lacks weights, or has a load.py that `recipes export` has not written.
    """
    if (loader := Path(source, "load.py")).is_file():  # of an exported Mix'n'Match size
        if loader.read_text() != LOADER.format(library="transformers", build=BUILD["transformers"]):
            raise ValueError(
                f"{loader} is not what `recipes export` writes for a decoder, so it is not run: "
                "export the checkpoint again"
            )
        return runpy.run_path(str(loader))["load"](source), load_tokenizer(source)
    if Path(source).is_dir():
        model: Any = build_text(source, "causal", {}, pretrained=True)
        if model.at_random:
            raise ValueError(
                f"{source} lacks weights of a language model, which would be random: "
                f"{', '.join(sorted(model.at_random))}"
            )
        return model.eval(), load_tokenizer(source)
    description, module = described(source)
    if module is not MatLM:
        raise ValueError(f"{source} is a checkpoint of {module.__name__}, expected one of MatLM")
    model = MatLM.load_from_checkpoint(source, map_location="cpu", weights_only=True).model
    tokenizer = tokenizer_from(description["tokenizer"])
    if tokenizer.eos_token_id not in end_tokens(model.generation_config.eos_token_id):
        # a model type's default, which is a token of another tokenizer
        model.generation_config.eos_token_id = None
    return model.eval(), tokenizer


def load_draft(source: str, tokenizer: Any, verifier: str) -> Any:
    """A decoder that drafts tokens for another one.

    Raises:
        FileNotFoundError, ValueError: see `load`.
        ValueError: if its tokenizer has other tokens, so that its drafts would be another text.
    """
    draft, own = load(source)
    if own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the tokens of the draft {source} are not those of {verifier}: give two models of one "
            "tokenizer"
        )
    return draft


def draft_length(text: str) -> Any:
    """A number of tokens, or "adaptive"."""
    return int(text) if text.isdecimal() else text
