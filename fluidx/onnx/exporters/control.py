"""Export of `cond` and `while`. A sub-block is a graph that reads outer values by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir import flow
from . import exports

if TYPE_CHECKING:
    from ..export_graph import Op


@exports("cond")
def cond(op: Op) -> Any:
    graphs = {
        f"{then}_branch": op.graph.sub_graph(op.attrs[f"{which}_block"].idx, [], op.attrs[f"{which}_out"])
        for then, which in (("then", "true"), ("else", "false"))
    }
    return {"Out": op.emit_many("If", len(op.op.output("Out")), op["Cond"], **graphs)}


@exports("while")
def while_(op: Op) -> Any:
    """All variables that the loop writes are carried, also its condition: later operators may read it."""
    from onnx import TensorProto, helper

    if op.op.input("Left") and flow.draws(op.graph.program, op.op):
        raise op.wrong("its gradient repeats random draws, and a Loop would draw other numbers")
    carried, (condition,) = op.op.output("Out"), op.op.input("Condition")
    counters = [
        helper.make_tensor_value_info(op.graph.fresh(f"{carried[0]}.round"), TensorProto.INT64, []),
        helper.make_tensor_value_info(op.graph.fresh(f"{carried[0]}.more"), TensorProto.BOOL, None),  # of any rank with one element
    ]
    most = op.attrs["max_rounds"]
    limit = op.const(np.array(most, np.int64)) if most else ""
    body = op.graph.sub_graph(op.attrs["sub_block"].idx, carried, [condition, *carried], counters)
    start = [op.graph.current[n] for n in (condition, *carried)]
    return {"Out": op.emit_many("Loop", len(carried), limit, *start, body=body)}
