"""Buckets: what is sent one by one is packed and sent together, as early as it is ready, and comes out as it would have."""

import pytest

import fluidx as fx
from fluidx.ir import Pieces, TensorType, Var
from fluidx.testing import check_pass
from fluidx.transpiler.passes.bucket import Bucket
from fluidx.transpiler.placement.parameter_homes import InBuckets

GIVEN = """
  group dp = [0, 1]
  var %a: f32[4] partial(sum) over dp
  var %b: f32[2,3] partial(sum) over dp
  var %c: f32[2] partial(sum) over dp
  var %d: f64[2] partial(sum) over dp
  var %v: f32[4] persistable
"""
MIB = 2**20
A, B, C = (f"%{n}.sum: f32{s} = all_reduce(%{n}) " + '{group="dp", op="sum"}' for n, s in (("a", "[4]"), ("b", "[2,3]"), ("c", "[2]")))
OTHER = "forward:\n%y: f32[4] = relu(%v)\n"
READ_A, READ_B, READ_C = (f"optimize:\n%{n}.new: f32{s} = relu(%{n}.sum)\n" for n, s in (("a", "[4]"), ("b", "[2,3]"), ("c", "[2]")))
USE = READ_A + READ_B + READ_C


def dist(*lines):
    return "\n".join(["dist:", *lines]) + "\n"


def packed(*names, sizes, size):
    """The lines of one bucket: sent, and taken apart again."""
    shapes = {"a": "[4]", "b": "[2,3]", "c": "[2]"}
    ins = ", ".join(f"%{n}" for n in names)
    outs = ", ".join(f"%{n}.sum: f32{shapes[n]}" for n in names)
    first = names[0]
    sent = [
        f"%{first}.packed: f32[{size}] partial(sum) over dp = pack([{ins}])",
        f"%{first}.sum.packed: f32[{size}] = all_reduce(%{first}.packed) " + '{group="dp", op="sum"}',
    ]
    return sent, f"[{outs}] = unpack([%{first}.sum.packed]) {{shapes={sizes}}}"


def test_a_bucket_is_sent_where_its_last_value_is_ready_and_taken_apart_where_one_is_read():
    sent, apart = packed("a", "b", "c", sizes=[[4], [2, 3], [2]], size=12)
    check_pass(Bucket(), given=GIVEN, before=dist(A) + OTHER + dist(B, C) + OTHER.replace("y", "x") + USE,
               after=OTHER + dist(*sent) + OTHER.replace("y", "x") + dist(apart) + USE)  # fmt: skip


def test_a_value_that_does_not_fit_begins_the_next_bucket():
    sent, apart = packed("a", "b", sizes=[[4], [2, 3]], size=10)
    forty_bytes = Bucket(40 / MIB, 40 / MIB)
    check_pass(forty_bytes, given=GIVEN, before=dist(A, B, C) + USE, after=dist(*sent, C, apart) + USE)


def test_the_first_bucket_is_smaller():
    sent, apart = packed("b", "c", sizes=[[2, 3], [2]], size=8)
    after = dist(A, *sent) + READ_A + dist(apart) + READ_B + READ_C
    check_pass(Bucket(32 / MIB, 16 / MIB), given=GIVEN, before=dist(A, B, C) + USE, after=after)


def test_a_reader_ends_a_bucket():
    sent, apart = packed("a", "c", sizes=[[4], [2]], size=6)
    same = dist(A) + READ_A + dist(B) + READ_B
    check_pass(Bucket(), given=GIVEN, before=same, after=same)
    rest = READ_A + dist(B) + READ_B + READ_C
    check_pass(Bucket(), given=GIVEN, before=dist(A, C) + rest, after=dist(*sent, apart) + rest)


def test_a_writer_of_what_a_bucket_reads_ends_it():
    write = "forward:\n%a = scale(%a) {scale=2.0}\n"
    same = dist(A) + write + dist(B) + READ_A + READ_B
    check_pass(Bucket(), given=GIVEN, before=same, after=same)


def test_what_backward_waits_for_does_not_wait_for_gradients():
    sent, apart = packed("a", "c", sizes=[[4], [2]], size=6)
    wait = "backward:\n%w: f32[2,3] = relu(%b.sum)\n"
    rest = READ_A + READ_C
    check_pass(Bucket(), given=GIVEN, before=dist(A, B) + wait + dist(C) + rest, after=dist(B) + wait + dist(*sent, apart) + rest)


def test_late_buckets_wait_for_a_reader():
    sent, apart = packed("a", "c", sizes=[[4], [2]], size=6)
    rest, late = READ_A + READ_C, Bucket(late=("all_reduce",))
    check_pass(late, given=GIVEN, before=dist(A, C) + OTHER + rest, after=OTHER + dist(*sent, apart) + rest)
    one_by_one = Bucket(mb=0, late=("all_reduce",))
    check_pass(one_by_one, given=GIVEN, before=dist(A) + OTHER + READ_A, after=OTHER + dist(A) + READ_A)


OTHER_KINDS = {
    "dtype": '%d.sum: f64[2] = all_reduce(%d) {group="dp", op="sum"}',
    "op": '%b.sum: f32[2,3] at(1) over dp = reduce(%b) {group="dp", op="sum", root=1}',
    "cut": '%b.sum: f32[2,3] shard(0) over dp = reduce_scatter(%b) {group="dp", op="sum"}',
}


@pytest.mark.parametrize("line", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_what_is_not_alike_is_not_packed(line):
    check_pass(Bucket(), given=GIVEN, before=dist(A, line), after=dist(A, line))


def test_nothing_changes_without_buckets():
    check_pass(Bucket(mb=0), given=GIVEN, before=dist(A, B, C) + USE, after=dist(A, B, C) + USE)


# -- flat ranges ----------------------------------------------------------------------------------------------------------------------

# 12 elements cut evenly between two ranks: rank 0 has a and the first two of b
RANGES = {"a": (0, 4, 4), "b": (0, 2, 6), "c": (0, 0, 2)}
SHAPES = (("a", "[4]"), ("b", "[2,3]"), ("c", "[2]"))
FLAT = GIVEN + "".join(f"  var %{n}.new: f32{s} pieces({', '.join(map(str, RANGES[n]))}) over dp\n" for n, s in SHAPES)


def scattered(n, shape):
    cut = ", ".join(map(str, RANGES[n]))
    return f'%{n}.sum: f32{shape} pieces({cut}) over dp = reduce_scatter(%{n}) {{bounds=[{cut}], group="dp", op="sum"}}'


def gathered(n, shape):
    return f'%{n}.full: f32{shape} = all_gather(%{n}.new) {{bounds=[{", ".join(map(str, RANGES[n]))}], group="dp"}}'


def test_flat_ranges_are_reduced_and_cut_as_one():
    outs = ", ".join(f"%{n}.sum: f32{s} pieces({', '.join(map(str, RANGES[n]))}) over dp" for n, s in SHAPES)
    check_pass(Bucket(), given=FLAT, before=dist(*[scattered(*x) for x in SHAPES]), after=dist(
        "%a.packed: f32[12] partial(sum) over dp = pack([%a, %b, %c])",
        '%a.sum.packed: f32[12] pieces(0, 6, 12) over dp = reduce_scatter(%a.packed) {bounds=[0, 6, 12], group="dp", op="sum"}',
        f"[{outs}] = unpack([%a.sum.packed]) {{shapes=[[4], [2, 3], [2]]}}",
    ))  # fmt: skip


def test_flat_ranges_are_packed_in_the_order_in_which_they_were_cut():
    backwards = [gathered(*x) for x in reversed(SHAPES)]
    check_pass(Bucket(), given=FLAT, before=dist(*backwards), after=dist(
        "%a.new.packed: f32[12] pieces(0, 6, 12) over dp = pack([%a.new, %b.new, %c.new])",
        '%a.full.packed: f32[12] = all_gather(%a.new.packed) {bounds=[0, 6, 12], group="dp"}',
        "[%a.full: f32[4], %b.full: f32[2,3], %c.full: f32[2]] = unpack([%a.full.packed]) {shapes=[[4], [2, 3], [2]]}",
    ))  # fmt: skip


def test_flat_ranges_that_do_not_continue_each_other_are_not_packed():
    both = "  var %e: f32[4] partial(sum) over dp\n  var %f: f32[4] partial(sum) over dp\n"
    lines = [f'%{n}.sum: f32[4] pieces(0, 1, 4) over dp = reduce_scatter(%{n}) {{bounds=[0, 1, 4], group="dp", op="sum"}}' for n in "ef"]
    check_pass(Bucket(), given=GIVEN + both, before=dist(*lines), after=dist(*lines))


# -- the choice that cuts buckets ------------------------------------------------------------------------------------------------------


def params(*sizes, dtype="float32"):
    return {f"p{k}": Var(f"p{k}", TensorType(dtype, (n,))) for k, n in enumerate(sizes)}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_parameters_lie_in_ranges_of_evenly_cut_buckets(ranks):
    sizes = [7, 250, 3, 64, 1, 2, 1000, 90]
    entries = InBuckets(mb=1024 / MIB, first_mb=64 / MIB).entries(params(*sizes), "dp", ranks)
    # float32, buckets of 256 elements, the first of 16; one element stays everywhere, 1000 elements are alone
    for bucket in ([0], [1, 2], [3, 5], [6], [7]):
        total = sum(sizes[k] for k in bucket)
        marks = [sum(entries[f"p{k}"].bounds[r] for k in bucket) for r in range(ranks + 1)]
        assert marks == [r * total // ranks for r in range(ranks + 1)]
    assert "p4" not in entries and all(isinstance(e, Pieces) for e in entries.values())


def test_parameters_of_two_dtypes_are_in_buckets_of_their_own():
    mixed = {n: Var(n, TensorType(f"float{bits}", (4,))) for n, bits in (("x", 32), ("y", 64), ("z", 32))}
    assert InBuckets().buckets(mixed) == [["x", "z"], ["y"]]
    assert fx.strategies.zero1().passes[1].update == InBuckets(25.0, 1.0)
