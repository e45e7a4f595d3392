"""What an experiment's nested and plain models start from: settings, and a ViT's weights."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from jsonargparse import Namespace
from safetensors.torch import save_file
from torch import nn

from lightning_modules.backbones import build_vision
from lightning_modules.matformer import extract, importance, nest, reorder
from lightning_modules.matformer.nest import GRANULARITIES
from lightning_modules.weights import load_weights
from recipes.experiment import Measuring, Run
from recipes.nodes import Artifact, device
from recipes.records import instance_of
from recipes.results import Row

BATCHES = 8  # of training images, on which importance is measured


def nested_settings(run: Run, config: str) -> Namespace:
    """The settings in a YAML file, with the user's flags, of an experiment on a nested model.

    Raises:
        ValueError: if they nest nothing.
    """
    settings = run.parsed(config)
    if settings.model.init_args.fractions is None:
        raise ValueError(
            f"{config}: model.fractions is null, expected the widths to nest: this experiment "
            "trains nested models, and its plain rows without this flag"
        )
    return settings


def starts(run: Run, seed: int, part: str = "ffn", fractions: Any = None) -> dict[str, Artifact]:
    """The files from which models of each size start; empty where training is from scratch.

    If matvit.yaml names pre-trained weights (model.init_from), XL starts from these, sorted by
    importance, and a plain model of another size from the slice that this size uses.

    Args:
        run: in which the sorting is declared.
        seed: of the run, which draws the images that importance is measured on.
        part: what is nested, and sorted: "ffn" or "heads".
        fractions: of the sizes, where they are not matvit.yaml's.
    """
    settings = nested_settings(run, "matvit")
    if settings.model.init_args.init_from is None:
        return {}
    model = settings.model.init_args.as_dict()
    model["fractions"] = fractions or model["fractions"]
    given = {"model": model, "data": settings.data.as_dict()}
    node = run.measure(f"sorted {part}", seed, write_slices, settings={**given, "part": part})
    return {size: node / f"{size}.safetensors" for size in GRANULARITIES}


def write_slices(m: Measuring) -> list[Row]:
    """Write the sorted weights of each size, without a classifier, to <size>.safetensors."""
    given, part = m.settings["model"], m.settings["part"]
    data = instance_of(m.settings["data"], seed=m.seed)
    data.prepare_data()
    data.setup("fit")
    model: Any = build_vision(given["architecture"], 0, given["model_args"] or {})
    load_weights(model, given["init_from"])
    sort(model.to(device()), data.train_dataloader(), part)
    nest(model, given["fractions"], part)
    for size in GRANULARITIES:
        state = extract(model, size).state_dict()
        save_file({name: value.contiguous() for name, value in state.items()},
                  m.folder / f"{size}.safetensors")  # fmt: skip
    return []


def sort(model: nn.Module, loader: Iterable[Any], part: str = "ffn") -> None:
    """Sort a plain model's neurons or heads, in place, by importance on a loader's first images."""
    images = (images for images, _ in islice(loader, BATCHES))
    reorder(model, importance(model, images, part))
