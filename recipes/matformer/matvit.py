"""MatViT: one elastic vision Transformer beside the models it replaces.

Trains, at equal data, MatViT with sampled granularities (the paper), four independent ViTs, joint
training of all granularities (DynaBERT) and a random granularity per layer (OFA); then scores
every granularity, the Mix'n'Match sizes between them and the baselines, and writes report.md,
metrics.json and plots.

    python -m recipes.matformer.matvit                               digits, a few minutes on a CPU
    python -m recipes.matformer.matvit --preset small --seeds 3      tiny-imagenet of $RECIPES_DATA
    python -m recipes.matformer.matvit --preset paper --data.root /data/imagenet
"""

import statistics
from collections.abc import Sequence
from typing import Any, get_args

from matplotlib import pyplot as plt
from torch.utils.data import Subset

from datamodules.loading import build_loader
from lightning_modules.backbones import build_vision
from lightning_modules.matformer import arrange
from lightning_modules.matformer.mix_and_match import Order
from lightning_modules.matformer.nest import GRANULARITIES, nesting_of
from lightning_modules.matformer.search import evolve, fit_predictor, sample_configurations
from recipes.legacy import Experiment, StageResult, from_command_line
from recipes.matformer.submodels import ladder, load, plot_sizes, score, submodel
from recipes.messages import console
from recipes.report import markdown_table, mean_sd, save_plot, show_table, write_report

NESTED = {"matvit": "MatViT (sampled)", "joint": "joint (DynaBERT)", "per_layer": "per layer (OFA)"}
INDEPENDENT = "independent ViTs"
BETWEEN = 3  # Mix'n'Match sizes between neighbouring granularities
SEARCH_PAIRS = 60  # random (configuration, loss) pairs that the search learns from
ORDERS: tuple[Order, ...] = get_args(Order)

Scores = dict[str, dict[str, Any]]  # label → parameters, macs, accuracy, loss, agreement, kl


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("matformer.matvit", __file__, "matvit", __doc__ or "", argv)
    results: list[dict[str, Scores]] = []
    orders: list[list[dict[str, Any]]] = []
    for seed in range(experiment.seeds):
        checkpoints = train(experiment, seed)
        scores, rivals = evaluate(experiment, seed, checkpoints)
        results.append(scores)
        orders.append(rivals)
        report(experiment, results, orders)
    return experiment


def train(
    experiment: Experiment, seed: int, nested: Sequence[str] = tuple(NESTED)
) -> dict[str, StageResult]:
    """The given nested stages of one seed and the independent ones; their results by name.

    Equal data: the nested trainings see 4 X examples in all, each of the four independent models
    X (Appendix B.3). The joint training cuts each batch, four times as large, into one piece for
    each granularity, so it makes a quarter of the updates (B.4).
    """
    config = experiment.parsed("matvit")
    fractions = config.model.init_args.fractions
    count = len(fractions)
    overrides: dict[str, dict[str, Any]] = {
        "matvit": sampling(seed),
        "joint": {
            "trainer.callbacks": None,
            "model.init_args.joint": "mean",
            "model.init_args.split_batch": True,
            "model.init_args.warmup_steps": config.model.init_args.warmup_steps // count,
            "data.init_args.batch_size": config.data.init_args.batch_size * count,
        },
        "per_layer": sampling(seed, per_layer=True),
    }
    alone = {
        f"independent_{name}": independent(config, fraction)
        for name, fraction in zip(GRANULARITIES, fractions, strict=True)
    }
    stages = {name: overrides[name] for name in nested} | alone
    return {name: experiment.stage(name, "matvit", seed, stages[name]) for name in stages}


def sampling(seed: int, **settings: Any) -> dict[str, Any]:
    """What a stage overrides to draw granularities by its own seed.

    Args:
        seed: of the stage.
        settings: further arguments of GranularitySampling.
    """
    sampler = "callbacks.granularity.GranularitySampling"
    return {"trainer.callbacks": [{"class_path": sampler, "init_args": {"seed": seed, **settings}}]}


def independent(config: Any, fraction: float) -> dict[str, Any]:
    """What a nested stage overrides to train one plain model, on its share of the examples.

    Args:
        config: the nested stage, parsed.
        fraction: of the hidden neurons that the plain model has.

    Raises:
        ValueError: if the epochs do not divide by the number of granularities.
    """
    model, trainer = config.model.init_args, config.trainer
    count = len(model.fractions)
    if trainer.max_epochs % count:
        raise ValueError(
            f"trainer.max_epochs {trainer.max_epochs} must be a multiple of {count}: each "
            "independent model trains for that share of it"
        )
    model_args = model.model_args or {}
    return {
        "trainer.callbacks": None,
        "trainer.max_epochs": trainer.max_epochs // count,
        "trainer.check_val_every_n_epoch": max(1, trainer.check_val_every_n_epoch // count),
        "model.init_args.fractions": None,
        "model.init_args.warmup_steps": model.warmup_steps // count,
        "model.init_args.model_args": {
            **model_args,
            "mlp_ratio": hidden_ratio(model.architecture, model_args) * fraction,
        },
    }


def hidden_ratio(architecture: str, model_args: dict[str, Any]) -> float:
    """Hidden neurons of a feed-forward layer for each of its outputs."""
    if "mlp_ratio" in model_args:
        return model_args["mlp_ratio"]
    parts = build_vision(architecture, 0, model_args).modules()
    layer: Any = next(part.fc2 for part in parts if hasattr(part, "fc2"))
    return layer.in_features / layer.out_features


def evaluate(
    experiment: Experiment, seed: int, stages: dict[str, Any]
) -> tuple[dict[str, Scores], list[dict[str, Any]]]:
    """Score every submodel of every training on the validation set."""
    data = experiment.datamodule("matvit", seed)
    size = data.image_size
    scores: dict[str, Scores] = {}
    for name, title in NESTED.items():
        model = load(stages[name].checkpoint)
        sizes = [submodel(model, size, mix) for mix in ladder(model, BETWEEN)]
        scores[name] = score(sizes, data.val_dataloader(), sizes[-1], title)
    alone = [
        submodel(load(stages[f"independent_{name}"].checkpoint), size, None, label=name)
        for name in GRANULARITIES
    ]
    scores["independent"] = score(alone, data.val_dataloader(), alone[-1], INDEPENDENT)
    return scores, compare_orders(load(stages["matvit"].checkpoint), data, seed)


def compare_orders(model: Any, data: Any, seed: int) -> list[dict[str, Any]]:
    """Mix'n'Match beside other orders of the same layers, and beside evolutionary search.

    The search learns from losses on every other validation image; all are compared on the
    remaining images (Section 3.3, Appendix D.1).
    """
    images = data.val_set
    learn, judge = (
        build_loader(
            Subset(images, range(part, len(images), 2)), data.eval_batch_size, training=False
        )
        for part in (0, 1)
    )
    nesting = nesting_of(model)
    widths, layers, size = nesting.layers[0].widths, len(nesting.layers), data.image_size
    largest = submodel(model, size, [len(widths) - 1] * layers)
    pairs = sample_configurations(layers, len(widths), SEARCH_PAIRS, seed)
    samples = [submodel(model, size, mix) for mix in pairs]
    seen = score(samples, learn, largest, "search: losses of random configurations")
    losses = [seen[sample.label]["loss"] for sample in samples]
    predictor = fit_predictor(pairs, losses, seed)
    rows = []
    for level in range(len(widths) - 1):
        mix = [level] * (layers - layers // 2) + [level + 1] * (layers // 2)
        budget = sum(widths[g] for g in mix)
        chosen: dict[str, list[int]] = {order: arrange(mix, order) for order in ORDERS}
        chosen["search"] = evolve(predictor, [widths] * layers, budget, seed=seed)
        models = {
            name: submodel(model, size, granularities) for name, granularities in chosen.items()
        }
        values = score(
            list({m.label: m for m in models.values()}.values()), judge, largest, "orders"
        )
        rows.append(
            {
                "budget": budget,
                "predictor_mse": predictor.mse,
                **{
                    name: {"configuration": m.label, **values[m.label]}
                    for name, m in models.items()
                },
            }
        )
    return rows


def report(
    experiment: Experiment,
    results: Sequence[dict[str, Scores]],
    orders: Sequence[list[dict[str, Any]]],
) -> None:
    """Write report.md, metrics.json and the plots, and show the main table."""
    titles = {**NESTED, "independent": INDEPENDENT}
    header = ["size", "parameters", "multiply-adds", *titles.values()]
    agreement, divergence, main = [], [], []
    for label, sizes in results[0]["matvit"].items():
        cells: dict[str, list[str]] = {"accuracy": [], "agreement": [], "kl": []}
        for method in titles:
            found = [r[method][label] for r in results if label in r[method]]
            for name, scale, digits in (("accuracy", 100, 1), ("agreement", 100, 1), ("kl", 1, 3)):
                cells[name].append(
                    mean_sd([f[name] for f in found], scale, digits) if found else ""
                )
        first = [label, f"{sizes['parameters']:,}", f"{sizes['macs'] / 1e6:,.2f} M"]
        main.append([*first, *cells["accuracy"]])
        agreement.append([label, *cells["agreement"]])
        divergence.append([label, *cells["kl"]])
    plot_accuracy(experiment, results, titles)
    order_names = [*ORDERS, "search"]
    order_rows = [
        [f"{rows[0]['budget']:,}", rows[0]["increase"]["configuration"]]
        + [mean_sd([row[name]["loss"] for row in rows], 1, 4) for name in order_names]
        for rows in zip(*orders, strict=True)
    ]
    mse = statistics.fmean(rows[0]["predictor_mse"] for rows in orders)
    text = [
        f"# MatViT, preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Validation accuracy in %, mean ± standard deviation over seeds; parameters and "
        "multiply-adds without the classifier. Labels with `*` are Mix'n'Match sizes: `M*3+L*3` "
        "is three layers of M, then three of L. All trainings saw the same number of examples; "
        "an independent model exists only at the four granularities.",
        markdown_table(header, main),
        "![accuracy against parameters and multiply-adds](accuracy.png)",
        "## Agreement with the largest model of the same training",
        "Share of equal predictions, %:",
        markdown_table(["size", *titles.values()], agreement),
        "KL(largest ‖ submodel), nats:",
        markdown_table(["size", *titles.values()], divergence),
        "## Mix'n'Match beside other orders and beside search",
        "Loss of MatViT (sampled) on half of the validation images; the budget is hidden neurons "
        "over all layers. The four orders place the same layers differently; Mix'n'Match is "
        f"`increase`. The search's predictor learned from {SEARCH_PAIRS} configurations on the "
        f"other half; its held-out mean squared error is {mse:.2g}.",
        markdown_table(["budget", "Mix'n'Match", *order_names], order_rows),
    ]
    show_table(f"MatViT ({experiment.preset}): validation accuracy, %", header, main)
    metrics = {
        "provenance": experiment.provenance(len(results)),
        "seeds": results,
        "orders": orders,
    }
    write_report(experiment.out, text, metrics)


def plot_accuracy(
    experiment: Experiment, results: Sequence[dict[str, Scores]], titles: dict[str, str]
) -> None:
    """Accuracy against parameters and against multiply-adds, one line for each training."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, (cost, name) in zip(
        axes, (("parameters", "parameters"), ("macs", "multiply-adds")), strict=True
    ):
        curves = {
            title: {
                label: (
                    sizes[cost] / 1e6,
                    100 * statistics.fmean(r[method][label]["accuracy"] for r in results),
                )
                for label, sizes in results[0][method].items()
            }
            for method, title in titles.items()
        }
        plot_sizes(axis, curves, separate=INDEPENDENT)
        axis.set_xlabel(f"{name}, millions (without classifier)")
    axes[0].set_ylabel("validation accuracy, %")
    axes[1].legend(loc="best")
    save_plot(figure, experiment.out / "accuracy.png")


if __name__ == "__main__":
    console(main)
