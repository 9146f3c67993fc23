"""A value of a root, in parts on all ranks and back: its programs are proved and run, with every algorithm, and count what they send."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramPair, TensorType, opdef
from fluidx.ops.comm.volume import share
from fluidx.transpiler.algorithms import ALGORITHMS, able
from fluidx.transpiler.algorithms.cost import estimates, rounds_work
from fluidx.transpiler.cluster import Link
from fluidx.transpiler.lowering.write_algorithm import why_no_algorithm
from fluidx.transpiler.specialize import Specializer
from fluidx.transpiler.traffic import traffic
from fluidx.verify import verify_common, verify_ranks
from fluidx.verify.rank_program import check_rank_program
from fluidx.verify.refusal import Refusal

SOURCE = """
program p {
  var %w: f32[6,2] persistable
forward:
  %y: f32[6,2] = scale(%w) {scale=2.0}
optimize:
  %w = scale(%y) {scale=1.5}
}
"""
COMMON = """
program p {
  group dp = [0, 1, 2]
  var %w: f32[6,2] at(1) over dp persistable
dist:
  %w.part: f32[6,2] CUT over dp = scatter_parts(%w) {algorithm="", HOWgroup="dp", root=1}
forward:
  %y: f32[6,2] CUT over dp = scale(%w.part) {scale=2.0}
optimize:
  %w.new: f32[6,2] CUT over dp = scale(%y) {scale=1.5}
dist:
  %w = gather_parts(%w.new) {algorithm="", HOWgroup="dp", root=1}
}
"""
STARTUP = "program s {\n  GROUP\n  var %w: f32[6,2] PLACEpersistable\nforward:\n  %w = fill_constant() {shape=[6, 2], value=3.0}\n}\n"
CUTS = {"rows": ("shard(0)", ""), "columns": ("shard(1)", "axis=1, "), "ranges": ("pieces(0, 1, 5, 12)", "bounds=[0, 1, 5, 12], ")}
ABLE = [name for name in ALGORITHMS if able(name, "exchange", 3)]


def read(text):
    return fx.Program.parse_from_string(text)


def programs(cut, algorithm=""):
    """The pair for one device, the pair for all ranks, and the pairs of three ranks."""
    place, how = CUTS[cut]
    main = COMMON.replace("CUT", place).replace("HOW", how).replace('algorithm=""', f'algorithm="{algorithm}"')
    source = ProgramPair(read(SOURCE), read(STARTUP.replace("  GROUP\n", "").replace("PLACE", "")))
    common = ProgramPair(read(main), read(STARTUP.replace("GROUP", "group dp = [0, 1, 2]").replace("PLACE", "at(1) over dp ")))
    mains, startups = Specializer(common.main), Specializer(common.startup)
    return source, common, [ProgramPair(mains.rank_program(r), startups.rank_program(r)) for r in range(3)]


@pytest.mark.parametrize("algorithm, cut", [*((a, cut) for a in ("", *ABLE) for cut in ("rows", "ranges")), ("", "columns")])
def test_a_value_goes_to_its_parts_and_back(algorithm, cut):
    source, common, ranks = programs(cut, algorithm)
    verify_common(source, common, 3)
    verify_ranks(source, [p.main for p in ranks], [p.startup for p in ranks])
    with fx.ParallelExecutor(ranks, timeout=10) as exe:
        exe.run_startup()
        exe.run(feed={}, fetch_list=[])
        assert np.array_equal(exe.scopes[1].get("w"), np.full((6, 2), 9.0, "float32"))


@pytest.mark.parametrize("algorithm", ABLE)
def test_the_root_alone_sends_to_all_and_gets_from_all(algorithm):
    _, _, ranks = programs("rows", algorithm)
    peers = [[(op.type, op.attrs["peer"]) for op in p.main.ops if op.type in ("send", "recv")] for p in ranks]
    assert sorted(peers[1]) == [("recv", 0), ("recv", 2), ("send", 0), ("send", 2)]
    assert peers[0] == peers[2] == [("recv", 1), ("send", 1)]


@pytest.mark.parametrize("old, new", [("peer=1", "peer=2"), ("stop=4", "stop=5"), ("start=8", "start=0")])
def test_a_wrong_program_of_a_rank_is_refused(old, new):
    _, common, ranks = programs("rows", "star")
    recipes = Specializer(common.main).recipe
    for r, pair in enumerate(ranks):
        check_rank_program(common.main, pair.main, r, recipes)
    r, text = next((r, str(p.main)) for r, p in enumerate(ranks) if old in str(p.main))
    with pytest.raises((Refusal, fx.VerifyError, fx.ProgramError)):
        check_rank_program(common.main, read(text.replace(old, new, 1)), r, recipes)


def test_columns_are_left_to_the_communicator():
    _, common, _ = programs("columns")
    op, t = common.main.ops[0], common.main.global_block().desc("w").type
    assert why_no_algorithm(op, t, 3) == "f32[6,2] cannot be cut into a block for each of 3 ranks"


def test_only_a_value_at_the_root_is_scattered():
    scatter, gather = opdef("scatter_parts"), opdef("gather_parts")
    how = {"group": "dp", "root": 1, "axis": 0, "unit": 1, "bounds": ()}
    assert str(scatter.comm.move(fx.ir.At(1, "dp"), **how)) == "shard(0) over dp"
    assert str(gather.comm.move(fx.ir.Shard(0, "dp"), **how)) == "at(1) over dp"
    for entry in (None, fx.ir.At(0, "dp"), fx.ir.Shard(0, "dp")):
        with pytest.raises(fx.ProgramError, match=r"op scatter_parts takes at\(1\) over dp, not"):
            scatter.comm.move(entry, **how)
    with pytest.raises(fx.ProgramError, match="op gather_parts takes shard"):
        gather.comm.move(fx.ir.Shard(1, "dp"), **how)
    with pytest.raises(fx.ProgramError, match="root must be an index into group dp, from 0 on, got -1"):
        scatter.infer(TensorType("float32", (4,)), group="dp", root=-1, axis=0, unit=1, bounds=())


def test_each_part_but_the_roots_own_is_sent_once():
    """On average over three ranks, which together send two of three parts: 2/9 of 48 bytes, in each direction."""
    _, common, _ = programs("rows")
    for r in range(3):
        assert traffic(common.main, r).total == pytest.approx(2 * 2 / 9 * 48)
    assert share("exchange", 3) == pytest.approx(2 / 9)


def test_the_busiest_rank_of_the_model_is_the_root():
    for n in (2, 3, 4, 8):
        work = rounds_work(ALGORITHMS["star"], "exchange", n, rooted=True)
        assert work.messages == n - 1 and work.busiest == work.total == pytest.approx((n - 1) / n, abs=1e-5)
    own = estimates("exchange", 4, 10**6, rooted=True, link=Link(1e-5, 1e-9), own=Link(2e-5, 1e-9))[0]
    assert (own.name, own.seconds) == ("", pytest.approx(2e-5 + 0.75e-3))
