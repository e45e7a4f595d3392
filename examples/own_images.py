"""Trains a nested ViT on an image folder with a plain Lightning Trainer; predicts at each size.

python examples/own_images.py ~/pictures
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import sys

import lightning as L

from datamodules import ImageFolderData
from lightning_modules.matformer import MatViT
from recipes.predict import Predictor


def main(root: str, epochs: int = 10, size: int = 64, folder: str = "run") -> None:
    """Train on the pictures below root; print each size's predictions for two held-out ones."""
    data = ImageFolderData(root=root, image_size=size, augmentation="light", num_workers=0)
    module = MatViT(
        num_classes=data.num_classes,
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": size, "patch_size": 8, "depth": 6},
        lr=1e-3,
        warmup_steps=20,
    )
    trainer = L.Trainer(max_epochs=epochs, default_root_dir=folder)
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{folder}/own.ckpt")
    pictures = [path for path, _ in data.val_set.items[:2]]
    for granularity in ("S", "M", "L", "XL"):
        predictor = Predictor(f"{folder}/own.ckpt", granularity=granularity)
        for path, one in zip(pictures, predictor(pictures), strict=True):
            print(f"{granularity}: {path}: {one.label} ({one.probability:.0%})")


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) == 2 else sys.exit(f"usage: {__doc__.splitlines()[2]}")
