"""Measurements of trained language models: sizes, consistency, drafts, Mix'n'Match orders."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_modules.matformer import arrange, extract, mix_and_match
from lightning_modules.matformer.drafts import drafter
from lightning_modules.matformer.mix_and_match import ORDERS
from lightning_modules.matformer.nest import nesting_of
from lightning_modules.matformer.search import evolve, fit_predictor, sample_configurations
from lightning_modules.matformer.speculative import (
    SpeculationRecord,
    best_length,
    relative_cost,
    speculative_generate,
)
from recipes.experiment import Measuring
from recipes.machine import OthersAtWork, ratio, rounds
from recipes.matformer.convergence import INDEPENDENT
from recipes.matformer.language import plain, rows_of, score, sizes, submodels
from recipes.matformer.submodels import BETWEEN, above_line, halves, ladder
from recipes.nodes import device
from recipes.plan import device_count
from recipes.records import at
from recipes.results import Row

# Table 5: the smaller granularity, and the share of its 16 layers that are one granularity larger
BUDGETS = ((1, 0.0), (1, 0.25), (1, 0.6875), (2, 0.5))
TRAINING_COST = 2.58  # of all four granularities, relative to XL, as the paper counts it
APART = "matlm, caches apart"  # the row of MatLM whose draft has a cache of its own
ROUNDS, SECONDS = 15, 90.0  # of timing a seed's decoding, at most


def measure_sizes(m: Measuring) -> Iterator[Row]:
    """Score every granularity and the Mix'n'Match sizes between them, beside the largest."""
    model, data = m.model("model"), m.datamodule("model")
    suffix = m.settings.get("suffix", "")
    chosen = ladder(model, m.settings.get("between", BETWEEN))[::-1]
    nesting = nesting_of(model)
    scores = score(submodels(model, chosen), data.val_dataloader(), model.config.vocab_size)
    training = {"tokens": tokens(m, "model"), "lr": at(m.stages["model"].settings, "model.lr")}
    costs = {nesting.label(mix): {**sizes(model, mix), **training} for mix in chosen}
    row = m.settings["row"]
    yield from rows_of(row, *(_named(part, suffix) for part in (scores, costs)))
    losses = {label: (costs[label]["non_embedding"], scores[label]["loss"]) for label in scores}
    if (above := above_line(losses, nesting.names)) is not None:
        yield Row(row, "below the line", -above)
    if row == "matlm" and not suffix:
        weights = [costs[name]["non_embedding"] for name in nesting.names]
        yield Row(row, "cost of all sizes", sum(weights) / max(weights))
        yield Row("paper", "cost of all sizes", TRAINING_COST)


def measure_independent(m: Measuring) -> Iterator[Row]:
    """Score the independent models, and compare each with the largest of them."""
    models = {name: m.model(name) for name in reversed(list(m.stages))}
    data = m.datamodule(next(iter(models)))
    vocabulary = next(iter(models.values())).config.vocab_size
    scores = score({n: plain(x) for n, x in models.items()}, data.val_dataloader(), vocabulary)
    rates = {name: at(stage.settings, "model.lr") for name, stage in m.stages.items()}
    costs = {
        n: {**sizes(x, None), "tokens": tokens(m, n), "lr": rates[n]} for n, x in models.items()
    }
    suffix, row = m.settings.get("suffix", ""), m.settings.get("row", INDEPENDENT)
    yield from rows_of(row, *(_named(part, suffix) for part in (scores, costs)))


def _named(values: dict[str, Any], suffix: str) -> dict[str, Any]:
    return {f"{label}{suffix}": value for label, value in values.items()}


def tokens(m: Measuring, name: str) -> int:
    """The number of tokens that a stage trained on."""
    settings = m.stages[name].settings
    data, trainer = settings.data.init_args, settings.trainer
    batch = data.batch_size * device_count(trainer) * trainer.accumulate_grad_batches
    return trainer.max_steps * batch * data.length


@torch.no_grad()
def measure_drafts(m: Measuring) -> Iterator[Row]:
    """The share of drafted tokens that XL accepts, from its own S or one trained alone (Table 2).

    MatLM's S also drafts with a separate cache, to show the effect of sharing XL's.
    """
    pairs: dict[str, tuple[Any, Any]] = {}
    if "model" in m.stages:
        pairs["matlm"] = (m.model("model"), "S")
    if "XL" in m.stages:
        pairs[INDEPENDENT] = tuple(m.model(name) for name in ("XL", "S"))
    prompts, new = texts(m, 16)
    for row, (verifier, draft) in pairs.items():
        for share in (True, False) if row == "matlm" else (False,):
            record = SpeculationRecord()
            speculative_generate(
                verifier, prompts, draft, new, share_cache=share, eos_token_id=[], record=record
            )
            name = row if share == (row == "matlm") else APART
            yield Row(name, "acceptance", record.acceptance)


def texts(m: Measuring, count: int) -> tuple[Tensor, int]:
    """Prompts (N, L), at most `count`, of the validation text, and how many tokens to add to each.

    A prompt is half as long as a training block, a continuation a quarter.
    """
    data = m.datamodule(next(iter(m.stages)))
    windows = data.samples("val")
    prompts = torch.stack([windows[i]["input_ids"] for i in range(min(count, len(windows)))])
    return prompts[:, : data.length // 2].to(device()), data.length // 4


def measure_decoding(m: Measuring) -> Iterator[Row]:
    """How many times as fast as XL alone it writes when S drafts, one text at a time (Table 2).

    Greedy, with the draft length that is best for the acceptance; timed in turn. The values are
    missing if other programs used the machine meanwhile.
    """
    prompts, new = texts(m, 4)
    model, large, small = (m.model(name) for name in ("model", "XL", "S"))

    def writing(verifier: Any, draft: Any = None, share: bool = False) -> Callable[[], Any]:
        k = 0 if draft is None else draft_length(verifier, draft, prompts, new)
        return lambda: [
            speculative_generate(verifier, text, draft, new, k, share, eos_token_id=[])
            for text in prompts.split(1)
        ]

    others = OthersAtWork()
    measured = rounds(
        {
            "XL": writing(model),
            "S": writing(extract(model, "S")),
            "matlm": writing(model, "S", share=True),
            APART: writing(model, "S"),
            "XL alone": writing(large),
            INDEPENDENT: writing(large, small),
        },
        ROUNDS,
        SECONDS,
        device(),
    )
    undisturbed = others.absent()
    for row, alone in (("matlm", "XL"), (APART, "XL"), (INDEPENDENT, "XL alone")):
        yield Row(row, "speed-up", ratio(measured, alone, row) if undisturbed else None)
    saved = 1 - ratio(measured, "S", "XL")
    yield Row("matlm", "time saved by S", saved if undisturbed else None)


def draft_length(verifier: Any, draft: Any, prompts: Tensor, new: int) -> int:
    """The draft length with the largest expected speed-up, at the acceptance of these texts.

    Chosen before anything is timed: to count multiply-adds, as draft_tokens="adaptive" does in
    every call, takes as long as many tokens of a small model.
    """
    record = SpeculationRecord()
    speculative_generate(verifier, prompts, draft, new, eos_token_id=[], record=record)
    cost = relative_cost(drafter(verifier, None), drafter(verifier, draft), prompts)
    return best_length(record, cost)


def measure_orders(m: Measuring) -> Iterator[Row]:
    """Compare Mix'n'Match with other orders, with search, and with layers of S and XL only.

    Section 3.3, Appendix D.1, at Table 5's budgets. The search's predictor is fitted to losses on
    every other window of the validation text; all configurations are compared on the remaining
    windows. Layers of S and XL only (`ends`) cannot meet every budget when there are few layers:
    they are compared with Mix'n'Match of at most as many hidden neurons (`least_slope`).
    """
    model, data = m.model("model"), m.datamodule("model")
    fitting, comparing = halves(data.samples("val"), data.eval_batch_size)
    nesting, vocabulary = nesting_of(model), model.config.vocab_size
    layers, widths = len(nesting.layers), nesting.layers[0].widths
    largest = [len(widths) - 1] * layers
    sampled = sample_configurations(layers, len(widths), m.settings["pairs"], m.seed)
    fitted = score(submodels(model, [largest, *sampled]), fitting, vocabulary)
    losses = [fitted[nesting.label(mix)]["loss"] for mix in sampled]
    predictor = fit_predictor(sampled, losses, m.seed)
    yield Row("search", "predictor_mse", predictor.mse)
    yield Row("search", "predictor_mse of the mean", predictor.baseline_mse)
    yield Row("search", "predictor_explained", predictor.explained)

    def neurons(configuration: Sequence[int]) -> int:
        return sum(widths[index] for index in configuration)

    def compared(chosen: dict[str, list[int]], metric: str, name: str) -> Iterator[Row]:
        configurations = {tuple(one): None for one in (largest, *chosen.values())}
        scores = score(submodels(model, configurations), comparing, vocabulary)
        for row, configuration in chosen.items():
            yield Row(row, metric, scores[nesting.label(configuration)]["loss"], set=name)
            yield Row(row, "hidden neurons", neurons(configuration), set=name)

    counts = set()  # of XL layers in `ends`, the most that each budget allows
    for mix in budgets(layers):
        # layers that are all alike have one order
        orders = ORDERS if len(set(mix)) > 1 else ("increase",)
        chosen: dict[str, list[int]] = {order: arrange(mix, order) for order in orders}
        chosen["search"] = evolve(predictor, [widths] * layers, neurons(mix), seed=m.seed)
        yield from compared(chosen, "loss at budget", nesting.label(mix))
        counts.add(max(1, (neurons(mix) - layers * widths[0]) // (widths[-1] - widths[0])))
    for count in sorted(counts):
        ends = [0] * (layers - count) + [len(widths) - 1] * count
        least_slope = mix_and_match([widths] * layers, neurons(ends))
        chosen = {"ends": ends, "least_slope": least_slope}
        yield from compared(chosen, "loss by slope", nesting.label(ends))


def budgets(layers: int) -> list[list[int]]:
    """Table 5's mixes of granularities for a number of layers, each once; the larger last."""
    mixes: list[list[int]] = []
    for level, share in BUDGETS:
        raised = round(layers * share)
        mix = [level] * (layers - raised) + [level + 1] * raised
        if mix not in mixes:
            mixes.append(mix)
    return mixes
