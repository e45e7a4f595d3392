"""Mix'n'Match: which granularity each layer gets, under a budget and without search.

MatFormer, arXiv 2310.07707, section 3.3 and appendix D.1. A model trained with g nested sizes
holds g^layers submodels. Section 3.3 picks one without measuring any: granularities do not fall
with depth, and change as little as they can.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

Order = Literal["increase", "decrease", "increase-decrease", "decrease-increase"]


def check_budget(layers: int, widths: Sequence[int], budget: int) -> None:
    """Refuse a budget that no submodel fits.

    Args:
        layers: Number of layers.
        widths: Cost of one layer at each granularity, smallest first.
        budget: Cost allowed for all layers together, in the unit of ``widths``.

    Raises:
        ValueError: If there is no layer, ``widths`` does not strictly increase, or the smallest
            submodel exceeds the budget.
    """
    if layers < 1:
        raise ValueError(f"layers is {layers}; a model to choose from has at least 1.")
    if not widths or any(narrow >= wide for narrow, wide in pairwise(widths)):
        raise ValueError(
            f"widths is {list(widths)}; give the cost of one layer at each granularity, "
            "strictly increasing."
        )
    if budget < layers * widths[0]:
        raise ValueError(
            f"budget is {budget}, but the smallest submodel costs {layers * widths[0]} "
            f"({layers} layers of {widths[0]}); raise the budget to at least that."
        )


def mix_and_match(layers: int, widths: Sequence[int], budget: int) -> list[int]:
    """Choose the granularity of each layer for a budget.

    With n layers of cost w_0 < … < w_{g-1}: take the largest i whose uniform submodel fits,
    n·w_i ≤ budget, then raise the last

        k = ⌊(budget - n·w_i) / (w_{i+1} - w_i)⌋

    layers to i+1. This is the least slope: one step between neighbouring granularities. No other
    such configuration that fits costs more. Section 3.3 and appendix D.1; Table 5's rows of 16
    layers follow.

    Args:
        layers: Number of layers, n.
        widths: Cost of one layer at each granularity, smallest first, in any unit: hidden
            neurons, parameters, multiply-accumulates.
        budget: Cost allowed for all layers together, in the same unit. More than the largest
            submodel costs gives the largest.

    Returns:
        The index into ``widths`` for each layer, first layer first, never decreasing.

    Raises:
        ValueError: If there is no layer, ``widths`` does not strictly increase, or the smallest
            submodel exceeds the budget.
    """
    check_budget(layers, widths, budget)
    base = max(i for i, width in enumerate(widths) if layers * width <= budget)
    if base == len(widths) - 1:
        return [base] * layers
    raised = (budget - layers * widths[base]) // (widths[base + 1] - widths[base])
    return [base] * (layers - raised) + [base + 1] * raised


def arrange(configuration: Sequence[int], order: Order) -> list[int]:
    """Put the granularities of a configuration in another order over depth.

    The rivals that appendix D.1 compares with the increasing order: where layers cost the same,
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
