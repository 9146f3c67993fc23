"""Layers that create tensors: constants, masks, ranges and random values."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from .._checks import number, whole, wholes
from ..initializer import derive_seed
from ..ir import Variable, as_dtype
from .helper import LayerWriter, Sizes
from .layer_from_signature import at_least, axis_of, row
from .tensor import assign, cast, expand, unsqueeze


def fill_constant(
    shape: Sizes, dtype: Any, value: Any, force_cpu: bool = False, out: Variable | None = None, name: str | None = None
) -> Variable:
    """A tensor filled with `value`; `out`, when given, receives it. `force_cpu` has no effect.

    Sizes are integers, or computed: a vector, or a list that contains Variables.

    Raises ProgramError if `value` is not a number.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.fill_constant([2, 3], "float32", 0.5)
    <Variable fill_constant_0.tmp_0: f32[2,3]>
    """
    helper = LayerWriter("fill_constant", name)
    if isinstance(value, (bool, str)):  # fluid writes some numbers as text
        with suppress(ValueError):
            value = float(value)
    value = number(helper.label, "value", value)
    if (computed := helper.sizes(shape, "shape")) is not None:
        y = helper.op("fill_by", computed, out={} if out is None else {"Out": out}, dtype=as_dtype(dtype), value=value)
        y.stop_gradient = True
        return y
    dims = wholes(helper.label, "shape", shape, least=0)
    y = helper.op("fill_constant", out={} if out is None else {"Out": out}, shape=dims, dtype=as_dtype(dtype), value=value)
    y.stop_gradient = True
    return y


def _random_like(
    helper: LayerWriter, input: Variable, shape: Sequence[int], dtype: Any, input_dim_idx: int, output_dim_idx: int, seed: int,
    **attrs: float,
) -> Variable:  # fmt: skip
    x, result = helper.variable(input, "input"), helper.fresh()
    numbers: dict[str, Any] = {k: number(helper.label, k, v) for k, v in attrs.items()}
    seed = whole(helper.label, "seed", seed or 0, 0) or derive_seed(helper.main, result)
    return helper.op(
        helper.kind, x, out={"Out": result}, shape=wholes(helper.label, "shape", shape), dtype=as_dtype(dtype), seed=seed, per_run=True,
        input_dim_idx=helper.axis(x, input_dim_idx, "input_dim_idx"),
        output_dim_idx=whole(helper.label, "output_dim_idx", output_dim_idx, 0), **numbers,
    )  # fmt: skip


def sequence_mask(x: Variable, maxlen: Any = None, dtype: Any = "int64", name: str | None = None) -> Variable:
    """1 for steps below the lengths in x, 0 for later ones: x [...] gives the mask [..., maxlen], of `dtype`.

    `maxlen` is a number, a Variable with one number, or None for the longest length in x. Ranks need a number, because they need known
    sizes.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     mask = fx.layers.sequence_mask(fx.data("lengths", [None], "int64"), maxlen=3)
    >>> fx.Executor().run(main, feed={"lengths": np.array([1, 3, 0])}, fetch_list=[mask])[0].tolist()
    [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    """
    helper = LayerWriter("sequence_mask", name)
    x = helper.variable(x, "x")
    if maxlen is None:
        maxlen = helper.op("reduce_max", x, dim=(), keep_dim=False)
    steps = range(0, maxlen if isinstance(maxlen, Variable) else whole(helper.label, "maxlen", maxlen, 1), 1, x.dtype)
    return cast(helper.op("less_than", steps, helper.op("unsqueeze", x, axes=(x.ndim,))), dtype)


def ones(shape: Sequence[int], dtype: Any, force_cpu: bool = False) -> Variable:
    """A tensor of ones."""
    return fill_constant(shape, dtype, 1.0)


def zeros(shape: Sequence[int], dtype: Any, force_cpu: bool = False) -> Variable:
    """A tensor of zeros."""
    return fill_constant(shape, dtype, 0.0)


def _random(helper: LayerWriter, shape: Sequence[int], dtype: Any, seed: int, **attrs: float) -> Variable:
    dims = wholes(helper.label, "shape", shape, least=0)
    numbers: dict[str, Any] = {k: number(helper.label, k, v) for k, v in attrs.items()}
    result = helper.fresh()
    seed = whole(helper.label, "seed", seed or 0, 0) or derive_seed(helper.main, result)
    return helper.op(helper.kind, out={"Out": result}, shape=dims, dtype=as_dtype(dtype), seed=seed, per_run=True, **numbers)


def range(start: Any, end: Any, step: Any, dtype: Any) -> Variable:
    """start, start + step, ... up to but not including end. The three are numbers, or Variables with one number.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     x = fx.data("x", [-1], "float32")
    ...     chosen = fx.layers.range(0, fx.layers.size(fx.layers.masked_select(x, x > 0.0)), 1, "int64")
    >>> fx.Executor().run(main, feed={"x": np.float32([3, -1, 2])}, fetch_list=[chosen])[0].tolist()
    [0, 1]
    """
    helper = LayerWriter("range")
    if any(isinstance(v, Variable) for v in (start, end, step)):
        given = [v if isinstance(v, Variable) else fill_constant([1], dtype, v) for v in (start, end, step)]
        return helper.op("range_between", *(cast(helper.variable(v, "a bound"), dtype) for v in given))
    numbers: dict[str, Any] = {n: number(helper.label, n, v) for n, v in (("start", start), ("end", end), ("step", step))}
    return helper.op("range", dtype=as_dtype(dtype), **numbers)


def eye(num_rows: int, num_columns: int | None = None, batch_shape: Sequence[int] | None = None, dtype: Any = "float32") -> Variable:
    """The identity matrix, repeated over `batch_shape` when that is given."""
    helper = LayerWriter("eye")
    rows = whole(helper.label, "num_rows", num_rows, 0)
    columns = rows if num_columns is None else whole(helper.label, "num_columns", num_columns, 0)
    y = helper.op("eye", num_rows=rows, num_columns=columns, dtype=as_dtype(dtype))
    if batch_shape:
        batch = wholes(helper.label, "batch_shape", batch_shape, least=1)
        y = expand(unsqueeze(y, list(builtins.range(len(batch)))), [*batch, 1, 1])
    return y


def diag(diagonal: Variable | np.ndarray) -> Variable:
    """The square matrix with the given vector on its diagonal."""
    helper = LayerWriter("diag")
    vector = assign(diagonal) if isinstance(diagonal, np.ndarray) else helper.variable(diagonal, "diagonal")
    helper.rank(vector, "diagonal", 1)
    return helper.op("diag", vector)


# fmt: off
zeros_like = row("zeros_like(x, out=None)", "Zeros of x's shape and dtype.", "fill_zeros_like")
ones_like = row("ones_like(x, out=None)", "Ones of x's shape and dtype.", "fill_any_like", always={"value": 1.0})
linspace = row(
    "linspace(start: Any, stop: Any, num: int, dtype='float32')",
    "`num` values evenly spaced from start to stop, both included.", num=at_least(1),
)
fill_constant_batch_size_like = row(
    "fill_constant_batch_size_like(input, shape: Sequence[int], dtype, value: float, input_dim_idx=0, output_dim_idx=0, force_cpu=False)",
    "`shape` filled with `value`, its axis `output_dim_idx` as long as input's axis `input_dim_idx`.",
    unused=["force_cpu"], input_dim_idx=axis_of, output_dim_idx=at_least(0),
)
gaussian_random = row(
    "gaussian_random(shape: Sequence[int], mean=0.0, std=1.0, seed=0, dtype='float32', name=None)",
    "Normally distributed values, drawn again in each run; `seed` as in uniform_random.", write=_random,
)
gaussian_random_batch_size_like = row(
    "gaussian_random_batch_size_like("
    "input, shape: Sequence[int], input_dim_idx=0, output_dim_idx=0, mean=0.0, std=1.0, seed=0, dtype='float32')",
    "`gaussian_random` of `shape`, its axis `output_dim_idx` as long as input's axis `input_dim_idx`.", write=_random_like,
)

uniform_random = row("uniform_random(shape: Sequence[int], dtype='float32', min=-1.0, max=1.0, seed=0, name=None)", """
    Values uniform over [min, max), drawn again in each run.

    For seed 0, the seed is derived from the program's random_seed and the variable's name.
    """, write=_random)

uniform_random_batch_size_like = row(
    "uniform_random_batch_size_like("
    "input, shape: Sequence[int], dtype='float32', input_dim_idx=0, output_dim_idx=0, min=-1.0, max=1.0, seed=0)", """
    `uniform_random` of `shape`, its axis `output_dim_idx` as long as input's axis `input_dim_idx`.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     fx.layers.uniform_random_batch_size_like(fx.data("x", [None, 3], "float32"), [-1, 7]).shape
    (-1, 7)
    """, write=_random_like)
# fmt: on

__all__ = [
    "diag", "eye", "fill_constant", "fill_constant_batch_size_like", "gaussian_random", "gaussian_random_batch_size_like", "linspace",
    "ones", "ones_like", "range", "sequence_mask", "uniform_random", "uniform_random_batch_size_like", "zeros", "zeros_like",
]  # fmt: skip
