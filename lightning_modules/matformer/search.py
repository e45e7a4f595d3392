"""Evolutionary search for a submodel: the baseline that Mix'n'Match is compared with.

MatFormer, arXiv 2310.07707, appendix D.1. Measure the loss of a random sample of submodels, learn
to predict the loss from the configuration, then evolve the configuration of least predicted loss
within a budget. Mix'n'Match needs none of this and has the lower loss in the paper's Table 5.

The paper names neither the predictor nor the settings of the evolution; we chose those here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.compose import TransformedTargetRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics import mean_squared_error
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from lightning_modules.matformer.mix_and_match import Costs, check_budget

FOLDS = 5  # of the cross-validation that chooses the predictor's smoothness


def sample_configurations(
    layers: int, granularities: int, count: int, seed: int
) -> list[tuple[int, ...]]:
    """Draw distinct configurations, each layer's granularity uniform and independent.

    Args:
        layers: Number of layers.
        granularities: Number of nested sizes, g.
        count: How many configurations to draw.
        seed: Seed of the draw.

    Returns:
        ``count`` configurations in the order drawn, each with one granularity in [0, g) a layer.

    Raises:
        ValueError: If there are fewer than ``count`` configurations to draw from.
    """
    if count > granularities**layers:
        raise ValueError(
            f"count is {count}, but {layers} layers of {granularities} granularities have only "
            f"{granularities**layers} configurations; ask for at most that."
        )
    generator = np.random.default_rng(seed)
    drawn: dict[tuple[int, ...], None] = {}  # a set that keeps the order of insertion
    while len(drawn) < count:
        drawn[tuple(generator.integers(granularities, size=layers).tolist())] = None
    return list(drawn)


@dataclass(frozen=True)
class Predictor:
    """A learned map from configuration to loss.

    Attributes:
        estimator: The fitted scikit-learn estimator.
        mse: Mean squared error on the held-out pairs, in squared units of the loss; the paper
            reports about 5e-5 (appendix D.1).
        baseline_mse: The same for always predicting the mean of the training losses.
    """

    estimator: BaseEstimator
    mse: float
    baseline_mse: float

    @property
    def explained(self) -> float:
        """The share of the held-out losses' variance that it explains: 1 at best, 0 if none."""
        return 1 - self.mse / self.baseline_mse if self.baseline_mse else 0.0

    def predict(self, configurations: ArrayLike) -> NDArray[np.float64]:
        """Predict losses, shape (N,), of configurations, shape (N, layers)."""
        return self.estimator.predict(np.asarray(configurations))


def fit_predictor(
    configurations: Sequence[Sequence[int]],
    losses: Sequence[float],
    seed: int = 0,
    train_fraction: float = 0.6,
) -> Predictor:
    """Learn to predict the loss of a submodel from its granularities.

    Kernel ridge regression on two features of each layer: the granularity as a number (its effect
    is close to linear, about 0.04 log-perplexity a step in Table 6) and one-hot (for the
    non-linear part). Cross-validation on the training pairs chooses the kernel's width and the
    regularisation.

    Args:
        configurations: Granularity of each layer, shape (N, layers).
        losses: Measured loss of each configuration, shape (N,).
        seed: Seed of the split into training and held-out pairs.
        train_fraction: Share of the pairs to train on; the rest is held out (60/40 in the paper).

    Returns:
        The predictor, with its error on the held-out pairs.

    Raises:
        ValueError: If there is not one loss for each configuration, or the split leaves too few
            pairs on a side.
    """
    if len(configurations) != len(losses):
        raise ValueError(
            f"There are {len(configurations)} configurations and {len(losses)} losses; "
            "give one loss for each configuration."
        )
    train_pairs = int(len(losses) * train_fraction)
    if not FOLDS <= train_pairs < len(losses):
        raise ValueError(
            f"{len(losses)} pairs with train_fraction {train_fraction} leave {train_pairs} to "
            f"train on and {len(losses) - train_pairs} to hold out, where at least {FOLDS} and 1 "
            "are needed; measure more configurations or change train_fraction."
        )
    train_x, test_x, train_y, test_y = train_test_split(
        np.asarray(configurations), np.asarray(losses), train_size=train_pairs, random_state=seed
    )
    # a granularity that no training pair has in a layer still has its number as a feature
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    smoothness = {"alpha": np.logspace(-4, 1, 6), "gamma": np.logspace(-4, -1, 4)}
    ridge = GridSearchCV(
        KernelRidge(kernel="rbf"), smoothness, scoring="neg_mean_squared_error", cv=FOLDS
    )
    estimator = TransformedTargetRegressor(
        make_pipeline(make_union(StandardScaler(), one_hot), ridge), transformer=StandardScaler()
    ).fit(train_x, train_y)
    return Predictor(
        estimator,
        mse=mean_squared_error(test_y, estimator.predict(test_x)),
        baseline_mse=mean_squared_error(test_y, np.full_like(test_y, train_y.mean(), dtype=float)),
    )


def evolve(
    predictor: Predictor,
    costs: Costs,
    budget: float,
    population: int = 64,
    generations: int = 30,
    mutation: float = 0.1,
    seed: int = 0,
) -> list[int]:
    """Evolve the configuration of least predicted loss within a budget.

    Each generation keeps its best quarter and fills up with children of two random parents from
    that quarter: each layer is taken from either parent and then, with probability `mutation`,
    replaced by a random granularity. A child over the budget is made smaller at once.

    Args:
        predictor: Gives the loss of a configuration of as many layers as ``costs`` has.
        costs: ``costs[layer][granularity]``, smallest granularity first, in any unit.
        budget: Cost allowed for all layers together, in the same unit.
        population: Configurations in a generation.
        generations: Number of generations after the first.
        mutation: Probability that a child's layer mutates.
        seed: Seed of every random choice here.

    Returns:
        The granularity index of each layer, first layer first.

    Raises:
        ValueError: If there is no layer, the layers do not have equally many granularities, the
            smallest submodel exceeds the budget, or the population has no quarter to keep.
    """
    check_budget(costs, budget)
    if population < 4:
        raise ValueError(
            f"population is {population}; use at least 4, because a quarter become parents."
        )
    generator = np.random.default_rng(seed)
    cost = np.asarray(costs)
    layers, granularities = cost.shape
    layer_index = np.arange(layers)

    def random(count: int) -> NDArray[np.int64]:
        return generator.integers(granularities, size=(count, layers))

    def repair(configurations: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lower random layers by one step until every configuration is within the budget."""
        while (over := np.flatnonzero(cost[layer_index, configurations].sum(axis=1) > budget)).size:
            # 1 - [0, 1) is never 0, so a layer that is already smallest never has the highest draw
            draw = (1 - generator.random((over.size, layers))) * (configurations[over] > 0)
            configurations[over, draw.argmax(axis=1)] -= 1
        return configurations

    def fittest(configurations: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return configurations[predictor.predict(configurations).argsort(kind="stable")[:count]]

    generation = repair(random(population))
    for _ in range(generations):
        parents = fittest(generation, population // 4)
        child_count = population - len(parents)
        mothers, fathers = parents[generator.integers(len(parents), size=(2, child_count))]
        children = np.where(generator.random((child_count, layers)) < 0.5, mothers, fathers)
        mutates = generator.random((child_count, layers)) < mutation
        children = np.where(mutates, random(child_count), children)
        generation = np.concatenate([parents, repair(children)])
    return fittest(generation, 1)[0].tolist()
