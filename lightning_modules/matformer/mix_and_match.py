"""Mix'n'Match: chooses a granularity for each layer under a budget, without search.

MatFormer, arXiv 2310.07707, section 3.3 and appendix D.1. A model trained with g nested sizes
holds g^layers submodels. Section 3.3 picks one without measuring any of them: granularities do not
decrease with depth, and change as little as possible.
"""

from collections.abc import Sequence
from typing import Literal, get_args

Costs = Sequence[Sequence[float]]  # of each layer at each granularity, smallest first
Order = Literal["increase", "decrease", "increase-decrease", "decrease-increase"]
ORDERS: tuple[Order, ...] = get_args(Order)


def check_budget(costs: Costs, budget: float, rest: float = 0) -> None:
    """Refuse a budget that is below the smallest submodel's cost.

    Args:
        costs: ``costs[layer][granularity]``, smallest granularity first.
        budget: Cost allowed for all layers and the rest together, in the same unit.
        rest: Cost of everything outside the layers.

    Raises:
        ValueError: If there is no layer, the layers do not have equally many granularities, or the
            smallest submodel exceeds the budget.
    """
    if not costs:
        raise ValueError("costs is empty; a model to choose from has at least 1 layer.")
    if not all(len(layer) == len(costs[0]) > 0 for layer in costs):
        raise ValueError(
            f"costs has {[len(layer) for layer in costs]} entries in its layers; give each layer "
            "one for each granularity."
        )
    smallest = rest + sum(layer[0] for layer in costs)
    if not budget >= smallest:  # NaN too
        raise ValueError(
            f"the budget of {budget:,} is below the smallest submodel's cost of {smallest:,}: "
            "raise it to at least that"
        )


def mix_and_match(costs: Costs, budget: float, rest: float = 0) -> list[int]:
    """Choose the granularity of each layer for a budget.

    A configuration of least slope takes at most one step between neighbouring granularities:

        i, …, i, i+1, …, i+1        (the last k layers one granularity larger)

    The result is the most expensive of these within the budget. Section 3.3 and appendix D.1; it
    reproduces the 16-layer rows of Table 5. Where layers differ (Swin's stages), each has its own
    costs.

    Args:
        costs: ``costs[layer][granularity]``, smallest granularity first, in any unit: parameters,
            multiply-adds, measured milliseconds (costs.py).
        budget: Cost allowed for all layers and the rest together, in the same unit. A budget above
            the largest submodel's cost gives the largest submodel.
        rest: Cost of everything outside the layers.

    Returns:
        The granularity index of each layer, first layer first, never decreasing.

    Raises:
        ValueError: If there is no layer, the layers do not have equally many granularities, or the
            smallest submodel exceeds the budget.
    """
    check_budget(costs, budget, rest)
    layers, granularities = len(costs), len(costs[0])
    candidates = [
        [low] * (layers - raised) + [low + 1] * raised
        for low in range(granularities - 1)
        for raised in range(layers)
    ]
    candidates.append([granularities - 1] * layers)

    def cost(configuration: Sequence[int]) -> float:
        return rest + sum(layer[index] for layer, index in zip(costs, configuration, strict=True))

    # measured costs need not grow with size; among equal costs the larger configuration wins
    affordable = [(cost(c), place, c) for place, c in enumerate(candidates) if cost(c) <= budget]
    return max(affordable)[2]


def arrange(configuration: Sequence[int], order: Order) -> list[int]:
    """Put the granularities of a configuration in another order over depth.

    These are the baselines that appendix D.1 compares with the increasing order. Where all layers
    cost the same, every order has the same cost, so that the comparison is of order alone.

    Args:
        configuration: Granularity of each layer, in any order.
        order: How granularity changes with depth; "increase-decrease" and "decrease-increase" turn
            in the middle.

    Returns:
        The same granularities, each as often as before.

    Raises:
        ValueError: If the order is unknown.
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; choose one of {', '.join(ORDERS)}.")
    ranked = sorted(configuration, reverse=order.startswith("decrease"))
    if order in ("increase", "decrease"):
        return ranked
    # every other entry before the turn, the rest after it in reverse; this also fits odd counts
    return ranked[::2] + ranked[1::2][::-1]
