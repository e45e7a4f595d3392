"""A trained checkpoint as a folder or file that runs without this repository.

    python -m recipes export RUN/checkpoints/last.ckpt OUT
    … --granularity S, --max_params 12M, --max_macs 2G, --max_ms 5   a submodel of a nested model
    … --to peft | lora                                              a VeRA adapter as peft reads it
    … --to onnx                                                     OUT is a file, such as vit.onnx

Without --to, OUT is what timm or transformers loads: weights, config with class names and
preprocessing, tokenizer, and the loading lines in a README.md. VeRA is merged into the weights. A
budget chooses Mix'n'Match widths; milliseconds are measured here, on one input.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf
from timm.models._input import get_model_args

from lightning_modules.matformer import export as nested
from lightning_modules.matformer import extract
from lightning_modules.matformer.costs import Unit, choose
from lightning_modules.pela.export import to_onnx
from lightning_modules.vera import merge
from lightning_modules.vera.interop import to_lora, to_peft
from lightning_modules.vera.vera import strip
from recipes.pela.export import main as export_low_rank
from recipes.predict import Predictor, number

BUDGETS: dict[str, Unit] = {"max_params": "parameters", "max_macs": "macs", "max_ms": "ms"}
README = """# {name}

Written by `python -m recipes export` from {source}.

```python
folder = "."  # where this file lies
{lines}
```
"""


def export(
    checkpoint: str | Path,
    out: str | Path,
    to: str | None = None,
    granularity: str | None = None,
    budget: tuple[float, Unit] | None = None,
) -> Path:
    """Write a checkpoint's model.

    Args:
        checkpoint: of a run on images, sentences or prompts.
        out: a folder; with `to` "onnx" a file.
        to: None for timm's or transformers' own folder, "peft", "lora" or "onnx".
        granularity: of a nested model; the largest when None.
        budget: instead of it, how much of which unit; see `costs.choose`.

    Returns:
        `out`.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if the model cannot be written so.
    """
    out = Path(out)
    predictor = Predictor(checkpoint, device="cpu")
    module, description = predictor.module, predictor.description
    model = module.model
    is_nested = getattr(module.hparams, "fractions", None) is not None
    if type(module).__module__.startswith("lightning_modules.pela"):
        return export_low_rank([str(checkpoint), str(out)])
    if not is_nested and (granularity is not None or budget is not None):
        raise ValueError(f"{checkpoint} is no nested model: it has one granularity")
    chosen: Any = granularity
    if is_nested and granularity is None:
        chosen = len(module.hparams.fractions) - 1
    if budget is not None:
        chosen = choose(model, *budget, batch=example(predictor))
    if to in ("peft", "lora"):
        if not hasattr(model, "vera"):
            raise ValueError(f"{checkpoint} has no VeRA adapter, which --to {to} writes")
        return (to_peft if to == "peft" else to_lora)(model, out)
    if hasattr(model, "vera"):
        strip(merge(model))
    if to == "onnx":
        if description["kind"] != "images":
            raise ValueError(f"--to onnx writes image models; {checkpoint} is of another kind")
        out.parent.mkdir(parents=True, exist_ok=True)
        small = extract(model, chosen) if is_nested else model
        return to_onnx(small, out, example(predictor).repeat(2, 1, 1, 1))
    names = description.get("class_names") or None
    if is_nested:
        tokenizer = getattr(predictor, "tokenizer", None)
        return nested.save(model, chosen, out, names, preprocessing(description), tokenizer)
    return save_plain(predictor, out, str(checkpoint))


def example(predictor: Predictor) -> Any:
    """One input of the size that the model was trained on."""
    if predictor.kind == "images":
        size = predictor.description["transform"]["image_size"]
        return torch.zeros(1, 3, size, size)
    length = predictor.description["max_length"]
    return {"input_ids": torch.zeros(1, length, dtype=torch.long)}


def preprocessing(description: dict[str, Any]) -> dict[str, Any] | None:
    """Of images, in timm's terms."""
    if description["kind"] != "images":
        return None
    settings = dict(description["transform"])
    size = settings.pop("image_size")
    return {"input_size": (3, size, size), **settings}


def save_plain(predictor: Predictor, out: Path, source: str) -> Path:
    """A model that is its library's own, with what its configuration can say."""
    model, names = predictor.module.model, predictor.description.get("class_names") or None
    strange = [name for name, _ in model.named_modules() if "lora_" in name or "adapter" in name]
    if strange:
        raise ValueError(
            f"{source} holds layers that its library does not know, {strange[0]} for one: export a "
            "checkpoint of VeRA, full fine-tuning or a nested model"
        )
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(model, transformers.PreTrainedModel):
        if names:
            model.config.id2label = dict(enumerate(names))
            model.config.label2id = {name: place for place, name in enumerate(names)}
        model.save_pretrained(out)
        predictor.tokenizer.save_pretrained(out)
        kind = type(model).__name__
        lines = [
            "import transformers",
            f"model = transformers.{kind}.from_pretrained(folder).eval()",
            "tokenizer = transformers.AutoTokenizer.from_pretrained(folder)",
        ]
    else:
        tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(tensors, out / "model.safetensors")
        save_config_for_hf(
            model,
            str(out / "config.json"),
            model_config={"label_names": names} if names else None,
            model_args=get_model_args(model),
            data_config=preprocessing(predictor.description),
        )
        lines = [
            "import timm",
            'model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()',
        ]
    text = README.format(name=out.name, source=source, lines="\n".join(lines))
    (out / "README.md").write_text(text)
    mask = os.umask(0)
    os.umask(mask)
    for file in out.iterdir():  # safetensors writes files that only their owner can read
        file.chmod(0o666 & ~mask)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Export what a command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT")
    add("out", metavar="OUT", help="a folder, or a file with --to onnx")
    add(
        "--to", choices=("timm", "transformers", "peft", "lora", "onnx"), help="default: own folder"
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--granularity", metavar="NAME", help="of a nested model, such as S")
    for name, unit in BUDGETS.items():
        sizes.add_argument(f"--{name}", type=number, metavar="N", help=f"at most so many {unit}")
    options = parser.parse_args(argv)
    given = [(getattr(options, name), unit) for name, unit in BUDGETS.items()]
    budget = next(((value, unit) for value, unit in given if value is not None), None)
    to = None if options.to in ("timm", "transformers") else options.to
    written = export(options.checkpoint, options.out, to, options.granularity, budget)
    print(f"written: {written}")
    if (readme := Path(written) / "README.md").is_file():
        print(readme.read_text())
