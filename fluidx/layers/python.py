"""The layer `py_func`: a Python function as an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._checks import wrong
from ..ir import Variable
from ..ops.host import FUNCTIONS
from .helper import LayerWriter


def py_func(
    func: Callable[..., Any],
    x: Any,
    out: Any,
    backward_func: Callable[..., Any] | None = None,
    skip_vars_in_backward_input: Any = None,
) -> Any:
    """`out`, variables that receive the results of `func` on the arrays of `x`. Both are a Variable or a list.

    Declare `out` with `default_main_program().current_block().create_var(name=..., dtype=..., shape=...)`; an open axis has the size of the
    first x along the same axis. With `out=None` the function is called for its side effects, such as printing. `backward_func` gets the
    arrays of x, of out, and of the gradients of out, without those in `skip_vars_in_backward_input`, and returns the gradients of x;
    without it x gets no gradients.

    Each rank calls the functions with whole arrays, so their results must be the same on all ranks.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     x = fx.data("x", [None, 2], "float32")
    ...     y = main.current_block().create_var(name="y", dtype="float32", shape=[-1, 2])
    ...     y = fx.layers.py_func(func=lambda a: np.tanh(a) + 1.0, x=x, out=y)
    >>> fx.Executor().run(main, feed={"x": np.zeros((1, 2), "float32")}, fetch_list=[y])[0].tolist()
    [[1.0, 1.0]]
    """
    helper = LayerWriter("py_func")
    if not callable(func) or not (backward_func is None or callable(backward_func)):
        raise wrong(f"{helper.label}: func and backward_func must be functions, got {func!r:.60} and {backward_func!r:.60}")
    xs, outs = _variables(helper, "x", x), _variables(helper, "out", out)
    skipped = {v.name for v in _variables(helper, "skip_vars_in_backward_input", skip_vars_in_backward_input)}
    if unknown := skipped - {v.name for v in (*xs, *outs)}:
        raise wrong(f"{helper.label}: skip_vars_in_backward_input names {sorted(unknown)[0]!r}, which is neither in x nor in out")
    if not outs:  # an operator needs a result: this one is not read
        outs, func = [helper.block.create_var(helper.fresh(), (1,), "int32", stop_gradient=True)], _without_result(func)
    types = [v.desc.type for v in outs]
    helper.op(
        "py_func", xs, out={"Out": outs}, function=_number(func), backward=-1 if backward_func is None else _number(backward_func),
        ranks=tuple(t.ndim for t in types), shapes=tuple(-1 if d < 0 else int(d) for t in types for d in t.shape),
        dtypes=tuple(t.dtype for t in types), skip=tuple(k for k, v in enumerate(xs) if v.name in skipped),
        skip_outs=tuple(k for k, v in enumerate(outs) if v.name in skipped),
    )  # fmt: skip
    for v in outs:
        v.stop_gradient = backward_func is None or all(x.stop_gradient for x in xs)
    return out


def _variables(helper: LayerWriter, what: str, value: Any) -> list[Variable]:
    items: Sequence[Any] = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    return [helper.variable(v, what) for v in items]


def _without_result(func: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arrays: np.ndarray) -> np.ndarray:
        func(*arrays)
        return np.zeros(1, "int32")

    return called


def _number(func: Callable[..., Any]) -> int:
    FUNCTIONS.append(func)
    return len(FUNCTIONS) - 1


__all__ = ["py_func"]
