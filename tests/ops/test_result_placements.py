"""The placement of the result of an op, for sharded or partial operands, by the rows of its access pattern.

tests/ops/test_every_op.py runs the rows of every op; the cases here are those that are easy to get wrong.
"""

import pytest

import fluidx.ops  # noqa: F401  (fills the registry)
from fluidx.ir.opdef import opdef
from fluidx.ir.rows import fits, rows
from fluidx.ir.types import Partial, Shard, TensorType

ROWS, COLUMNS, TERM = Shard(0, "dp"), Shard(1, "dp"), Partial("sum", "dp")


def f32(*shape, at=None):
    return TensorType("float32", shape), at


def i64(*shape, at=None):
    return TensorType("int64", shape), at


def lies(name, operands, attrs):
    """The placements of the outputs over a group of two ranks; None if no row of the pattern fits the operands."""
    definition = opdef(name)
    full = definition.complete_attrs(attrs)
    flat = [x for o in operands for x in (o if isinstance(o, list) else [o])]
    ins = [x and x[0] for x in flat]
    slots = {s.name: [x[0] for x in (o if isinstance(o, list) else [o]) if x] for s, o in zip(definition.in_slots, operands)}
    outs = [t for o in definition.infer_outputs(slots, full) for t in (o if isinstance(o, list) else [o])]
    pattern = definition.pattern_of(ins, outs, full)
    found = (fits(row, pattern, [x and x[1] for x in flat], None, [*ins, *outs], "dp", 2) for row in rows(pattern))
    return next((f for f in found if f is not None), None)


STATISTICS = [f32(3)] * 4
RUNS = [f32(3), f32(4, 3, at=ROWS), f32(4, 3, at=ROWS)]


@pytest.mark.parametrize(
    "name, operands, attrs, want",
    [
        # products: rows, columns, and the axis that is summed
        ("mul", [f32(8, 4, at=ROWS), f32(4, 6)], {}, [ROWS]),
        ("mul", [f32(8, 4), f32(4, 6, at=COLUMNS)], {}, [COLUMNS]),
        ("mul", [f32(8, 4, at=COLUMNS), f32(4, 6, at=ROWS)], {}, [TERM]),
        ("mul_grad_y", [f32(8, 4, at=ROWS), f32(8, 6, at=ROWS), f32(4, 6)], {"x_num_col_dims": 1}, [TERM]),
        # the kernel of a mean divides by the count of the whole value, so the result of a rank is a partial sum
        ("mean", [f32(8, 4, at=ROWS)], {}, [TERM]),
        ("reduce_sum", [f32(8, 4, at=ROWS)], {"dim": (0,)}, [TERM]),
        ("reduce_sum", [f32(8, 4, at=ROWS)], {"dim": (1,)}, [ROWS]),
        ("squared_l2_norm", [f32(8, 4, at=ROWS)], {}, [TERM]),
        ("reduce_to", [f32(8, 4, at=ROWS), f32(4)], {}, [TERM]),
        ("reduce_to", [f32(8, 4, at=ROWS), f32(8, 1, at=ROWS)], {}, [ROWS]),
        ("accuracy", [f32(8, 1, at=ROWS), i64(8, 1, at=ROWS), i64(8, 1, at=ROWS)], {}, [TERM, TERM, TERM]),
        ("scale", [f32(4, at=TERM)], {"scale": 2.0}, [TERM]),
        ("batch_norm", [f32(8, 3, at=ROWS), *STATISTICS], {"is_test": True}, [ROWS, None, None, None, None]),
        # two ranks hold two of four runs each, for an even batch or an odd one
        ("ghost_batch_norm", [f32(8, 3, at=ROWS), *STATISTICS], {"sub_batches": 4}, [ROWS, ROWS, ROWS, TERM]),
        ("ghost_batch_norm", [f32(-1, 3, at=ROWS), *STATISTICS], {"sub_batches": 2}, [ROWS, ROWS, ROWS, TERM]),
        ("ghost_batch_norm", [f32(7, 3, at=ROWS), *STATISTICS], {"sub_batches": 3, "is_test": True}, [ROWS, None, None, None]),
        ("ghost_batch_norm_grad", [f32(7, 3, at=ROWS), *RUNS, f32(7, 3, at=ROWS)], {"sub_batches": 4}, [ROWS, TERM, TERM]),
        ("dropout", [f32(8, 8, at=COLUMNS)], {"dropout_prob": 0.5}, [COLUMNS, COLUMNS]),
        ("dropout", [f32(8, at=TERM)], {"dropout_prob": 0.5}, [TERM, None]),  # every rank draws the same mask
        # rows of ids become rows of the result; a table sharded by columns gives columns, one sharded by rows partial sums
        ("lookup_table", [f32(100, 16), i64(8, 5, 1, at=ROWS)], {}, [ROWS]),
        ("lookup_table", [f32(100, 16, at=COLUMNS), i64(8, 5, 1)], {}, [Shard(2, "dp")]),
        ("lookup_table", [f32(100, 16, at=ROWS), i64(8, 5, 1)], {}, [TERM]),
        ("gather", [f32(100, 4), i64(8, at=ROWS)], {}, [ROWS]),
        ("gather", [f32(100, 4, at=COLUMNS), i64(8)], {}, [COLUMNS]),
        ("index_select", [f32(8, 4, at=COLUMNS), i64(2)], {"dim": -1}, [TERM]),
        # a batch that is another axis of the operand is another axis of the result
        ("fill_constant_batch_size_like", [f32(8, 2, at=ROWS)], {"shape": (2, -1), "output_dim_idx": 1}, [COLUMNS]),
        ("uniform_random_batch_size_like", [f32(8, 2, at=ROWS)], {"shape": (4, -1), "output_dim_idx": 1}, [COLUMNS]),
        ("one_hot_v2", [i64(8, 2, at=COLUMNS)], {"depth": 3}, [COLUMNS]),
        ("arg_max", [f32(8, 4, at=ROWS)], {"axis": 1}, [ROWS]),
        # axes that move
        ("transpose", [f32(8, 3, 4, at=ROWS)], {"axis": (2, 0, 1)}, [COLUMNS]),
        ("squeeze", [f32(1, 3, 8, at=Shard(2, "dp"))], {"axes": (0,)}, [COLUMNS]),
        ("unsqueeze", [f32(8, 3, at=ROWS)], {"axes": (0,)}, [COLUMNS]),
        ("flatten", [f32(8, 3, 4, at=ROWS)], {"axis": 2}, [Shard(0, "dp", 3)]),
        ("flatten", [f32(8, 3, 4, at=COLUMNS)], {"axis": 1}, [Shard(1, "dp", 4)]),
        ("stack", [[f32(8, 3, at=ROWS), f32(8, 3, at=ROWS)]], {"axis": 0}, [COLUMNS]),
        ("unstack", [f32(3, 8, at=COLUMNS)], {"axis": 0}, [ROWS] * 3),
        ("split", [f32(8, 6, at=ROWS)], {"num": 2, "axis": 1}, [ROWS] * 2),
        ("concat", [[f32(8, 3, at=ROWS), f32(8, 1, at=ROWS)]], {"axis": -1}, [ROWS]),
        ("expand", [f32(8, 3, at=ROWS)], {"expand_times": (1, 2)}, [ROWS]),
        ("expand_as", [f32(1, 3), f32(8, 3, at=ROWS)], {}, [ROWS]),
        ("slice", [f32(8, 4, at=ROWS)], {"axes": (1,), "starts": (0,), "ends": (2,)}, [ROWS]),
        ("slice", [f32(8, 4, at=COLUMNS)], {"axes": (0,), "starts": (0,), "ends": (1,), "decrease_axis": (0,)}, [ROWS]),
        ("slice", [f32(8, 4, at=ROWS)], {"axes": (0,), "starts": (0,), "ends": (2**31 - 1,)}, [ROWS]),  # all of it
        ("pad", [f32(8, 4, at=ROWS)], {"paddings": (0, 0, 1, 1), "pad_value": 3.0}, [ROWS]),
        ("pad2d", [f32(8, 1, 4, 4, at=ROWS)], {"paddings": (1, 1, 1, 1)}, [ROWS]),
        ("reshape", [f32(8, 3, 4, at=ROWS)], {"shape": (0, -1)}, [ROWS]),
        ("reshape", [f32(8, 6, 4, at=COLUMNS)], {"shape": (0, -1, 3, 4)}, [COLUMNS]),
        ("reshape", [f32(-1, 4, at=ROWS)], {"shape": (-1, 2, 2)}, [ROWS]),
        # partial sums stay partial sums in ops that only move elements
        ("reshape", [f32(4, 6, at=TERM)], {"shape": (24,)}, [TERM]),
        ("transpose", [f32(4, 6, at=TERM)], {"axis": (1, 0)}, [TERM]),
        ("expand", [f32(4, 6, at=TERM)], {"expand_times": (2, 1)}, [TERM]),
    ],
)
def test_the_placement_of_a_result(name, operands, attrs, want):
    assert lies(name, operands, attrs) == tuple(want)


@pytest.mark.parametrize(
    "name, operands, attrs",
    [
        ("mul", [f32(8, 4, at=ROWS), f32(4, 6, at=ROWS)], {}),
        ("softmax", [f32(8, 4, at=ROWS)], {"axis": 0}),
        ("batch_norm", [f32(8, 3, at=ROWS), *STATISTICS], {}),  # expanded into sums first
        ("ghost_batch_norm", [f32(9, 3, at=ROWS), *STATISTICS], {"sub_batches": 3}),  # two ranks would share the second run
        ("ghost_batch_norm", [f32(8, 3, at=Shard(0, "dp", 3)), *STATISTICS], {"sub_batches": 4}),  # three rows here, five there
        ("ghost_batch_norm", [f32(-1, 3, at=Shard(0, "dp", 2)), *STATISTICS], {"sub_batches": 4}),
        ("ghost_batch_norm_grad", [f32(7, 3, at=ROWS), *RUNS, f32(7, 3)], {"sub_batches": 4}),
        ("squared_l2_norm", [f32(4, at=TERM)], {}),  # the square of a sum is not the sum of squares
        ("logsumexp", [f32(8, 4, at=ROWS)], {"dim": (0,)}),
        ("reduce_prod", [f32(8, 4, at=ROWS)], {}),
        ("scale", [f32(4, at=TERM)], {"bias": 1.0}),
        ("cast", [f32(4, at=TERM)], {"dtype": "int32"}),  # rounding does not commute with addition
        ("relu", [f32(4, at=TERM)], {}),
        ("elementwise_add", [f32(4, at=TERM), f32(4)], {}),
        ("elementwise_mul", [f32(4, at=TERM), f32(4, at=TERM)], {}),
        ("sgd", [f32(4, 3), f32(4, 3, at=TERM), f32(1)], {}),
        ("sgd", [f32(4, 3), f32(4, 3, at=ROWS), f32(1)], {}),
        ("diag", [f32(8, at=ROWS)], {}),
        ("top_k", [f32(8, 4, at=COLUMNS)], {"k": 2}),
        ("argsort", [f32(8, 4, at=COLUMNS)], {"axis": 1}),
        ("cumsum", [f32(8, 4, at=COLUMNS)], {"axis": 1}),
        ("gather", [f32(8, 4, at=ROWS), i64(8, at=ROWS)], {}),
        ("slice", [f32(8, 4, at=ROWS)], {"axes": (0,), "starts": (0,), "ends": (2,)}),
        ("strided_slice", [f32(8, at=ROWS)], {"axes": (0,), "starts": (0,), "ends": (8,), "strides": (2,)}),
        ("pad", [f32(8, at=ROWS)], {"paddings": (0, 1)}),
        ("pad2d", [f32(8, 1, 4, 4, at=Shard(2, "dp"))], {"paddings": (1, 1, 1, 1)}),
        ("flatten", [f32(8, 3, 4, at=COLUMNS)], {"axis": 2}),
        ("concat", [[f32(8, 3, at=ROWS), f32(8, 3, at=ROWS)]], {"axis": 0}),
        ("concat", [[f32(8, 3, at=ROWS), f32(8, 1)]], {"axis": 1}),
        ("stack", [[f32(8, at=ROWS), f32(8)]], {}),
        ("split", [f32(8, 6, at=COLUMNS)], {"num": 2, "axis": -1}),
        ("unstack", [f32(8, 6, at=ROWS)], {"axis": 0}),
        ("expand", [f32(8, 3, at=ROWS)], {"expand_times": (2, 1)}),
        ("reverse", [f32(8, at=ROWS)], {"axis": (-1,)}),
        ("flip", [f32(8, at=ROWS)], {"dims": (0,)}),
        ("roll", [f32(8, 2, at=COLUMNS)], {"shifts": (1,)}),
    ],
)
def test_placements_that_would_give_a_wrong_value_match_no_row(name, operands, attrs):
    replicated = [[(t, None) for t, _ in o] if isinstance(o, list) else (o[0], None) for o in operands]
    assert lies(name, replicated, attrs) is not None  # so it is the placement that no row fits
    assert lies(name, operands, attrs) is None
