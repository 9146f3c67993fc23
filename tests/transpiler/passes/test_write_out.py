"""What is written out: fused operators into their parts, redistributes into communication, groups and broadcasts into startup."""

import pytest

import fluidx as fx
from fluidx.ir.pass_base import Job
from fluidx.testing import check_pass
from fluidx.testing.models import classifier
from fluidx.transpiler.passes.broadcast import BroadcastStartup
from fluidx.transpiler.passes.groups import InitGroups
from fluidx.transpiler.passes.lower import Lower
from fluidx.transpiler.passes.place import Place

NORM = """
  group dp = RANKS
  data %x: f32[-1,3]
  param %scale: f32[3]; param %bias: f32[3]; var %mean: f32[3] persistable; var %var: f32[3] persistable
"""
CUT = "  data %x: f32[-1,3] shard(0) over dp"
FUSED = """
  %y: f32[-1,3], %mean, %var, %m: f32[3], %v: f32[3] = batch_norm(%x, %scale, %bias, %mean, %var) {ATTRS}
"""


def test_a_training_batch_norm_over_a_cut_batch_is_sums_and_what_follows_from_them():
    check_pass(Place(), given=NORM.replace("RANKS", "[0, 1]"), before=FUSED.replace(" {ATTRS}", ""), after=CUT + """
  %y.mean: f32[3] partial(sum) over dp = bn_mean(%x)
dist:
  %y.mean.sum: f32[3] = redistribute(%y.mean) {reason="bn_variance: cut n"}
forward:
  %y.variance: f32[3] partial(sum) over dp = bn_variance(%x, %y.mean.sum)
dist:
  %y.variance.sum: f32[3] = redistribute(%y.variance) {reason="bn_apply: cut n"}
forward:
  %y: f32[-1,3] shard(0) over dp, %mean, %var, %m: f32[3], %v: f32[3] = bn_apply(OPERANDS)
""".replace("OPERANDS", "%x, %scale, %bias, %mean, %var, %y.mean.sum, %y.variance.sum"))  # fmt: skip


@pytest.mark.parametrize("ranks, attrs", [("[0]", ""), ("[0, 1]", "{is_test=true}"), ("[0, 1]", "{use_global_stats=true}")])
def test_on_one_rank_or_with_given_statistics_it_stays_in_one_piece(ranks, attrs):
    before = FUSED.replace(" {ATTRS}", f" {attrs}")
    after = before if ranks == "[0]" else CUT + before.replace("%y: f32[-1,3]", "%y: f32[-1,3] shard(0) over dp")
    check_pass(Place(), given=NORM.replace("RANKS", ranks), before=before, after=after)


GIVEN = """
  group dp = [0, 1]
  var %g: f32[4,3] partial(sum) over dp
  var %w: f32[4,3] at(1) over dp
  var %p: f32[4,3] pieces(0, 5, 12) over dp
  var %s: f32[4,3] shard(0) over dp
"""
MOVES = """
dist:
  %g.sum: f32[4,3] at(0) over dp = redistribute(%g) {reason="update"}
  %g.rows: f32[4,3] shard(0) over dp = redistribute(%g) {reason="update"}
  %w.full: f32[4,3] = redistribute(%w) {reason="rest"}
  %p.full: f32[4,3] = redistribute(%p) {reason="rest"}
  %s.moved: f32[4,3] shard(1) over dp = redistribute(%s) {reason="use"}
  %s.at: f32[4,3] at(1) over dp = redistribute(%s) {reason="use"}
  %w.rows: f32[4,3] shard(0) over dp = redistribute(%w) {reason="use"}
  %p.at: f32[4,3] at(0) over dp = redistribute(%p) {reason="use"}
  %copy: f32[4,3] shard(0) over dp = redistribute(%s) {reason="none"}
"""


def test_collectives():
    check_pass(Lower(), given=GIVEN, before=MOVES, after="""
dist:
  %g.sum: f32[4,3] at(0) over dp = reduce(%g) {group="dp", op="sum", root=0}
  %g.rows: f32[4,3] shard(0) over dp = reduce_scatter(%g) {group="dp", op="sum"}
  %w.full: f32[4,3] = broadcast(%w) {group="dp", root=1}
  %p.full: f32[4,3] = all_gather(%p) {bounds=[0, 5, 12], group="dp"}
  %s.moved: f32[4,3] shard(1) over dp = all_to_all(%s) {axis=0, group="dp", to_axis=1}
  %s.at: f32[4,3] at(1) over dp = gather_parts(%s) {group="dp", root=1}
  %w.rows: f32[4,3] shard(0) over dp = scatter_parts(%w) {group="dp", root=1}
  %p.at: f32[4,3] at(0) over dp = gather_parts(%p) {bounds=[0, 5, 12], group="dp", root=0}
  %copy: f32[4,3] shard(0) over dp = assign(%s)
""")  # fmt: skip


def run(one, pair, cluster):
    job = Job(cluster, facts=set(one.requires))
    before = str(pair)
    result = one.run(pair, job)
    assert str(pair) == before
    return result


def test_communicators_are_made_at_the_head_of_startup():
    m = classifier(width=4)
    result = run(InitGroups(), fx.ProgramPair(m.main, m.startup), fx.Cluster(2, 2))
    heads = result.startup.ops[:4]
    assert [(op.type, op.attrs.get("group")) for op in heads[:3]] == [("nccl_init", g) for g in ("dp", "node", "rail")]
    assert heads[3].type != "nccl_init" and result.main.groups == result.startup.groups == fx.Cluster(2, 2).groups()


def test_every_persistable_that_all_ranks_hold_is_broadcast_once_behind_its_last_write():
    m = classifier(width=4)
    grouped = run(InitGroups(), fx.ProgramPair(m.main, m.startup), fx.Cluster(1, 3))
    startup = run(BroadcastStartup(), grouped, fx.Cluster(1, 3)).startup
    made = [n for op in m.startup.ops for n in op.output_arg_names]
    sent = [op for op in startup.ops if op.type == "broadcast"]
    assert sorted(op.input_arg_names[0] for op in sent) == sorted(made)
    for op in sent:
        assert op.input_arg_names == op.output_arg_names
        writers = [k for k, o in enumerate(startup.ops) if op.output_arg_names[0] in o.output_arg_names]
        assert startup.ops[writers[-1]] is op and len(writers) == 2
    assert len({op.attrs["root"] for op in sent}) == 3  # the owners are balanced
