"""Self-distillation for further pre-training, on images (Tables 1, 3, 6, Figs. 3 and 5, App. B).

A ViT that was pre-trained as a masked auto-encoder is further pre-trained on the target's images,
distilled into a fresh copy of the original, and fine-tuned; beside it stand fine-tuning alone, its
rivals and the ablations. The score is the accuracy on the test part after the last step.

    python -m recipes.self_distillation.images                     digits: a minute on a CPU
    python -m recipes.self_distillation.images --preset small --seeds 3
                                                       tiny-imagenet, then CIFAR-10
    python -m recipes.self_distillation.images --preset paper --seeds 5 --data.root /data

--rows finetune,further,self_distillation limits what is run; images_grid.yaml has all rows.

Your own images, in my_folder/train/<class>/ and my_folder/val/<class>/ or just my_folder/<class>/:

    python -m recipes.self_distillation.images --preset own --data.root my_folder

begins with facebook/vit-mae-base, or with --model.init_from mae.pth; a checkpoint without decoder
gets one by --decoder_steps 2000. Further pre-training and distillation take the training images;
--unlabelled other_folder takes all images below that folder instead. What is scored is the
checkpoint best on validation; --data.test names a folder beside train and val to test on. The
report ends in a classifier and the lines that use it.

Any further argument goes to every stage, --adapt.trainer.max_steps to further pre-training and
distillation only, --finetune.trainer.max_steps to fine-tuning only. Without a network:

    python -m recipes.self_distillation.images --preset own --data.root my_folder \\
      --model.architecture vit_base_patch16_224.mae --model.init_from mae_pretrain_vit_base_full.pth
"""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.images import ImageSet
from lightning_modules.self_distillation.mae_checkpoint import to_timm
from lightning_modules.weights import read_state_dict
from recipes.legacy import Experiment
from recipes.messages import console
from recipes.self_distillation.adaptation import Study, command_line
from recipes.self_distillation.tables import Tables

SETS = ["Aircraft", "CUB", "Chest X-ray", "DTD", "Dogs", "Flowers"]
PAPER: Tables = {
    "Table 1, accuracy, %": (
        SETS,
        {
            "finetune": (72.33, 55.55, 77.15, 67.56, 62.53, 88.78),
            "recadam": (70.76, 55.22, 77.29, 67.59, 61.65, 88.97),
            "mars": (72.74, 55.35, 77.28, 66.79, 62.24, 87.93),
            "r3f": (72.95, 55.91, 76.86, 65.32, 62.15, 88.92),
            "further": (73.38, 55.72, 77.79, 65.55, 62.34, 88.63),
            "self_distillation": (74.37, 58.06, 79.68, 68.51, 63.55, 90.28),
        },
    ),
    "Tables 3 and 6, accuracy, %": (
        ["CUB"],
        {
            "self_distillation": (58.06,),
            "without_mae": (57.60,),
            "further": (55.72,),
            "further_x2": (53.41,),
            "predictions": (55.27,),
            "weights_l2": (53.70,),
            "weights_mars": (54.82,),
            "lambda_0.5": (57.76,),
            "lambda_0.3": (58.21,),
            "lambda_0.1": (57.76,),
        },
    ),
}
USE = """
from datamodules.images import read_image

resize, to_tensor = data.eval_transform()
image = to_tensor(resize(read_image("new.jpg")))
print(data.class_names[model(image[None]).argmax()])
"""


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment, options = command_line("images", __file__, __doc__ or "", argv)
    title = "Self-distillation for further pre-training, images"
    return Study(
        experiment, "images", title, parts, encoder, PAPER, sizes, USE, unlabelled, **options
    ).run()


def unlabelled(folder: str, labelled: Any) -> dict[str, Any]:
    """Settings of the DataModule that has a folder's images, all of them."""
    return {
        "data": "datamodules.ImageFolderData",
        "data.root": str(Path(folder).resolve()),
        "data.labelled": False,
        "data.name": None,
        "data.test": None,
        "data.classes": None,
        "data.per_class": None,
    }


def parts(data: Any) -> dict[str, DataLoader]:
    """Training images as evaluation sees them, and test images."""
    train = ImageSet(data.train_set.items, data.read, *data.eval_transform())
    return {"train": data.loader(train), "test": data.test_dataloader()}


def encoder(checkpoint: Path) -> dict[str, Tensor]:
    """The ViT's weights under timm's names."""
    return to_timm(read_state_dict(checkpoint))


def sizes(data: Any) -> str:
    """How many images there are."""
    return (
        f"{len(data.train_set)} training and {len(data.test_set)} test images of "
        f"{data.num_classes} classes."
    )


if __name__ == "__main__":
    console(main)
