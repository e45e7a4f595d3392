"""What a finished node's records give."""

import math

import pytest

from recipes.records import best


@pytest.mark.parametrize(("mode", "expected"), [("max", 0.9), ("min", 0.5)])
def test_a_value_that_is_no_number_is_never_the_best(mode, expected):
    assert best([math.nan, 0.5, 0.9], mode) == expected
    assert best([0.5, math.nan, 0.9], mode) == expected
    assert math.isinf(best([math.nan], mode)) and (best([math.nan], mode) < 0) == (mode == "max")
