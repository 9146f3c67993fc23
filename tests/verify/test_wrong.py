# ruff: noqa: E501 - a wrong program is one line
"""Wrong programs are refused, each with the reason: mistakes of thought, and changes of one attribute on one rank."""

import pytest

import fluidx as fx
from fluidx import VerifyError
from fluidx.ir import At, Shard, TensorType
from fluidx.ir.parts import check_placement
from fluidx.verify import verify_ranks
from tests.verify.programs import (
    BRANCHES,
    BRANCHES_CUT,
    DATA_PARALLEL,
    LOOP,
    LOOP_CUT,
    MODEL,
    REDUCE_BROADCAST,
    RING,
    ZERO1,
    edited,
    prove,
)

SUM = '  %w@GRAD.sum: f32[4,3] = all_reduce(%w@GRAD) {group="dp", op="sum"}\n'
DP, RB, Z1 = DATA_PARALLEL, REDUCE_BROADCAST, ZERO1
W = "var %extra: f32[4,3] persistable"

WRONG = {
    # gradients
    "a gradient is not reduced": (DP, None, SUM, "  %w@GRAD.sum: f32[4,3] = assign(%w@GRAD)\n", "no rule allows"),
    "a term is called whole": (DP, None, SUM, "  %w@GRAD.sum: f32[4,3] partial(sum) over dp = assign(%w@GRAD)\n", "no rule allows"),
    "a gradient is reduced twice": (
        DP, None, SUM, SUM.replace("w@GRAD.sum", "once", 1) + SUM.replace("(%w@GRAD)", "(%once)"), "does not hold one device's value",
    ),
    "a gradient is reduced by its maximum": (DP, None, 'op="sum"', 'op="max"', "all_reduce"),
    "a gradient is averaged": (DP, None, 'op="sum"', 'op="avg"', "does not hold one device's value"),
    "a gradient is clipped before it is reduced": (
        DP, None, SUM, "  %c: f32[4,3] partial(sum) over dp = clip(%w@GRAD) {min=-1.0, max=1.0}\n" + SUM.replace("(%w@GRAD)", "(%c)"),
        "no rule allows",
    ),
    "one rank reduces by its maximum": (DP, [1], 'op="sum"', 'op="max"', "in the same collective call"),
    "the forward part is another": (DP, None, "tanh(%y)", "sigmoid(%y)", "does not hold one device's value"),
    "one rank computes something else": (DP, [1], "tanh(%y)", "sigmoid(%y)", "."),
    "the loss seed is another": (DP, None, "{shape=[1], value=1.0}", "{shape=[1], value=2.0}", "does not hold one device's value"),
    "the seed is tiny and of another sign": (
        DP, None, SUM, SUM.replace("w@GRAD.sum", "t", 1) + "  %u: f32[4,3] = scale(%t) {scale=-1e-17}\n"
        "  %w@GRAD.sum: f32[4,3] = scale(%u) {scale=1e17}\n", "does not hold one device's value",
    ),
    "one rank clips at a number that the dtype does not have": (
        DP, [1], SUM, SUM + '  %mask: u8[4,3] = cast(%w) {dtype="uint8"}\n  %kept: u8[4,3] = clip(%mask) {max=1.0, min=-1000.0}\n',
        "op clip: min is -1000.0, but uint8 holds integers from 0 to 255",
    ),
    "data is not split": (DP, None, "data %x: f32[-1,4] shard(0) over dp", "data %x: f32[-1,4]", "no rule allows"),
    # updates
    "the momentum is another": (DP, None, "{mu=0.9}", "{mu=0.8}", "does not hold one device's value"),
    "the momentum is another on one rank": (DP, [1], "{mu=0.9}", "{mu=0.8}", "does not hold one device's value"),
    "a parameter drifts": (DP, [1], "{mu=0.9}\n", "{mu=0.9}\n  %w = scale(%w) {scale=1.00000001}\n", "does not hold one device's value"),
    "a parameter is not handed back": (RB, None, '%w = broadcast(%w.new) {group="dp", root=1}', '%q: f32[4,3] = broadcast(%w.new) {group="dp", root=1}', "does not hold"),
    "a root that is another": (RB, None, '%w = broadcast(%w.new) {group="dp", root=1}', '%w = broadcast(%w.new) {group="dp", root=0}', "broadcast"),
    "another rank updates too": (RB, [0], "optimize:\n", "optimize:\n  %w.new, %m = momentum(%w, %w@GRAD.sum, %m, %lr) {mu=0.9}\n", "does not have it"),
    "the root does not update": (RB, [1], "%w.new: f32[4,3] at(1) over dp, %m = momentum(%w, %w@GRAD.sum, %m, %lr) {mu=0.9}", "%w.new: f32[4,3] at(1) over dp = assign(%w)", "does not hold"),
    "a part is gathered that is another cut": (Z1, None, "all_gather(%w.new) {", "all_gather(%w.new) {unit=3, ", "."),
    "parts along another axis": (Z1, None, 'reduce_scatter(%w@GRAD) {group="dp", axis=0', 'reduce_scatter(%w@GRAD) {group="dp", axis=1', "."),
    # state
    "a state is thrown away": (DP, None, "var %m: f32[4,3] persistable", "var %m: f32[4,3]", "persistable"),
    "a state variable that the source does not have": (DP, None, "{mu=0.9}\n", "{mu=0.9}\n  %extra = assign(%w)\n", "declared"),
    "a cached copy": (
        edited(DP, "  param %w: f32[4,3]\n", f"  param %w: f32[4,3]\n  {W}\n"), None, "{mu=0.9}\n", "{mu=0.9}\n  %extra = assign(%w)\n",
        "a state variable that the source does not have",
    ),
    "a computed value is fed": (DP, None, "forward:\n  %y: f32[-1,3] shard(0) over dp", "forward:\n  %y: f32[-1,3] shard(0) over dp is_data", "is_data"),
    "state lies elsewhere in main": (edited(Z1, "var %m: f32[4,3] shard(0) over dp", "var %m: f32[4,3]"), None, "x", "x", "."),
    # startup
    "another seed": (DP, None, "seed=3", "seed=4", "after startup"),
    "another seed on one rank": (DP, [0], "seed=3", "seed=4", "after startup"),
    "another constant": (DP, None, "value=0.1", "value=0.2", "after startup"),
    "a broadcast before the fill": (
        DP, [1], '  %w = uniform_random() {shape=[4,3], seed=3}\n  %w = broadcast(%w) {group="dp", root=0}\n',
        '  %w = broadcast(%w) {group="dp", root=0}\n  %w = uniform_random() {shape=[4,3], seed=3}\n', "before any operator defines it",
    ),
    # groups
    "groups differ": (DP, [1], "group dp = [0, 1]", "group dp = [1, 0]", "groups are declared"),
    "a group without the rank": (edited(DP, "group dp = [0, 1]", "group dp = [0, 1]; group alone = [0]"), None, SUM, SUM + '  barrier() {group="alone"}\n', "in no set"),
    "an unknown group": (DP, None, SUM, SUM + '  barrier() {group="nowhere"}\n', "is not declared"),
    "a rank too many": (DP, None, "group dp = [0, 1]", "group dp = [0, 1, 2]", "there are 2 ranks"),
    "a rank twice": (DP, None, "group dp = [0, 1]", "group dp = [0, 0, 1]", "twice"),
    "one rank does not come": (DP, [1], SUM, "  %w@GRAD.sum: f32[4,3] = fill_zeros_like(%w)\n", "."),
    # attributes and types
    "an unknown attribute": (DP, None, "tanh(%y)", "tanh(%y) {only bogus=1}", "bogus"),
    "a group that is a number": (DP, None, '{group="dp", op="sum"}', '{only group=1, op="sum"}', "group"),
    "a declared type is another": (DP, None, "%w@GRAD: f32[4,3]", "%w@GRAD: f32[3,4]", "."),
    "a placement without meaning": (DP, None, "%h: f32[-1,3] shard(0) over dp", "%h: f32[-1,3] shard(7) over dp", "axis"),
    "a placement over nothing": (DP, None, "%h: f32[-1,3] shard(0) over dp", "%h: f32[-1,3] shard(0) over tp", "names no declared group|no set"),
    "a name that is not declared": (DP, None, "tanh(%y)", "tanh(%nowhere)", "not declared"),
    "an op that is none": (DP, None, "%h: f32[-1,3] shard(0) over dp = tanh(%y)", "Out=[%h: f32[-1,3] shard(0) over dp] = bogus(X=[%y])", "no op"),
    "fetched is another value": (DP, None, "%loss: f32[1] partial(sum) over dp = mean(%h)", "%loss: f32[1] partial(sum) over dp = mean(%y)", "%loss"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused(name):
    texts, ranks, old, new, said = WRONG[name]
    with pytest.raises(VerifyError, match=said) as e:
        prove(MODEL, edited(texts, old, new, ranks))
    assert "cannot be checked" not in str(e.value), str(e.value)


FLAT = "  %h = elementwise_add(%h, %t)"
BLOCKS = {
    "a body differs on one rank": (BRANCHES, BRANCHES_CUT, [1], "relu(%x)", "tanh(%x)", "does not hold"),
    "a body inside of a body differs": (BRANCHES, BRANCHES_CUT, None, "sigmoid(%x)", "relu(%x)", "does not hold"),
    "a body reads another outside value": (
        BRANCHES, BRANCHES_CUT, None, "%e: f32[-1,4] shard(0) over dp = sigmoid(%x)", "%e: f32[-1,4] shard(0) over dp = sigmoid(%c)",
        "does not hold",
    ),
    "the branches are swapped": (BRANCHES, BRANCHES_CUT, None, "true_block=block 1, false_block=block 2, true_out=[\"a\"], false_out=[\"b\"]",
        "true_block=block 2, false_block=block 1, true_out=[\"b\"], false_out=[\"a\"]", "does not hold"),
    "a branch hands out something else": (BRANCHES, BRANCHES_CUT, None, 'false_out=["b"]', 'false_out=["x"]', "does not hold"),
    "a branch hands out a number": (BRANCHES, BRANCHES_CUT, None, '{true_block=block 1, false_block=block 2, true_out=["a"], false_out=["b"]}',
        '{only true_block=block 1, false_block=block 2, true_out=["a"], false_out=[1]}', "must be str"),
    "a branch writes outside": (BRANCHES, BRANCHES_CUT, None, "block 2 in 0 {\n", "block 2 in 0 {\n  %w = scale(%w) {scale=2.0}\n", "%w"),
    "a loop's body is another": (LOOP, LOOP_CUT, None, "%t: f32[-1,4] shard(0) over dp = tanh(%h)",
        "%t: f32[-1,4] shard(0) over dp = relu(%h)", "does not hold"),
    "a loop begins elsewhere": (LOOP, LOOP_CUT, None, "value=0}", "value=1}", "does not hold"),
    "a loop counts by two": (LOOP, LOOP_CUT, None, "increment(%i)", "increment(%i) {step=2.0}", "does not hold"),
    "a loop ends on another condition": (LOOP, LOOP_CUT, None, "  %go = less_than(%i, %n)\n}", "  %go = less_equal(%i, %n)\n}", "does not hold"),
    "a loop hands on the old value": (LOOP, LOOP_CUT, None, FLAT, "  %h = assign(%t)", "does not hold"),
    "a loop is another on one rank": (LOOP, LOOP_CUT, [0], FLAT, "  %h = elementwise_sub(%h, %t)", "does not hold"),
    "a round reads what it has not made": (LOOP, LOOP_CUT, None, "  %t: f32[-1,4] shard(0) over dp = tanh(%h)\n" + FLAT,
        FLAT + "\n  %t: f32[-1,4] shard(0) over dp = tanh(%h)", "before any operator"),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_part_of_the_value(name):
    source, texts, ranks, old, new, said = BLOCKS[name]
    with pytest.raises(VerifyError, match=said) as e:
        prove(source, edited(texts, old, new, ranks))
    assert "cannot be checked" not in str(e.value), str(e.value)


MESSAGES = {
    "a hop goes to the wrong rank": ([0], "  send(%g.s0) {peer=1", "  send(%g.s0) {peer=2", "."),
    "a hop is left out": ([1], "%g.s0: f32[4] local = sum([%g.in0, %g.c2])", "%g.s0: f32[4] local = assign(%g.in0)", "."),
    "a term is added twice": (None, "%g.s1: f32[4] local = sum([%g.in1, ", "%g.s1: f32[4] local = sum([%g.in1, %g.in1, ", "."),
    "chunks are swapped": (None, "{start=0, stop=4}", "{start=1, stop=5}", "."),
    "what is received is handed on in its own batch": (None, "  %g.s0: f32[4] local = sum", "  %g.dead: f32[4] local = assign(%g.in0)\n  %g.s0: f32[4] local = sum", None),
    "sizes differ": ([0], "%g.in0: f32[4] local = recv() {peer=2, shape=[4]", "%g.in0: f32[3] local = recv() {peer=2, shape=[3]", "."),
    "nobody receives": ([0], 'batch="h0"', 'batch=""', None),
    "pieces are joined in another order": ([2], "concat([%w.in1, %w.in0, %w.own])", "concat([%w.in0, %w.in1, %w.own])", "%w"),
    "a piece is not updated": ([1], "%w.own: f32[4] local = assign(%w.new)", "%w.own: f32[4] local = assign(%w.part)", "%w"),
    "a peer that is none": ([1], "send(%g.c0) {peer=2", "send(%g.c0) {peer=7", "peers are other ranks from 0 to 2"),
    "a peer that is no number": ([1], 'send(%g.c0) {peer=2, group="dp"', 'send(%g.c0) {only peer=1.5, group="dp"', "peer"),
    "received is no type": ([1], 'recv() {peer=0, shape=[4], group="dp", batch="h0"}', 'recv() {dtype="bogus", peer=0, shape=[4], group="dp", batch="h0"}', "."),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    ranks, old, new, said = MESSAGES[name]
    texts = edited(RING, old, new, ranks)
    if said is None:
        prove(MODEL, texts)
        return
    with pytest.raises(VerifyError, match=said) as e:
        prove(MODEL, texts)
    assert "cannot be checked" not in str(e.value), str(e.value)


def test_a_rank_that_is_far_away_takes_no_time():
    from fluidx.ir import parse_pair
    from fluidx.verify import check_program

    texts = edited(DATA_PARALLEL, "group dp = [0, 1]", "group dp = [0, 2147483646]")
    check_program(parse_pair(texts[0]).main)
    with pytest.raises(VerifyError, match="there are 2 ranks"):
        prove(MODEL, texts)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_rank_whose_part_of_the_state_is_empty_makes_it_all_the_same(strategy):
    """Two elements over four ranks: ranks 0 and 2 hold none. Their plans read the state, so startup has to define it there too."""
    main, startup = fx.Program("narrow"), fx.Program("narrow_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        y = fx.layers.fc(fx.data("x", [-1, 8]), 2)
        fx.optimizer.Momentum(0.1, 0.9).minimize(fx.layers.mean(y))
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=4)
    t.verify()
    for rank in range(4):
        mains, startups = [t.get_trainer_program(r) for r in range(4)], [t.get_startup_program(r).copy() for r in range(4)]
        block = startups[rank].global_block()
        block.oplist = [op for op in block.oplist if "fc_0.b_0_velocity_0" not in op.output_arg_names]
        with pytest.raises(VerifyError, match="%fc_0.b_0_velocity_0"):
            verify_ranks(fx.ir.ProgramPair(main, startup), mains, startups)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p.groups.update(dp=[[0, 1]]), "group dp must be a tuple of tuples of ranks"),
        (lambda p: p.groups.update(dp=((0.0, True),)), "group dp must be a tuple of tuples of ranks"),
        (lambda p: setattr(p, "rank", float(p.rank)), "rank must be an int"),
    ],
)
def test_ranks_and_groups_are_integers(change, message):
    main, startup = fx.Program("line"), fx.Program("line_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 8]), 2)))
    t = fx.DistributeTranspiler().transpile(program=main, startup_program=startup, trainers=2)
    mains, startups = ([get(r).copy() for r in range(2)] for get in (t.get_trainer_program, t.get_startup_program))
    verify_ranks(fx.ir.ProgramPair(main, startup), mains, startups)
    for p in (*mains, *startups):
        change(p)
    with pytest.raises(VerifyError, match=message):
        verify_ranks(fx.ir.ProgramPair(main, startup), mains, startups)


def test_the_groups_of_a_placement_cross():
    """Over dp of four ranks each holds a term. At the root of every rail means two of them: that is no part of the first."""
    main, startup = fx.Program("line"), fx.Program("line_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 8]), 2))
        fx.optimizer.SGD(0.1).minimize(loss)
    t = fx.DistributeTranspiler().transpile(program=main, startup_program=startup, trainers=fx.Cluster(2, 2))
    mains, startups = [t.get_trainer_program(r).copy() for r in range(4)], [t.get_startup_program(r) for r in range(4)]
    verify_ranks(fx.ir.ProgramPair(main, startup), mains, startups)
    for p in mains:
        p.groups["rail"] = ((0, 2), (1, 3))
        d = p.global_block().descs[loss.name]
        p.global_block().declare(d.changed(placement=(*d.placement, At(0, "rail"))))
    with pytest.raises(VerifyError, match="cross, as the axes of a mesh do"):
        verify_ranks(fx.ir.ProgramPair(main, startup), mains, startups)


@pytest.mark.parametrize(
    "first, second, sensible",
    [
        (((0, 1), (2, 3)), ((0, 2), (1, 3)), True),
        (((0, 1), (2, 3)), ((0, 1), (2, 3)), False),
        (((0, 1, 2, 3),), ((0, 2), (1, 3)), False),
        (((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)), True),
        (((0, 1),), ((2, 3),), True),
    ],
)
def test_which_groups_cross(first, second, sensible):
    place = (Shard(0, "a"), Shard(1, "b"))
    assert (not check_placement(TensorType("float32", (8, 8)), place, {"a": first, "b": second}, 4)) is sensible
