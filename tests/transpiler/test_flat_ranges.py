"""Values one behind the other, of which every rank has a flat range of all together: pack and unpack work on what each rank has."""

from itertools import pairwise

import numpy as np
import pytest

from fluidx.ir import ANY, Pieces, Program, ProgramError, TensorType, VerifyError
from fluidx.ir.program_rewriter import Writer
from fluidx.ir.rows import laid_out
from fluidx.testing import run_ranks
from fluidx.transpiler.specialize import Specializer
from fluidx.verify import check_program

SHAPES = [(2, 3), (5,), (1, 4)]
SIZES = [6, 5, 4]
STARTS = [0, 6, 11, 15]
# where all 15 elements are cut among 3 ranks: one rank in each value, a rank with nothing, all on one rank
CUTS = [(0, 5, 10, 15), (0, 6, 11, 15), (0, 0, 3, 15), (0, 7, 7, 15), (0, 0, 15, 15)]


def clipped(cut, k):
    """The same cut, within value k."""
    return tuple(min(max(b, STARTS[k]), STARTS[k + 1]) - STARTS[k] for b in cut)


def placed(bounds):
    return f"pieces({', '.join(map(str, bounds))}) over dp"


def program(cut, *lines):
    data = "\n".join(f"  data %x{k}: f32{list(s)} {placed(clipped(cut, k))}" for k, s in enumerate(SHAPES))
    body = "\n".join(f"  {line}" for line in lines)
    return Program.parse_from_string(f"program p {{\n  group dp = [0, 1, 2]\n{data}\nforward:\n{body}\n}}")


def there_and_back(cut):
    whole = f"%all: f32[15] {placed(cut)} = pack([%x0, %x1, %x2])"
    outs = ", ".join(f"%y{k}: f32[{n}] {placed(clipped(cut, k))}" for k, n in enumerate(SIZES))
    return program(cut, whole, f"[{outs}] = unpack([%all]) {{shapes=[[6], [5], [4]]}}")


VALUES = {f"x{k}": np.arange(a, b, dtype="float32").reshape(s) for k, (s, (a, b)) in enumerate(zip(SHAPES, pairwise(STARTS), strict=True))}


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_ranks_pack_and_unpack_the_ranges_that_they_have(cut):
    p = there_and_back(cut)
    check_program(p)
    specialize = Specializer(p)
    results = run_ranks([specialize.rank_program(r) for r in range(3)], VALUES, ["all", "y0", "y1", "y2"])
    for (a, b), (whole, *parts) in zip(pairwise(cut), results, strict=True):
        np.testing.assert_array_equal(whole, np.arange(a, b))
        for k, part in enumerate(parts):
            np.testing.assert_array_equal(part, np.arange(max(a, STARTS[k]), min(b, STARTS[k + 1])))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_is_built_lies_where_its_operands_say(cut):
    writer = Writer(program(cut))
    whole = writer.builder().pack(["x0", "x1", "x2"])
    parts = writer.builder().unpack([whole], shapes=SHAPES, n_out=3)
    assert [v.placement for v in (whole, *parts)] == [(Pieces(b, "dp"),) for b in (cut, *(clipped(cut, k) for k in range(3)))]


def test_ranges_that_are_none_of_all_together_are_refused():
    # rank 0 has the first elements of each value: they are no neighbours
    each = [Pieces((0, 2, 4, n), "dp") for n in SIZES]
    types = [*[TensorType("float32", s) for s in SHAPES], TensorType("float32", (15,))]
    assert laid_out(each, types, "dp") is None
    writer = Writer(program((0, 5, 10, 15)))
    with pytest.raises(ProgramError, match="op pack: no rule allows its inputs' placements over dp: .* redistribute one of them"):
        writer.builder().pack(["x1", "x0", "x2"])  # in another order the ranges do not continue each other


def test_a_size_that_is_open_is_cut_nowhere():
    assert laid_out([Pieces((0, 1, 2), "dp")], [TensorType("float32", (ANY,)), TensorType("float32", (ANY,))], "dp") is None


@pytest.mark.parametrize(
    "lines",
    [
        [f"%all: f32[15] {placed((0, 5, 11, 15))} = pack([%x0, %x1, %x2])"],
        ["%all: f32[15] = pack([%x0, %x1, %x2])"],
        [f"%all: f32[15] {placed((0, 5, 10, 15))} = pack([%x1, %x0, %x2])"],
        [
            f"%all: f32[15] {placed((0, 5, 10, 15))} = pack([%x0, %x1, %x2])",
            f"[%y: f32[5] {placed((0, 5, 5, 5))}, %z: f32[10] {placed((0, 1, 5, 10))}] = unpack([%all]) {{shapes=[[5], [10]]}}",
        ],
    ],
    ids=["other bounds", "whole", "another order", "unpacked elsewhere"],
)
def test_the_proof_refuses_declared_ranges_that_are_others(lines):
    with pytest.raises(VerifyError, match="no rule allows its placements"):
        check_program(program((0, 5, 10, 15), *lines))
