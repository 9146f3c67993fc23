"""Programs for all ranks with transfers: what a rank has instead of a transfer is its message, and nothing else is accepted."""

import pytest

import fluidx as fx
from fluidx.ir import ProgramPair
from fluidx.transpiler.specialize import Specializer
from fluidx.verify import verify_common, verify_ranks
from fluidx.verify.rank_program import check_rank_program
from fluidx.verify.refusal import Refusal

# ranks 0 and 1 are stage 0 of two replicas, ranks 2 and 3 stage 1
GROUPS = "group pp = [0, 2] [1, 3]\n  group dp = [0, 1] [2, 3]"
SOURCE = """
program two {
  data %x: f32[-1,4]
forward:
  %h: f32[-1,4] = relu(%x)
  %g: f32[-1,4] = tanh(%x)
  %y: f32[-1,4] = tanh(%h)
  %z: f32[-1,4] = relu(%y)
}
"""
COMMON = f"""
program two {{
  {GROUPS}
  data %x: f32[-1,4] at(0) over pp shard(0) over dp
forward:
  %h: f32[-1,4] at(0) over pp shard(0) over dp = relu(%x)
  %g: f32[-1,4] at(0) over pp shard(0) over dp = tanh(%x)
dist:
  %h.moved: f32[-1,4] at(1) over pp shard(0) over dp = transfer(%h) {{batch="down", group="pp", root=0, to=1}}
  %g.moved: f32[-1,4] at(1) over pp shard(0) over dp = transfer(%g) {{batch="down", group="pp", root=0, to=1}}
forward:
  %y: f32[-1,4] at(1) over pp shard(0) over dp = tanh(%h.moved)
dist:
  %y.moved: f32[-1,4] at(0) over pp shard(0) over dp = transfer(%y) {{batch="up", group="pp", root=1, to=0}}
forward:
  %z: f32[-1,4] at(0) over pp shard(0) over dp = relu(%y.moved)
}}
"""
STARTUP = f"program s {{ {GROUPS} }}"


def parse(text):
    return fx.Program.parse_from_string(text)


def proved(text):
    """The proof of the program for all ranks; VerifyError if it fails."""
    return verify_common(ProgramPair(parse(SOURCE), parse("program s { }")), ProgramPair(parse(text), parse(STARTUP)), 4)


def test_transfers_are_proved_and_their_messages_follow():
    special = Specializer(parse(COMMON))
    assert proved(COMMON).ranks == 4 and special.is_common and special.exchanges == (6, 6)
    mains = [special.rank_program(r) for r in range(4)]
    for r, mine in enumerate(mains):
        check_rank_program(special.program, mine, r, special.recipe)
    one = ProgramPair(parse(SOURCE), parse("program s { }"))
    startups = [Specializer(parse(STARTUP)).rank_program(r) for r in range(4)]
    assert verify_ranks(one, mains, startups).messages == 6


@pytest.mark.parametrize("old, new, reason", [
    ('transfer(%h) {batch="down", group="pp", root=0, to=1}', 'transfer(%h) {batch="down", group="pp", root=1, to=0}', "at"),
    ('transfer(%h) {batch="down", group="pp", root=0, to=1}', 'transfer(%h) {batch="down", group="pp", root=0, to=2}', "at"),
    ('transfer(%h) {batch="down"', 'transfer(%g) {batch="down"', "does not hold one device's value"),
    ("= tanh(%h.moved)", "= tanh(%g.moved)", "does not hold one device's value"),
    ("= tanh(%h.moved)", "= tanh(%h)", "at"),
    ('transfer(%y) {batch="up", group="pp"', 'transfer(%y) {batch="up", group="dp"', "at"),
    ("%h.moved: f32[-1,4] at(1) over pp shard(0) over dp =", "%h.moved: f32[-1,4] at(1) over pp =", "at"),
    ("%h.moved: f32[-1,4] at(1) over pp shard(0) over dp =", "%h.moved: f32[-1,4] shard(0) over dp =", "the op makes"),
])  # fmt: skip
def test_a_wrong_transfer_is_refused(old, new, reason):
    assert COMMON.count(old) == 1
    with pytest.raises(fx.VerifyError, match=reason):
        proved(COMMON.replace(old, new))


def test_a_transfer_in_a_sub_block_is_left_to_the_proof_of_all_ranks():
    program = parse(COMMON)
    block = program.create_block()
    block.oplist.append(next(op for op in program.global_block().oplist if op.type == "transfer"))
    assert not Specializer(program).is_common


@pytest.mark.parametrize("changed", [
    # a batch that sends what it receives: its sends are posted first, with the old value
    COMMON.replace('transfer(%g) {batch="down", group="pp", root=0, to=1}', 'transfer(%h.moved) {batch="down", group="pp", root=1, to=0}')
    .replace("%g.moved: f32[-1,4] at(1)", "%g.moved: f32[-1,4] at(0)"),
    COMMON.replace("root=1, to=0", "root=1, to=5"),
    COMMON.replace("%h.moved: f32[-1,4] at(1) over pp shard(0) over dp", "%h.moved: f32[-1,4] at(0) over pp shard(0) over dp"),
    COMMON.replace("%h.moved: f32[-1,4] at(1) over pp shard(0) over dp", "%h.moved: f32[-1,4] local"),
])  # fmt: skip
def test_messages_do_not_follow_from_such_transfers(changed):
    assert changed != COMMON and not Specializer(parse(changed)).is_common


@pytest.mark.parametrize("rank, old, new", [
    (0, 'send(%h) {batch="down", group="pp", peer=2}', 'send(%g) {batch="down", group="pp", peer=2}'),  # another value
    (0, 'send(%h) {batch="down", group="pp", peer=2}', 'send(%h) {batch="down", group="pp", peer=3}'),  # another rank
    (0, 'send(%h) {batch="down", group="pp", peer=2}', 'send(%h) {batch="down", group="dp", peer=2}'),  # another group
    (0, 'send(%h) {batch="down"', 'send(%h) {batch="other"'),  # does not start with its neighbour
    (0, '  send(%h) {batch="down", group="pp", peer=2}\n', ""),  # a message is missing
    (0, '  send(%h) {batch="down", group="pp", peer=2}\n', '  send(%h) {batch="down", group="pp", peer=2}\n' * 2),  # or sent twice
    (2, '%h.moved: f32[-1,4] at(1) over pp shard(0) over dp = recv() {batch="down"', None),  # the first of two is received last
    (2, 'like="x", open=[0, 1], peer=0, shape=[-1, 4]}', 'like="x", open=[0, 2], peer=0, shape=[-1, 4]}'),  # twice the rows
    (2, 'like="x", open=[0, 1], peer=0, shape=[-1, 4]}', 'like="x", open=[1, 1], peer=0, shape=[-1, 4]}'),  # as many rows as columns
    (2, 'like="x", open=[0, 1], peer=0, shape=[-1, 4]}', 'like="h", open=[0, 1], peer=0, shape=[-1, 4]}'),  # not a feed
    (2, 'like="x", open=[0, 1], peer=0, shape=[-1, 4]}', 'like="x", open=[0, 1], peer=0, shape=[-1, 5]}'),  # another shape
    (2, "= tanh(%h.moved)", "= tanh(%g.moved)"),
    (1, 'peer=3, shape=[-1, 4]}', 'peer=2, shape=[-1, 4]}'),
])  # fmt: skip
def test_a_rank_with_another_message_does_not_follow(rank, old, new):
    special = Specializer(parse(COMMON))
    text = str(special.rank_program(rank))
    assert old in text
    if new is None:
        lines = text.splitlines()
        k = next(k for k, line in enumerate(lines) if old in line)
        lines[k], lines[k + 1] = lines[k + 1], lines[k]
        changed = "\n".join(lines)
    else:
        changed = text.replace(old, new, 1)
    check_rank_program(special.program, parse(text), rank, special.recipe)
    with pytest.raises(Refusal):
        check_rank_program(special.program, parse(changed), rank, special.recipe)


def test_a_value_that_a_batch_receives_is_not_sent_by_the_same_batch():
    """On stage 1 nothing is between the last recv and the send of what it brought, so equal labels would start them together."""
    text = COMMON.replace("= transfer(%y)", "= transfer(%g.moved)").replace("%y.moved", "%g.back")
    special = Specializer(parse(text))
    mine = str(special.rank_program(2))
    assert special.is_common
    changed = parse(text.replace('batch="up"', 'batch="down"'))
    moved = mine.replace("  %y: f32[-1,4] at(1) over pp shard(0) over dp = tanh(%h.moved)\n", "").replace('batch="up"', 'batch="down"')
    with pytest.raises(Refusal):
        check_rank_program(changed, parse(moved), 2, special.recipe)


@pytest.mark.parametrize("ranks", [4, 64, 512])
def test_replicas_of_a_pipeline_are_proved_without_their_programs(ranks):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        with fx.device_guard("stage:0"):
            h = fx.layers.fc(fx.data("x", [-1, 4], "float32"), 6, act="relu")
        with fx.device_guard("stage:1"):
            loss = fx.layers.mean(fx.layers.fc(h, 3))
        fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
    t = fx.DistributeTranspiler("pipeline").transpile(program=main, startup_program=startup, trainers=fx.Mesh(pp=2, dp=ranks // 2))
    report = t.verify()
    assert not t._ranks and t.get_trainer_program(ranks - 1).ops and t.verify() is report
    if ranks == 4:
        assert str(t.verify(every_rank=True)) == str(report)


def test_transfers_at_other_roots_are_counted_there():
    """Two groups of stages, of which the value is at the first of each pair over tp alone: one message, not two."""
    groups = "group pp = [0, 2] [1, 3]\n  group tp = [0, 1] [2, 3]"
    text = f"""
program two {{
  {groups}
  data %x: f32[4] at(0) over pp at(0) over tp
forward:
  %y: f32[4] at(0) over pp at(0) over tp = relu(%x)
dist:
  %y.moved: f32[4] at(1) over pp at(0) over tp = transfer(%y) {{group="pp", root=0, to=1}}
}}
"""
    special = Specializer(parse(text))
    source = ProgramPair(parse("program two { data %x: f32[4]\nforward:\n  %y: f32[4] = relu(%x)\n}"), parse("program s { }"))
    startup = parse(f"program s {{ {groups} }}")
    common = verify_common(source, ProgramPair(special.program, startup), 4)
    mains = [special.rank_program(r) for r in range(4)]
    for r, mine in enumerate(mains):
        check_rank_program(special.program, mine, r, special.recipe)
    each = verify_ranks(source, mains, [Specializer(startup).rank_program(r) for r in range(4)])
    assert special.is_common and special.exchanges == (1, 1) == (common.collectives, each.messages)
    assert common.operators == each.operators == 3
