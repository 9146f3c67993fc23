"""Diffs of programs, and the census of what they communicate."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluidx.ir import Operator, Program, ProgramError, Role, TensorType, Var
from fluidx.ir.parser import parse_pair, parse_program
from fluidx.view.diff import _matches, census, diff, show_bytes
from tests.ir.random_programs import programs
from tests.sweep import examples

BEFORE = """program mnist {
  data %x: f32[-1,784]
  param %w: f32[784,10] {trainable=true}
startup:
  Out=[%w] = f_uniform() {shape=[784, 10]}
forward:
  Out=[%a: f32[-1,784]] = f_relu(X=[%x])
  Out=[%b: f32[-1,784]] = f_relu(X=[%a])
  Out=[%y: f32[-1,10]] = f_mm(X=[%b], Y=[%w])
backward:
  Out=[%w@GRAD: f32[784,10]] = f_mm(X=[%b], Y=[%y])
optimize:
  ParamOut=[%w] = f_sgd(Param=[%w], Grad=[%w@GRAD])
}
"""

AFTER = """program mnist {
  group dp = [0, 1]
  data %x: f32[-1,784] shard(0) over dp
  param %w: f32[784,10] {trainable=true}
startup dist:
  nccl_init() {group="dp"}
startup:
  Out=[%w] = f_uniform() {shape=[784, 10]}
startup dist:
  Out=[%w] = broadcast(X=[%w]) {group="dp", root=0}
forward:
  Out=[%a: f32[-1,784] shard(0) over dp] = f_relu(X=[%x])
  Out=[%b: f32[-1,784] shard(0) over dp] = f_relu(X=[%a])
  Out=[%y: f32[-1,10] shard(0) over dp] = f_mm(X=[%b], Y=[%w])
backward:
  Out=[%w@GRAD: f32[784,10] partial(sum) over dp] = f_mm(X=[%b], Y=[%y])
  Out=[%w@GRAD.sum: f32[784,10]] = all_reduce(X=[%w@GRAD]) {group="dp", op="sum"}
optimize:
  ParamOut=[%w] = f_sgd(Param=[%w], Grad=[%w@GRAD.sum])
}
"""


# nccl_init, broadcast and all_reduce may be declared, and then print by position; these tests compare what holds either way
def test_a_diff_lists_changed_operators_among_unchanged_ones():
    before, after = parse_program(BEFORE.replace("startup:\n  Out=[%w] = f_uniform() {shape=[784, 10]}\n", "")), parse_pair(AFTER).main
    d = diff(before, after, names=("one device", "dp"))
    assert [op.type for op in d.added] == ["all_reduce", "f_sgd"]
    assert [op.type for op in d.removed] == ["f_sgd"]
    lines = str(d).splitlines()
    assert lines[:5] == [
        "--- one device: 5 operators",
        "+++ dp: 6 operators, 2 added, 1 removed",
        "+ group dp = [0, 1]",
        "- data %x: f32[-1,784]",
        "+ data %x: f32[-1,784] shard(0) over dp",
    ]
    assert lines[5:8] == ["  ... 3 unchanged operators", "backward:", lines[7]]
    assert lines[7].startswith("  ") and "%w@GRAD: f32[784,10] partial(sum) over dp" in lines[7]
    assert lines[8].startswith("+ ") and "%w@GRAD.sum: f32[784,10]" in lines[8] and '{group="dp", op="sum"}' in lines[8]
    assert lines[9] == "optimize:"
    assert (lines[10][0], lines[11][0]) == ("-", "+")
    assert lines[-1] == "added communication: 1 all_reduce, 31.4 KB over dp"


def test_a_diff_of_pairs_shows_startup_first():
    d = diff(parse_pair(BEFORE), parse_pair(AFTER))
    assert [op.type for op in d.added] == ["nccl_init", "broadcast", "all_reduce", "f_sgd"]
    text = str(d)
    assert text.index("startup dist:") < text.index("backward:")
    assert text.count("+ group dp = [0, 1]") == 1  # said once, for both
    assert str(d.census().communication).splitlines() == [
        "1 nccl_init over dp",
        "1 broadcast, 31.4 KB over dp",
        "1 all_reduce, 31.4 KB over dp",
    ]


def test_equal_programs_have_an_empty_diff():
    d = diff(parse_pair(BEFORE), parse_pair(BEFORE))
    assert not d
    assert (d.added, d.removed) == ((), ())
    assert str(d) == "before and after are equal: 6 operators"


def test_a_program_and_a_pair_are_not_compared():
    pair = parse_pair(BEFORE)
    with pytest.raises(ProgramError, match="diff takes two programs or two pairs, not one of each"):
        diff(pair.main, pair)


def test_the_census_counts_operators_and_the_bytes_that_communication_moves_by_group():
    p = parse_program("""program p {
  var %g: f32[1000]
  var %h: f32[250]
dist:
  Out=[%g] = all_reduce(X=[%g]) {only group="dp", op="sum"}
  Out=[%g] = all_reduce(X=[%g]) {only group="dp", op="sum"}
  Out=[%h] = all_reduce(X=[%h]) {only group="tp", op="sum"}
  Out=[%h] = reduce_scatter(X=[%g]) {only group="dp", op="sum"}
forward:
  Out=[%h] = f_relu(X=[%h])
}""")
    c = census(p)
    assert c == {"all_reduce": (3, {"dp": 8000, "tp": 1000}), "reduce_scatter": (1, {"dp": 4000}), "f_relu": (1, {})}
    assert str(c) == "2 all_reduce, 8.0 KB over dp\n1 all_reduce, 1.0 KB over tp\n1 reduce_scatter, 4.0 KB over dp\n1 f_relu"
    assert "f_relu" not in c.communication
    assert [show_bytes(n) for n in (0, 999, 999_949, 999_960, 3 * 10**15)] == ["0 B", "999 B", "999.9 KB", "1.0 MB", "3000.0 TB"]


@given(st.lists(st.integers(0, 6), max_size=30), st.lists(st.integers(0, 6), max_size=30))
def test_matches_are_a_common_subsequence(x, y):
    pairs = _matches(x, y)
    assert all(x[i] == y[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in zip(pairs, pairs[1:]))
    assert x != y or len(pairs) == len(x)


@settings(max_examples=examples(10, 200), deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), programs())
def test_any_two_programs_have_a_diff_that_leads_from_one_to_the_other(a, b):
    d = diff(a, b)
    assert str(d)
    assert bool(d) == (a != b)
    for block in d.sections[0].blocks:
        new = [block.after.oplist[j] for mark, _, j in block.steps if mark != "-"] if block.after else []
        assert new == (block.after.oplist if block.after else [])


def long_program(n: int, every: int, repeated: bool = False) -> Program:
    p = Program("long")
    b = p.global_block()
    for k in range(n):
        b.declare(Var(f"v{k}", TensorType("float32", (8, 8))))
        b.oplist.append(Operator("f_mm", {"X": (f"v{max(0, k - 1)}",)}, {"Out": (f"v{k}",)}, {"k": 1}))
        if every and k % every == 0:
            new = "same" if repeated else f"v{k}.sum"
            b.oplist.append(Operator("all_reduce", {"X": (f"v{k}",)}, {"Out": (new,)}, {"group": "dp"}, Role.DIST))
    return p


@pytest.mark.parametrize("case", ["insert", "shuffle", "repeats", "nothing in common"])
def test_ten_thousand_operators_are_compared_in_seconds(case):
    a, b = long_program(10_000, 0), long_program(10_000, 2)
    if case == "shuffle":
        random.Random(1).shuffle(b.blocks[0].oplist)
    if case == "repeats":
        for p, types in ((a, "fg"), (b, "ghf")):
            p.blocks[0].oplist = [Operator(types[k * k % len(types)], {}, {}) for k in range(10_000)]
    if case == "nothing in common":
        a.blocks[0].oplist = [op.replace(type="other") for op in a.blocks[0].oplist]
    start = time.perf_counter()
    text = str(diff(a, b))
    assert text
    assert time.perf_counter() - start < 10  # takes about 0.3 s; a quadratic search takes minutes
