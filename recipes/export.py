"""Exports a trained checkpoint to files that other libraries load.

    python -m recipes export RUN/checkpoints/last.ckpt OUT                   timm or transformers
    python -m recipes export … OUT --granularity S           a submodel of a nested model;
                       or --max_params 12M, --max_macs 2G, --max_ms 5
    python -m recipes export … OUT --to peft            a VeRA adapter for PeftModel.from_pretrained
    python -m recipes export … OUT --to lora            the same adapter as an exact LoRA
    python -m recipes export … model.onnx --to onnx     one file for onnxruntime, any batch size
    python -m recipes export … model.pt2 --to pt2       likewise, for torch.export.load

A folder holds safetensors, the library's config.json with class names and preprocessing, and a
README.md with the lines that load it. From a nested model the largest submodel is exported unless
another is named; for a budget, Mix'n'Match chooses it (milliseconds are measured on this machine
and kept in latency.json). Adapters are merged into the weights, unless --to peft or lora.
"""

import argparse
import itertools
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_modules import standalone
from lightning_modules.apet import LabelWords
from lightning_modules.matformer import export as submodels
from lightning_modules.matformer import extract
from lightning_modules.matformer.costs import layer_costs
from lightning_modules.matformer.mix_and_match import mix_and_match
from lightning_modules.pela.export import to_onnx, to_program
from lightning_modules.vera import to_lora, to_peft
from recipes.predict import Predictor, folder_for, number

FILES = {"onnx": to_onnx, "pt2": to_program}
KINDS = ("timm", "transformers", "peft", "lora", *FILES)
BUDGETS = {"max_params": "parameters", "max_macs": "macs", "max_ms": "ms"}


def example_of(predictor: Predictor) -> Any:
    """A batch of two for the predictor's model.

    Random pixels (2, 3, H, W), or tokens as a dict with (2, L).
    """
    if predictor.kind == "images":
        size = predictor.description["transform"]["image_size"]
        return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    positions = getattr(predictor.module.model.config, "max_position_embeddings", None) or 128
    length = min(predictor.description.get("max_length", positions), 128)
    ids = torch.full((2, length), int(predictor.tokenizer.pad_token_id or 0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def granularity_of(predictor: Predictor, options: argparse.Namespace, out: Path) -> Any:
    """The granularity that the options ask for; None for a model that is not nested.

    Raises:
        ValueError: if one is requested but the model is not nested, or the budget is too small.
    """
    given = [name for name in ("granularity", *BUDGETS) if getattr(options, name) is not None]
    model = predictor.module.model
    if not hasattr(model, "nesting"):
        if given:
            raise ValueError(
                f"--{given[0]}: {options.checkpoint} is no nested model, it has one size"
            )
        return None
    if len(given) > 1:
        raise ValueError(f"--{given[0]} and --{given[1]}: give one of them")
    if not given:
        return model.nesting.names[-1]
    if given == ["granularity"]:
        return options.granularity
    unit: Any = BUDGETS[given[0]]
    costs, rest = layer_costs(model, unit, None if unit == "parameters" else example_of(predictor))
    if unit == "ms":
        folder = out.parent if options.to in FILES else out
        folder.mkdir(parents=True, exist_ok=True)
        # a larger granularity cannot be faster: where it was measured as faster, that is noise
        costs = [list(itertools.accumulate(layer, max)) for layer in costs]
        table = {
            "machine": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "batch": 2,
            "milliseconds": costs,
            "rest": rest,
        }
        (folder / "latency.json").write_text(json.dumps(table, indent=1) + "\n")
    if unit == "macs":  # of one input; the example has two
        costs, rest = [[one / 2 for one in layer] for layer in costs], rest / 2
    return mix_and_match(costs, getattr(options, given[0]), rest)


def export(predictor: Predictor, out: Path, to: str | None, granularity: Any = None) -> str:
    """Write the predictor's model to `out`.

    Returns:
        A line on what was written, for the terminal.

    Raises:
        ValueError: if this model cannot be written in the format `to`.
    """
    model: Any = predictor.module.model
    names, note = predictor.description.get("class_names") or None, ""
    if isinstance(model, LabelWords):  # a language model, which has no classes of its own
        words: Any = model.tokens
        tokens = ", ".join(map(str, words.tolist()))
        names, note, model = None, f"; its classes are the next tokens {tokens}", model.model
    if to in ("peft", "lora"):
        if not hasattr(model, "vera"):
            raise ValueError(f"--to {to}: this checkpoint has no VeRA adapter; leave --to out")
        (to_peft if to == "peft" else to_lora)(model, out)
        return f"adapter for peft: {out}"
    if to in FILES:
        if predictor.kind != "images":
            raise ValueError(f"--to {to} writes image classifiers; leave it out for texts")
        plain = extract(model, granularity) if granularity is not None else standalone.plain(model)
        FILES[to](plain, out, example_of(predictor))
        return f"{out}: its outputs were compared with the model's"
    library = "timm" if predictor.kind == "images" else "transformers"
    if to not in (None, library):
        raise ValueError(f"--to {to}: this is a model of {library}")
    tokenizer = getattr(predictor, "tokenizer", None)
    arguments = (out, names, _preprocessing(predictor), tokenizer)
    if granularity is not None:
        submodels.save(model, granularity, *arguments)
    else:
        standalone.save(standalone.plain(model), *arguments)
    return f"{library} folder: {out} (its README.md has the lines that load it){note}"


def _preprocessing(predictor: Predictor) -> dict[str, Any] | None:
    """How images are preprocessed, as timm's pretrained_cfg; None for texts."""
    if predictor.kind != "images":
        return None
    transform = predictor.description["transform"]
    size = transform["image_size"]
    crop = transform["crop_pct"] or 1.0
    unchanged = {key: transform[key] for key in ("interpolation", "mean", "std")}
    return {"input_size": (3, size, size), "crop_pct": crop, **unchanged}


def is_export(folder: Path) -> bool:
    """Whether an earlier export wrote this folder, so that it may be overwritten.

    A folder of pre-trained weights has a config.json and a README.md, too, but not this README.md.
    """
    readme, names = folder / "README.md", {file.name for file in folder.iterdir()}
    if readme.is_file():
        return standalone.FIRST_LINE in readme.read_text(encoding="utf-8", errors="replace")
    return names <= {"adapter_config.json", "adapter_model.safetensors", "latency.json"}


def main(argv: Sequence[str] | None = None) -> None:
    """Export the checkpoint that a command line names.

    Raises:
        ValueError: if the name or the content of OUT does not fit what is written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m recipes export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="checkpoint of a run, such as RUN/checkpoints/last.ckpt")
    add("out", metavar="OUT", help="the folder, or the .onnx or .pt2 file")
    add("--to", choices=KINDS, help="default: the library that the model comes from")
    add("--granularity", metavar="NAME", help="size of a nested model, such as S or S*6+M*6")
    add("--max_params", type=number, metavar="N", help="largest submodel of at most N: 12M")
    add("--max_macs", type=number, metavar="N", help="likewise, by multiply-adds per input: 2G")
    add("--max_ms", type=number, metavar="T", help="likewise, by milliseconds of a batch of two")
    options = parser.parse_args(argv)
    out = Path(options.out)
    if options.to in FILES and out.suffix != f".{options.to}":
        raise ValueError(f"{out}: expected a name that ends in .{options.to}")
    if options.to not in FILES and out.suffix[1:] in FILES:
        raise ValueError(f"{out}: add --to {out.suffix[1:]} for such a file, or name a folder")
    if options.to not in FILES and any(folder_for(out).glob("*")) and not is_export(out):
        raise ValueError(f"{out} holds other files: expected a new folder, or one exported before")
    predictor = Predictor(options.checkpoint, device="cpu")
    print(export(predictor, out, options.to, granularity_of(predictor, options, out)))


if __name__ == "__main__":
    main()
