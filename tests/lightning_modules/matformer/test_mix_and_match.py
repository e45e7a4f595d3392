"""Mix'n'Match against brute force and against the paper's Table 5."""

from collections import Counter
from itertools import pairwise, product

import pytest

from lightning_modules.matformer.mix_and_match import arrange, mix_and_match

S, M, L, XL = range(4)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("widths", [[7], [3, 5], [1, 2, 4, 8], [4, 5, 9, 30]])
def test_no_other_least_slope_configuration_within_the_budget_costs_more(layers, widths):
    def cost(configuration):
        return sum(widths[granularity] for granularity in configuration)

    least_slope = [
        configuration
        for configuration in product(range(len(widths)), repeat=layers)
        if all(a <= b for a, b in pairwise(configuration))
        and configuration[-1] - configuration[0] <= 1
    ]
    for budget in range(layers * widths[0], layers * widths[-1] + 3):
        ours = mix_and_match([widths] * layers, budget)
        affordable = [c for c in least_slope if cost(c) <= budget]
        assert tuple(ours) == max(affordable, key=cost), f"budget {budget}"


@pytest.mark.parametrize(
    "millions, expected",
    [
        (226.5, [M] * 16),
        (245.4, [M] * 12 + [L] * 4),
        (278.4, [M] * 5 + [L] * 11),
        (377.5, [L] * 8 + [XL] * 8),
        (415.2, [L] * 4 + [XL] * 12),  # the row that the paper prints beside 377M
    ],
)
def test_table_5_counts_non_embedding_parameters_of_the_850m_model(millions, expected):
    layers, d = 16, 1536
    attention = 4 * d * d
    widths = [attention + 2 * d * (4 * d // k) for k in (8, 4, 2, 1)]
    exact = sum(widths[granularity] for granularity in expected)
    assert round(exact / 1e6, 1) == millions
    assert mix_and_match([widths] * layers, exact) == expected
    assert mix_and_match([widths] * layers, exact - 1) != expected
    assert mix_and_match([widths] * layers, exact + 1) == expected

    # The unit is free: FFN parameters alone choose the same once attention leaves the budget.
    ffn = [width - attention for width in widths]
    assert mix_and_match([ffn] * layers, exact - layers * attention) == expected


def test_the_rest_of_the_model_counts():
    costs = [[1, 2, 4, 8]] * 3
    assert mix_and_match(costs, 15, rest=8) == mix_and_match(costs, 7) == [1, 1, 1]
    with pytest.raises(
        ValueError, match="budget of 10 is below the smallest submodel's cost of 11"
    ):
        mix_and_match(costs, 10, rest=8)


def test_a_budget_above_the_largest_submodel_gives_the_largest():
    assert mix_and_match([[1, 2, 4, 8]] * 3, 10**12) == [XL] * 3


@pytest.mark.parametrize(
    "costs, budget, message",
    [
        ([], 9, "costs is empty"),
        ([[], []], 9, r"costs has \[0, 0\] entries"),
        ([[1, 2], [1, 2, 3]], 9, r"costs has \[2, 3\] entries in its layers"),
        ([[3, 5]] * 4, 11, "budget of 11 is below the smallest submodel's cost of 12"),
        ([[3, 5]] * 4, float("nan"), "budget of nan is below the smallest submodel's cost of 12"),
    ],
)
def test_what_no_submodel_fits_is_refused(costs, budget, message):
    with pytest.raises(ValueError, match=message):
        mix_and_match(costs, budget)


def test_each_layer_counts_with_its_own_cost():
    """Swin's stages: by the first layer's widths alone, half of these budgets would be broken."""
    costs = [[1, 2, 4], [1, 2, 4], [4, 8, 16], [16, 32, 64]]
    least_slope = [
        c
        for c in product(range(3), repeat=4)
        if all(a <= b for a, b in pairwise(c)) and c[-1] - c[0] <= 1
    ]

    def cost(configuration):
        return sum(layer[index] for layer, index in zip(costs, configuration, strict=True))

    for budget in range(22, 100):
        best = max(cost(c) for c in least_slope if cost(c) <= budget)
        assert cost(mix_and_match(costs, budget)) == best
        assert tuple(mix_and_match(costs, budget)) in least_slope


def test_measured_costs_need_not_rise():
    assert mix_and_match([[2.0, 1.5], [2.0, 2.5]], 4.0) == [1, 1]


@pytest.mark.parametrize(
    "order, even, odd",
    [
        ("increase", [M, M, M, L, L, L], [S, M, M, L, XL]),
        ("decrease", [L, L, L, M, M, M], [XL, L, M, M, S]),
        ("increase-decrease", [M, M, L, L, L, M], [S, M, XL, L, M]),
        ("decrease-increase", [L, L, M, M, M, L], [XL, M, S, M, L]),
    ],
)
def test_arrange_moves_granularities_as_its_order_says(order, even, odd):
    assert arrange([M, M, M, L, L, L], order) == even
    assert arrange([L, S, M, XL, M], order) == odd


@pytest.mark.parametrize("layers", range(1, 7))
def test_arrange_keeps_the_multiset_and_turns_at_most_once(layers):
    for configuration in product(range(3), repeat=layers):
        for order, first in {"increase-decrease": 1, "decrease-increase": -1}.items():
            arranged = arrange(configuration, order)
            assert Counter(arranged) == Counter(configuration)
            steps = [first * (b - a) for a, b in pairwise(arranged) if a != b]
            assert steps == sorted(steps, key=lambda step: step < 0), "one turn, the right way"
        assert arrange(configuration, "increase") == sorted(configuration)
        assert arrange(configuration, "decrease") == sorted(configuration, reverse=True)


def test_arrange_refuses_an_unknown_order():
    with pytest.raises(ValueError, match="order is 'zigzag'; choose one of increase, decrease"):
        arrange([S, M], "zigzag")
