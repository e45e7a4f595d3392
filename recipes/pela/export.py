"""A trained low-rank model as a file to run elsewhere.

    python -m recipes.pela.export runs/…/last.ckpt model.onnx      ONNX, any batch size
    python -m recipes.pela.export runs/…/last.ckpt model.pt2       torch.export, any batch size
    python -m recipes.pela.export runs/…/last.ckpt folder          safetensors and plan.json

The first argument may also be such a folder. Each file is run, and compared, before it is called
written.
"""

import argparse
from pathlib import Path

import torch

from lightning_modules.pela import Classifier, checkpoint
from lightning_modules.pela.classifier_module import MODEL
from lightning_modules.pela.export import to_onnx, to_program
from lightning_modules.weights import read_file
from recipes.messages import console


def main(argv: list[str] | None = None) -> Path:
    """Export; returns where to."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.pela.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="checkpoint of a PELA run, or a folder with a plan.json")
    parser.add_argument("target", help="a name that ends in .onnx or .pt2, or a folder")
    options = parser.parse_args(argv)
    if Path(options.source).is_dir():
        plan = checkpoint.read_plan(options.source)
        model = checkpoint.load(options.source)
        architecture, model_args = plan["architecture"], plan["model_args"]
    else:
        if not Path(options.source).is_file():
            raise FileNotFoundError(
                f"no checkpoint at {options.source}: give the last.ckpt of a PELA run, or a folder"
            )
        content = read_file(Path(options.source))
        settings = content["hyper_parameters"]
        for name in ("lora_rank", "merged_tokens"):
            if settings.get(name):
                raise ValueError(
                    f"{options.source} was trained with {name} {settings[name]}: expected a dense "
                    "or low-rank classifier"
                )
        module = Classifier(**{name: settings[name] for name in MODEL})
        module.configure_model()
        module.load_state_dict(content["state_dict"])
        model, architecture = module.model.eval(), settings["architecture"]
        model_args = {**(settings["model_args"] or {}), "num_classes": settings["num_classes"]}
    target = Path(options.target)
    if target.suffix in (".onnx", ".pt2"):
        height, width = model.patch_embed.img_size  # type: ignore[union-attr, misc]
        write = to_onnx if target.suffix == ".onnx" else to_program
        write(model, target, torch.randn(2, 3, int(height), int(width)))
    else:
        checkpoint.save(model, target, architecture, model_args)
    print(f"written: {target}")
    return target


if __name__ == "__main__":
    console(main)
