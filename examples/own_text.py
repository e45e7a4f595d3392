"""Tunes a pre-trained encoder on a csv with VeRA and a plain Trainer; saves the adapter.

python examples/own_text.py reviews.csv weights/all-MiniLM-L6-v2      (columns: sentence, label)
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import sys

import lightning as L

from datamodules import TextData
from lightning_modules.vera import TextTuning, save_adapter
from recipes.predict import Predictor


def main(csv: str, base: str, epochs: int = 5, folder: str = "run") -> None:
    """Tune the base on the sentences of a csv; print predictions for two held-out ones."""
    data = TextData(train=csv, tokenizer=base, max_length=64, batch_size=16)
    module = TextTuning(
        num_classes=data.num_classes,
        architecture=base,
        pretrained=True,
        method="vera",
        rank=256,
        lr=2e-2,
        head_lr=1e-3,
    )
    trainer = L.Trainer(max_epochs=epochs, default_root_dir=folder)
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{folder}/own.ckpt")
    save_adapter(module.model, f"{folder}/adapter", about={"base": base})
    sentences = [example.first for example in data.examples("val")[:2]]
    for sentence, one in zip(sentences, Predictor(f"{folder}/own.ckpt")(sentences), strict=True):
        print(f"{sentence}: {one.label} ({one.probability:.0%})")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(f"usage: {__doc__.splitlines()[2]}")
