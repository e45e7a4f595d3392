"""Measurements of trained vision models: sizes, agreement, chance, Mix'n'Match orders."""

from collections.abc import Iterator
from typing import Any

from lightning_modules.matformer import arrange, layer_costs, mix_and_match
from lightning_modules.matformer.mix_and_match import ORDERS
from lightning_modules.matformer.nest import nesting_of
from lightning_modules.matformer.search import evolve, fit_predictor, sample_configurations
from recipes.experiment import Measuring
from recipes.matformer.submodels import (
    BETWEEN,
    SEARCH_PAIRS,
    above_line,
    halves,
    ladder,
    rows_of,
    score,
    submodel,
)
from recipes.records import at
from recipes.results import Row


def measure_nested(m: Measuring) -> Iterator[Row]:
    """Score every granularity of a nested model, and Mix'n'Match sizes between them."""
    data, model = m.datamodule("model"), m.model("model")
    between = m.settings.get("between", BETWEEN)
    sizes = [submodel(model, data.image_size, mix) for mix in ladder(model, between)]
    row = m.settings["row"]
    scores = score(sizes, data.val_dataloader(), sizes[-1], row)
    rate = at(m.stages["model"].settings, "model.lr")
    yield from rows_of(row, {label: {**one, "lr": rate} for label, one in scores.items()})
    accuracies = {label: (one["parameters"], one["accuracy"]) for label, one in scores.items()}
    if (above := above_line(accuracies, nesting_of(model).names)) is not None:
        yield Row(row, "above the line", above)


def measure_alone(m: Measuring) -> Iterator[Row]:
    """Score plain models of several sizes, and compare each with the largest of them."""
    data = m.datamodule(next(iter(m.stages)))
    models = [submodel(m.model(size), data.image_size, None, label=size) for size in m.stages]
    row = m.settings["row"]
    yield from rows_of(row, score(models, data.val_dataloader(), models[-1], row))
    for size, stage in m.stages.items():
        yield Row(row, "lr", at(stage.settings, "model.lr"), size)


def measure_chance(m: Measuring) -> Iterator[Row]:
    """The accuracy of drawing a class at random, all as likely."""
    yield Row("chance", "accuracy", 1 / m.datamodule(next(iter(m.stages))).num_classes)


def measure_orders(m: Measuring) -> Iterator[Row]:
    """Compare Mix'n'Match with other configurations of its size (Section 3.3, Appendix D.1).

    The others are the same layers in other orders, [S … S, XL … XL], and the result of an
    evolutionary search. The search's predictor is fitted to losses on every other validation image;
    all configurations are compared on the remaining images.
    """
    data, model = m.datamodule("model"), m.model("model")
    fitting, comparing = halves(data.val_set, data.eval_batch_size)
    costs, _ = layer_costs(model, "parameters")
    layers, sizes = len(costs), len(costs[0])

    def cost(mix: list[int]) -> float:
        return sum(layer[index] for layer, index in zip(costs, mix, strict=True))

    def losses(chosen: dict[str, list[int]], loader: Any) -> dict[str, float]:
        models = {name: submodel(model, data.image_size, mix) for name, mix in chosen.items()}
        distinct = list({model.label: model for model in models.values()}.values())
        scores = score(distinct, loader, largest, "orders")
        return {name: scores[model.label]["loss"] for name, model in models.items()}

    largest = submodel(model, data.image_size, [sizes - 1] * layers)
    sampled = sample_configurations(layers, sizes, min(SEARCH_PAIRS, sizes**layers), m.seed)
    targets = losses({str(place): list(mix) for place, mix in enumerate(sampled)}, fitting)
    predictor = fit_predictor(sampled, list(targets.values()), m.seed)
    yield Row(row="search", metric="predictor_mse", value=predictor.mse)
    yield Row(row="search", metric="predictor_variance", value=predictor.baseline_mse)
    yield Row(row="search", metric="predictor_explained", value=predictor.explained)

    for level in range(sizes - 1):
        mix = [level] * (layers - layers // 2) + [level + 1] * (layers // 2)
        chosen: dict[str, list[int]] = {order: arrange(mix, order) for order in ORDERS}
        chosen["search"] = evolve(predictor, costs, cost(mix), seed=m.seed)
        name = nesting_of(model).label(mix)
        for row, loss in losses(chosen, comparing).items():
            yield Row(row=row, set=name, metric="loss", value=loss)
            yield Row(row=row, set=name, metric="cost", value=cost(chosen[row]))
    for count in range(1, layers):
        ends = [0] * (layers - count) + [sizes - 1] * count
        chosen = {"ends": ends, "least_slope": mix_and_match(costs, cost(ends))}
        name = nesting_of(model).label(ends)
        for row, loss in losses(chosen, comparing).items():
            yield Row(row=row, set=name, metric="loss", value=loss)
            yield Row(row=row, set=name, metric="cost", value=cost(chosen[row]))
