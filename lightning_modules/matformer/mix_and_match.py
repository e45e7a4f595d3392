"""Mix'n'Match: which granularity each layer gets, under a budget and without search.

MatFormer, arXiv 2310.07707, section 3.3 and appendix D.1. A model trained with g nested sizes
holds g^layers submodels. Section 3.3 picks one without measuring any: granularities do not fall
with depth, and change as little as they can.
"""

from collections.abc import Sequence
from typing import Literal, get_args

Costs = Sequence[Sequence[float]]  # of each layer at each granularity, smallest first
Order = Literal["increase", "decrease", "increase-decrease", "decrease-increase"]


def check_budget(costs: Costs, budget: float) -> None:
    """Refuse a budget that no submodel fits.

    Args:
        costs: ``costs[layer][granularity]``, smallest granularity first.
        budget: Cost allowed for all layers together, in the same unit.

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
    smallest = sum(layer[0] for layer in costs)
    if budget < smallest:
        raise ValueError(
            f"budget is {budget}, but the smallest submodel costs {smallest}; raise the budget to "
            "at least that."
        )


def mix_and_match(costs: Costs, budget: float) -> list[int]:
    """Choose the granularity of each layer for a budget.

    Of all configurations of least slope, which take one step between neighbouring granularities,

        i, …, i, i+1, …, i+1        (the last k layers one larger)

    the one that costs most within the budget. Section 3.3 and appendix D.1; Table 5's rows of 16
    layers follow. Where layers differ (Swin's stages), each counts with its own cost.

    Args:
        costs: ``costs[layer][granularity]``, smallest granularity first, in any unit: parameters,
            multiply-adds, measured milliseconds (costs.py).
        budget: Cost allowed for all layers together, in the same unit. More than the largest
            submodel costs gives the largest.

    Returns:
        The granularity index of each layer, first layer first, never decreasing.

    Raises:
        ValueError: If there is no layer, the layers do not have equally many granularities, or the
            smallest submodel exceeds the budget.
    """
    check_budget(costs, budget)
    layers, granularities = len(costs), len(costs[0])
    ladder = [
        [low] * (layers - raised) + [low + 1] * raised
        for low in range(granularities - 1)
        for raised in range(layers)
    ]
    ladder.append([granularities - 1] * layers)

    def cost(configuration: Sequence[int]) -> float:
        return sum(layer[index] for layer, index in zip(costs, configuration, strict=True))

    # measured costs need not rise with size; of equally dear ones the larger is taken
    affordable = [(cost(c), place, c) for place, c in enumerate(ladder) if cost(c) <= budget]
    return max(affordable)[2]


def arrange(configuration: Sequence[int], order: Order) -> list[int]:
    """Put the granularities of a configuration in another order over depth.

    The baselines that appendix D.1 compares with the increasing order: where layers cost the same,
    each order costs the same, so that only the order is compared.

    Args:
        configuration: Granularity of each layer, in any order.
        order: How granularity moves with depth. The two orders with a turn put it in the middle.

    Returns:
        The same granularities, each as often as before.

    Raises:
        ValueError: If the order is unknown.
    """
    if order not in get_args(Order):
        raise ValueError(f"order is {order!r}; choose one of {', '.join(get_args(Order))}.")
    ranked = sorted(configuration, reverse=order.startswith("decrease"))
    if order in ("increase", "decrease"):
        return ranked
    # Every other one on the way to the turn, the rest on the way back: exact for odd counts too.
    return ranked[::2] + ranked[1::2][::-1]
