"""The learned predictor and the evolution, on losses whose best submodel is known."""

from itertools import product

import numpy as np
import pytest

from lightning_modules.matformer.mix_and_match import mix_and_match
from lightning_modules.matformer.search import (
    Predictor,
    evolve,
    fit_predictor,
    sample_configurations,
)

LAYERS = 6
WIDTHS = [1, 2, 4, 8]
EVERY = np.array(list(product(range(4), repeat=LAYERS)))
COST = np.array(WIDTHS)[EVERY].sum(axis=1)
NOISE = 0.002


def true_loss(configurations):
    """Sum over layers, each with its own gain from S to M to L to XL."""
    gains = np.random.default_rng(0).uniform(0, 0.2, size=(LAYERS, 4)).cumsum(axis=1)
    return 3 - gains[np.arange(LAYERS), np.asarray(configurations)].mean(axis=1)


class Oracle(Predictor):
    """Predicts the true loss, so that only the evolution can err."""

    def __init__(self):
        super().__init__(estimator=None, mse=0.0, baseline_mse=0.0)

    def predict(self, configurations):
        return true_loss(configurations)


@pytest.fixture(scope="module")
def predictor():
    configurations = sample_configurations(LAYERS, len(WIDTHS), 200, seed=1)
    noise = np.random.default_rng(2).normal(0, NOISE, size=200)
    return fit_predictor(configurations, true_loss(configurations) + noise)


def test_sampled_configurations_are_distinct_and_follow_the_seed():
    drawn = sample_configurations(16, 4, 50, seed=3)
    assert len(set(drawn)) == 50
    assert {granularity for configuration in drawn for granularity in configuration} == {0, 1, 2, 3}
    assert all(len(configuration) == 16 for configuration in drawn)
    assert drawn == sample_configurations(16, 4, 50, seed=3)
    assert drawn != sample_configurations(16, 4, 50, seed=4)


def test_sampling_can_exhaust_the_configurations_but_not_exceed_them():
    assert set(sample_configurations(3, 2, 8, seed=0)) == set(product(range(2), repeat=3))
    with pytest.raises(ValueError, match="count is 9.* only 8 configurations"):
        sample_configurations(3, 2, 9, seed=0)


def test_predictor_learns_down_to_the_noise(predictor):
    assert predictor.mse < 3 * NOISE**2
    assert predictor.mse < 0.02 * predictor.baseline_mse and 0.98 < predictor.explained < 1
    unseen = true_loss(EVERY)
    assert np.mean((predictor.predict(EVERY) - unseen) ** 2) < 0.02 * unseen.var()


def test_predictor_beats_the_mean_when_layers_interact():
    configurations = sample_configurations(LAYERS, len(WIDTHS), 200, seed=1)
    steps = np.abs(np.diff(configurations, axis=1)).mean(axis=1)
    predictor = fit_predictor(configurations, true_loss(configurations) + 0.05 * steps)
    assert predictor.mse < 0.1 * predictor.baseline_mse
    assert fit_predictor(configurations, [3.0] * len(configurations)).explained == 0


def test_predictor_extends_to_a_granularity_that_training_never_saw():
    configurations = sample_configurations(LAYERS, 3, 200, seed=1)
    predictor = fit_predictor(configurations, [3 - 0.1 * sum(c) / LAYERS for c in configurations])
    large, largest = predictor.predict([[2] * LAYERS, [3] * LAYERS])
    assert largest < large


def test_predictor_holds_out_a_split_that_its_seed_fixes():
    configurations = sample_configurations(LAYERS, len(WIDTHS), 20, seed=1)
    losses = true_loss(configurations)
    assert fit_predictor(configurations, losses).mse == fit_predictor(configurations, losses).mse
    assert (
        fit_predictor(configurations, losses, seed=0).mse
        != fit_predictor(configurations, losses, seed=1).mse
    )


def test_baseline_is_the_training_mean_on_the_held_out_pairs():
    # Equal losses but for one: wherever that one falls, the baseline follows by hand.
    losses = [1.0] * 9 + [2.0]
    predictor = fit_predictor(sample_configurations(LAYERS, 4, 10, seed=0), losses)
    in_held_out, in_training = 1 / 4, (1 / 6) ** 2
    assert predictor.baseline_mse == pytest.approx(in_held_out) or (
        predictor.baseline_mse == pytest.approx(in_training)
    )


@pytest.mark.parametrize(
    "pairs, losses, fraction, message",
    [
        (8, 8, 0.6, "8 pairs with train_fraction 0.6 leave 4 to train on and 4 to hold out"),
        (20, 20, 1.0, "leave 20 to train on and 0 to hold out"),
        (20, 19, 0.6, "20 configurations and 19 losses"),
    ],
)
def test_too_few_pairs_are_refused(pairs, losses, fraction, message):
    configurations = sample_configurations(LAYERS, 4, pairs, seed=0)
    with pytest.raises(ValueError, match=message):
        fit_predictor(configurations, [1.0] * losses, train_fraction=fraction)


@pytest.mark.parametrize("budget", [6, 7, 9, 12, 17, 24, 31, 47, 48, 1000])
def test_evolution_finds_the_best_configuration_within_the_budget(predictor, budget):
    within = EVERY[budget >= COST]
    best = true_loss(within).min()

    exact = evolve(Oracle(), [WIDTHS] * LAYERS, budget)
    assert true_loss([exact])[0] == pytest.approx(best, abs=0.002)

    learned = evolve(predictor, [WIDTHS] * LAYERS, budget)
    assert true_loss([learned])[0] == pytest.approx(best, abs=0.005)
    assert all(type(granularity) is int for granularity in learned)


def test_evolution_never_looks_outside_the_budget():
    seen = []

    class Watching(Oracle):
        def predict(self, configurations):
            seen.append(np.array(configurations))
            return super().predict(configurations)

    evolve(Watching(), [WIDTHS] * LAYERS, budget=13, mutation=1.0)
    seen = np.concatenate(seen)
    assert np.array(WIDTHS)[seen].sum(axis=1).max() <= 13
    assert seen.min() == 0


def test_evolution_is_fixed_by_its_seed_and_leaves_the_global_generator_alone(predictor):
    # Without a generation the first random population decides, so that seeds must show.
    def first(seed):
        return evolve(predictor, [WIDTHS] * LAYERS, 20, generations=0, seed=seed)

    before = np.random.get_state()[1].tolist()
    assert first(0) == first(0)
    assert len({tuple(first(seed)) for seed in range(5)}) > 1
    assert evolve(predictor, [WIDTHS] * LAYERS, 20, seed=5) == evolve(
        predictor, [WIDTHS] * LAYERS, 20, seed=5
    )
    assert np.random.get_state()[1].tolist() == before


def test_evolution_beats_random_choice_over_sixteen_layers():
    gains = np.random.default_rng(0).uniform(0.3, 1, size=16)

    class Deep(Oracle):
        def predict(self, configurations):
            return 3 - (np.asarray(configurations) * gains).mean(axis=1)

    budget = 40
    found = evolve(Deep(), [WIDTHS] * 16, budget)
    unevolved = evolve(Deep(), [WIDTHS] * 16, budget, generations=0)
    assert Deep().predict([found])[0] < Deep().predict([unevolved])[0]
    assert Deep().predict([found])[0] < Deep().predict([mix_and_match([WIDTHS] * 16, budget)])[0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"budget": 5}, "budget of 5 is below the smallest submodel's cost of 6"),
        ({"costs": [[1, 2], [1]]}, r"costs has \[2, 1\] entries in its layers"),
        ({"population": 3}, "population is 3; use at least 4"),
    ],
)
def test_evolution_refuses_what_it_cannot_search(settings, message):
    with pytest.raises(ValueError, match=message):
        evolve(Oracle(), **{"costs": [WIDTHS] * LAYERS, "budget": 20} | settings)
