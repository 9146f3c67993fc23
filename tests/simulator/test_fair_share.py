"""Max-min fair rates, worked by hand: all flows grow alike until a link of theirs is full or they reach their own limit."""

from math import inf

import pytest

from fluidx.simulator.fair_share import Flow, fair_rates


@pytest.mark.parametrize(
    "flows, capacity, rates",
    [
        ({"a": Flow({"x": 1}), "b": Flow({"x": 1})}, {"x": 10.0}, {"a": 5.0, "b": 5.0}),
        # what a flow with a limit leaves belongs to the others
        ({"a": Flow({"x": 1}, most=2.0), "b": Flow({"x": 1}), "c": Flow({"x": 1})}, {"x": 10.0}, {"a": 2.0, "b": 4.0, "c": 4.0}),
        # b is stopped at 1 by y, which lets a and c go on to (10 - 1) / 2 on x
        (
            {"a": Flow({"x": 1}), "b": Flow({"x": 1, "y": 1}), "c": Flow({"x": 1})},
            {"x": 10.0, "y": 1.0},
            {"a": 4.5, "b": 1.0, "c": 4.5},
        ),
        # twice over the same link: 2 a + b = 9
        ({"a": Flow({"x": 2}), "b": Flow({"x": 1})}, {"x": 9.0}, {"a": 3.0, "b": 3.0}),
        # flows that share nothing do not slow one another
        ({"a": Flow({"x": 1}), "b": Flow({"y": 1}), "c": Flow({})}, {"x": 3.0, "y": 5.0}, {"a": 3.0, "b": 5.0, "c": inf}),
        ({}, {"x": 1.0}, {}),
    ],
)
def test_rates_worked_by_hand(flows, capacity, rates):
    assert fair_rates(flows, capacity) == rates
