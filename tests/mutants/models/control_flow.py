"""Branches and loops."""

from __future__ import annotations

from typing import Any

import fluidx as fx

from .base import L, attr, fc, flag, model, real


@model
def cond_trained() -> None:
    """The loss comes out of a branch, and the branches have parameters."""
    x, y, big = real("x", 4), real("y", 2), flag("big")
    h = fc(x, 5, "tanh")
    loss = L.cond(
        big,
        lambda: L.mean(L.square(fc(h, 2, param_attr=attr("u"), bias_attr=False) - y)),
        lambda: L.scale(L.mean(L.abs(fc(h, 2, param_attr=attr("v"), bias_attr=False) - y)), 0.5),
    )
    fx.optimizer.SGD(0.2).minimize(loss)


@model
def cond_nested() -> None:
    x, y, p, q = real("x", 4), real("y", 3), flag("p"), flag("q")
    h = fc(x, 3, "tanh")

    def outer() -> Any:
        k = L.square(h)
        return L.cond(q, lambda: k * h, lambda: L.scale(k, 0.5)) + k

    h = L.cond(p, outer, lambda: L.cond(q, lambda: L.scale(h, 2.0), lambda: L.tanh(h)))
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.square(h - y)))


@model
def cond_dropout() -> None:
    x, y, p = real("x", 4), real("y", 3), flag("p")
    h = fc(x, 3, "tanh")
    h = L.cond(p, lambda: L.dropout(h, 0.4), lambda: L.scale(h, 0.6))
    fx.optimizer.SGD(0.1).minimize(L.mean(L.square(h - y)))


@model
def while_rounds() -> None:
    """A loop that refines a value behind the trained part, and a counter in the state that it moves."""
    x, y = real("x", 4), real("y", 3)
    h = fc(x, 3, "tanh")
    loss = L.mean(L.square(h - y))
    i, r = L.zeros([1], "int64"), L.scale(h, 1.0)
    r.stop_gradient = True
    n = L.fill_constant([1], "int64", 3)
    L.while_loop(lambda i, r: L.less_than(i, n), lambda i, r: [L.increment(i, in_place=False), L.scale(r, 0.5) + L.square(r)], [i, r])
    fx.optimizer.SGD(0.2).minimize(loss)


@model
def state_in_branches() -> None:
    """A branch inside a loop writes persistable state."""
    x, y, p = real("x", 4), real("y", 2), flag("p")
    total = L.create_global_var([1], 0.5, "float64", persistable=True, name="total")
    i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", 2)
    more = L.less_than(i, n)
    with L.While(more).block():
        L.assign(total + L.cond(p, lambda: L.fill_constant([1], "float64", 2.0), lambda: L.scale(total, 0.25)), output=total)
        L.increment(i)
        L.less_than(i, n, cond=more)
    fx.optimizer.SGD(0.2).minimize(L.mean(L.square(L.elementwise_mul(fc(x, 2), total) - y)))


@model
def while_trained() -> None:
    """A loop with weights, bounded, and its gradient, which adds up terms of theirs over the rounds."""
    x, y = real("x", 3), real("y", 3)
    i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", 2)
    _, h = L.while_loop(
        lambda i, h: L.less_than(i, n),
        lambda i, h: [L.increment(i, in_place=False), L.tanh(fc(h, 3, param_attr=attr("w"), bias_attr=attr("b"))) + x],
        [i, L.scale(x, 1.0)], max_rounds=3,
    )  # fmt: skip
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.square(h - y)))


@model
def while_adds() -> None:
    """The loss is added up in a loop inside of a loop: sums over the batch."""
    x, y = real("x", 3), real("y", 2)
    h, total = fc(x, 2, "tanh"), L.fill_constant([1], "float64", 0.25)
    n = L.fill_constant([1], "int64", 2)

    def inner(i: Any, total: Any) -> Any:
        j = L.zeros([1], "int64")
        return L.while_loop(
            lambda j, t: L.less_than(j, n),
            lambda j, t: [L.increment(j, in_place=False), t + L.reduce_sum(L.square(h - y))], [j, total],
        )[1]  # fmt: skip

    _, total = L.while_loop(
        lambda i, t: L.less_than(i, n),
        lambda i, t: [L.increment(i, in_place=False), inner(i, t)], [L.zeros([1], "int64"), total],
    )  # fmt: skip
    fx.optimizer.SGD(0.01).minimize(total)
