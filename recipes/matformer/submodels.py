"""Taking submodels of trained vision models, and scoring them together."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from datamodules.loading import build_loader
from lightning_modules.backbones import feature_vector
from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.matformer import extract, layer_costs, mix_and_match
from lightning_modules.matformer.consistency import SubmodelMetrics
from lightning_modules.matformer.nest import nesting_of, set_granularity
from recipes.nodes import device
from recipes.results import Row

BETWEEN = 3  # Mix'n'Match sizes between neighbouring granularities
SEARCH_PAIRS = 60  # random (configuration, metric) pairs that a search learns from


@dataclass
class Submodel:
    """One size of one model.

    Attributes:
        label: such as "M" or "M*3+L*3".
        parameters: of the extracted model, without the classifier (the paper counts so).
        macs: multiply-adds of one image, without the classifier.
        forward: images (B, 3, H, W) to logits (B, C).
        features: images (B, 3, H, W) to feature vectors (B, D).
    """

    label: str
    parameters: int
    macs: int
    forward: Callable[[Tensor], Tensor]
    features: Callable[[Tensor], Tensor]


def submodel(
    model: nn.Module, image_size: int, granularity: Sequence[int] | None, label: str = "all"
) -> Submodel:
    """A submodel of a nested model; or, with granularity None, a plain model, named `label`.

    It shares the model's weights; parameters and multiply-adds are the extracted model's.
    """
    plain = model if granularity is None else extract(model, granularity)
    body = headless(plain)

    def select() -> None:
        if granularity is not None:
            set_granularity(model, granularity)

    def forward(images: Tensor) -> Tensor:
        select()
        return model(images)

    def features(images: Tensor) -> Tensor:
        select()
        return feature_vector(model, images)

    if granularity is not None:
        label = nesting_of(model).label(granularity)
    macs = count_macs(body, (1, 3, image_size, image_size))
    return Submodel(label, count_parameters(body), macs, forward, features)


def headless(model: nn.Module) -> nn.Module:
    """The model on the meta device, without its classifier."""
    shadow = copy.deepcopy(model).to("meta")
    shadow.reset_classifier(0)  # type: ignore[operator]
    return shadow


def ladder(model: nn.Module, between: int) -> list[list[int]]:
    """Configurations from the smallest to the largest: uniform ones and Mix'n'Match between them.

    A model with a nested depth has the uniform ones only: Mix'n'Match chooses within blocks, not
    which of them to skip.

    Args:
        model: nested.
        between: Mix'n'Match sizes between two neighbouring granularities.
    """
    nesting = nesting_of(model)
    if "depth" in nesting.axes:
        return [nesting.resolve(name) for name in nesting.names]
    costs, _ = layer_costs(model, "parameters")
    uniform = [sum(layer[i] for layer in costs) for i in range(len(costs[0]))]
    chosen: list[list[int]] = []
    for small, large in itertools.pairwise(uniform):
        for i in range(between + 1):
            mix = mix_and_match(costs, small + (large - small) * i / (between + 1))
            if mix not in chosen:
                chosen.append(mix)
    return [*chosen, [len(uniform) - 1] * len(costs)]


def halves(samples: Any, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of the even and of the odd samples, to fit a predictor on and to compare on."""
    first, second = (
        build_loader(Subset(samples, range(part, len(samples), 2)), batch_size, training=False)
        for part in (0, 1)
    )
    return first, second


@torch.no_grad()
def score(
    submodels: Sequence[Submodel], loader: Iterable, reference: Submodel, what: str
) -> dict[str, dict[str, float]]:
    """Size, accuracy, loss, agreement and KL of several submodels in one pass over the data.

    Args:
        submodels: scored by label.
        loader: batches of (images, targets).
        reference: the model that all are compared with, for agreement and KL.
        what: shown beside the progress bar.

    Returns:
        By label: parameters, macs, accuracy, loss, agreement, kl.
    """
    metrics = SubmodelMetrics([model.label for model in submodels]).to(device())
    for images, targets in track(loader, description=what, transient=True):
        images, targets = images.to(device()), targets.to(device())
        expected = reference.forward(images)
        for model in submodels:
            same = model.label == reference.label
            logits = expected if same else model.forward(images)
            metrics.update(model.label, logits, targets, expected)
    means = metrics.compute()
    return {
        model.label: {
            "parameters": model.parameters,
            "macs": model.macs,
            **{name: value.item() for name, value in means[model.label].items()},
        }
        for model in submodels
    }


def rows_of(row: str, scores: dict[str, dict[str, float]]) -> Iterator[Row]:
    """The scores of a model's sizes as rows of the table, the size in the column `set`."""
    for size, values in scores.items():
        for metric, value in values.items():
            yield Row(row=row, set=size, metric=metric, value=value)


def above_line(measured: Mapping[str, tuple[float, float]], uniform: Sequence[str]) -> float | None:
    """How far Mix'n'Match sizes lie above the line through the trained sizes, on average.

    Args:
        measured: parameters and a metric by the label of each size.
        uniform: labels of the trained sizes, the smallest first; the others are Mix'n'Match sizes.

    Returns:
        Mean of metric − line, in the metric's unit; None without Mix'n'Match sizes.
    """
    parameters, values = zip(*(measured[label] for label in uniform), strict=True)
    mixed = [size for label, size in measured.items() if label not in uniform]
    gaps = [value - float(np.interp(cost, parameters, values)) for cost, value in mixed]
    return sum(gaps) / len(gaps) if gaps else None


@torch.no_grad()
def encode(model: Submodel, loader: Iterable, what: str) -> tuple[Tensor, Tensor]:
    """Feature vectors (N, D) and labels (N,) of a data set."""
    features, labels = [], []
    for images, targets in track(loader, description=what, transient=True):
        features.append(model.features(images.to(device())).cpu())
        labels.append(targets)
    return torch.cat(features), torch.cat(labels)
