"""Operators that are decomposed where an axis is sharded: the parts give the same values, and can be sharded along every axis."""

import numpy as np
import pytest

from fluidx.ir import OPS, Block, Program, TensorType, Var, opdef
from fluidx.ir.operator import Operator
from fluidx.testing.reference import interpret
from fluidx.transpiler.placement.decompose import written_out

CASES = [(name, k) for name in sorted(OPS) if OPS[name].decompose is not None for k, _ in enumerate(OPS[name].samples())]


def alone(name: str, k: int) -> tuple[Program, Block, Operator, dict[str, np.ndarray]]:
    """A program with sample `k` of an op as its only operator, and its feeds."""
    definition, sample = opdef(name), list(opdef(name).samples())[k]
    program = Program(name)
    block = program.global_block()
    feed = {f"in{i}": a for i, a in enumerate(sample.args) if a is not None}
    for n, a in feed.items():
        block.declare(Var(n, TensorType(a.dtype.name, a.shape), is_data=True))
    inputs = {slot.name: (f"in{i}",) for i, slot in enumerate(definition.in_slots) if f"in{i}" in feed}
    attrs = definition.complete_attrs(sample.attrs)
    types = definition.infer_outputs({s: [block.desc(n).type for n in names] for s, names in inputs.items()}, attrs)
    outputs = {slot.name: (f"out{i}",) for i, slot in enumerate(definition.out_slots)}
    for (n,), t in zip(outputs.values(), types, strict=True):
        block.declare(Var(n, t))
    op = Operator(name, inputs, outputs, attrs)
    block.oplist.append(op)
    return program, block, op, feed


@pytest.mark.parametrize("name, k", CASES)
def test_the_parts_give_the_same_values(name, k):
    program, block, op, feed = alone(name, k)
    want = interpret(program, feed)
    parts = written_out(block, op)
    if parts is None:
        return
    block.oplist[:] = parts
    got = interpret(program, feed)
    half = any(a.dtype == np.float16 for a in feed.values())
    for n in op.output_arg_names:
        # other orders of the same float additions; in 16 bits each step is rounded
        np.testing.assert_allclose(got[n], want[n], rtol=4e-3 if half else 2e-5, atol=1e-3 if half else 2e-6, err_msg=n)


@pytest.mark.parametrize("name, k", [(name, k) for name, k in CASES if OPS[name].gives_way_to_parts()])
def test_no_part_needs_a_whole_axis(name, k):
    _, block, op, _ = alone(name, k)
    for part in written_out(block, op) or ():
        d = opdef(part.type)
        ins, outs = d.flat_slots(part.inputs, d.in_slots), d.flat_slots(part.outputs, d.out_slots)
        types = [[None if n is None else block.desc(n).type for n in names] for names in (ins, outs)]
        assert not {f for f in d.pattern_of(*types, part.attrs).whole if f[0] != "."}, part
