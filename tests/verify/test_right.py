"""Right programs are proved, however they are written."""

import pytest

from tests.verify.programs import (
    BRANCHES,
    BRANCHES_CUT,
    DATA_PARALLEL,
    LOOP,
    LOOP_CUT,
    MODEL,
    REDUCE_BROADCAST,
    RING,
    UPDATE,
    ZERO1,
    edited,
    prove,
    ranks_of,
)

STRATEGIES = {"data_parallel": DATA_PARALLEL, "reduce_broadcast": REDUCE_BROADCAST, "zero1": ZERO1, "ring": RING}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_proved(name):
    report = prove(MODEL, STRATEGIES[name])
    assert (report.initial, report.parameters, report.states) == (3, 1, 2)
    assert "proved for by hand" in str(report)


def test_branches_and_loops_are_proved():
    assert prove(BRANCHES, BRANCHES_CUT).values == 5
    assert prove(LOOP, LOOP_CUT).values == 6


G = '{group="dp", op="sum"}'
REDUCED = "  %w@GRAD.sum: f32[4,3] = all_reduce(%w@GRAD) " + G + "\n"
# other ways to come from %w@GRAD to %w@GRAD.sum, on two ranks
WAYS = {
    "scaled before and after": f"""
  %half: f32[4,3] partial(sum) over dp = scale(%w@GRAD) {{scale=0.5}}
  %sum: f32[4,3] = all_reduce(%half) {G}
  %w@GRAD.sum: f32[4,3] = scale(%sum) {{scale=2.0}}""",
    "scaled by very small numbers and back": f"""
  %tiny: f32[4,3] partial(sum) over dp = scale(%w@GRAD) {{scale=1e-16}}
  %sum: f32[4,3] = all_reduce(%tiny) {G}
  %w@GRAD.sum: f32[4,3] = scale(%sum) {{scale=1e16}}""",
    "the mean, times the ranks": """
  %avg: f32[4,3] = all_reduce(%w@GRAD) {group="dp", op="avg"}
  %w@GRAD.sum: f32[4,3] = scale(%avg) {scale=2.0}""",
    "twice averaged": """
  %avg: f32[4,3] = all_reduce(%w@GRAD) {group="dp", op="avg"}
  %again: f32[4,3] = all_reduce(%avg) {group="dp", op="sum"}
  %w@GRAD.sum: f32[4,3] = all_reduce(%again) {group="dp", op="avg"}""".replace("%again", "%more", 1).replace(
        "all_reduce(%again)", "all_reduce(%more)"
    ),
    "divided by a constant": f"""
  %two: f32[1] = fill_constant() {{shape=[1], value=2.0}}
  %sum: f32[4,3] = all_reduce(%w@GRAD) {G}
  %twice: f32[4,3] = elementwise_add(%sum, %sum)
  %w@GRAD.sum: f32[4,3] = elementwise_div(%twice, %two)""",
    "in a bucket": f"""
  %bucket: f32[15] partial(sum) over dp = pack([%w@GRAD, %b@GRAD])
  %bucket.sum: f32[15] = all_reduce(%bucket) {G}
  [%w@GRAD.sum: f32[4,3], %b@GRAD.sum: f32[3]] = unpack(%bucket.sum) {{shapes=[[4,3],[3]]}}""",
    "in a bucket of each rank's own": f"""
  %bucket: f32[15] local = pack([%w@GRAD, %b@GRAD])
  %bucket.sum: f32[15] local = all_reduce(%bucket) {G}
  [%w@GRAD.sum: f32[4,3], %b@GRAD.sum: f32[3]] = unpack(%bucket.sum) {{shapes=[[4,3],[3]]}}""",
    "chunk by chunk, in one bucket": f"""
  %c0: f32[5] local = chunk(%w@GRAD) {{start=0, stop=5}}
  %c1: f32[7] local = chunk(%w@GRAD) {{start=5, stop=12}}
  %bucket: f32[12] local = pack([%c1, %c0])
  %sum: f32[12] local = all_reduce(%bucket) {G}
  [%s1: f32[7] local, %s0: f32[5] local] = unpack(%sum) {{shapes=[[7],[5]]}}
  %flat: f32[12] local = concat([%s0, %s1])
  %w@GRAD.sum: f32[4,3] = reshape(%flat) {{shape=[4,3]}}""",
    "reshaped around": f"""
  %flat: f32[12] partial(sum) over dp = reshape(%w@GRAD) {{shape=[12]}}
  %sum: f32[12] = all_reduce(%flat) {G}
  %w@GRAD.sum: f32[4,3] = reshape(%sum) {{shape=[4,3]}}""",
    "scattered and gathered": """
  %part: f32[4,3] shard(0) over dp = reduce_scatter(%w@GRAD) {group="dp", op="sum"}
  %w@GRAD.sum: f32[4,3] = all_gather(%part) {group="dp"}""",
    "scattered in uneven pieces": """
  %flat: f32[12] partial(sum) over dp = reshape(%w@GRAD) {shape=[12]}
  %part: f32[12] pieces(0, 7, 12) over dp = reduce_scatter(%flat) {bounds=[0,7,12], group="dp", op="sum"}
  %whole: f32[12] = all_gather(%part) {bounds=[0,7,12], group="dp"}
  %w@GRAD.sum: f32[4,3] = reshape(%whole) {shape=[4,3]}""",
    "all on one rank": """
  %part: f32[4,3] pieces(0, 12, 12) over dp = reduce_scatter(%w@GRAD) {bounds=[0,12,12], group="dp", op="sum"}
  %w@GRAD.sum: f32[4,3] = all_gather(%part) {bounds=[0,12,12], group="dp"}""",
    "reduced and broadcast": """
  %root: f32[4,3] at(0) over dp = reduce(%w@GRAD) {group="dp", op="sum", root=0}
  %w@GRAD.sum: f32[4,3] = broadcast(%root) {group="dp", root=0}""",
    "copied": f"""
  %copy: f32[4,3] partial(sum) over dp = assign(%w@GRAD)
  %sum: f32[4,3] = all_reduce(%copy) {G}
  %w@GRAD.sum: f32[4,3] = assign(%sum)""",
    "in place": f"""
  %g: f32[4,3] local = assign(%w@GRAD)
  %g = all_reduce(%g) {G}
  %w@GRAD.sum: f32[4,3] = assign(%g)""",
    "put together again from zeros": """
  %root: f32[4,3] at(0) over dp = reduce(%w@GRAD) {group="dp", op="sum", root=0}
  %term: f32[4,3] partial(sum) over dp = own_term(%root) {group="dp", root=0}
  %w@GRAD.sum: f32[4,3] = all_reduce(%term) {group="dp", op="sum"}""",
}


@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_the_whole_gradient(name):
    bias = """  %b@GRAD: f32[3] partial(sum) over dp = reduce_sum(%y@GRAD) {dim=[0]}
dist:"""
    prove(MODEL, ranks_of(2, bias + WAYS[name] + "\n" + UPDATE))


def _exchange(r):
    return f"""dist:
  send(%w@GRAD) {{peer={1 - r}, group="dp", batch="a"}}
  %other: f32[4,3] local = recv() {{peer={1 - r}, shape=[4,3], group="dp", batch="a"}}
  %w@GRAD.sum: f32[4,3] = sum([%other, %w@GRAD])
{UPDATE}"""


def test_halving_and_doubling_by_messages_is_proved():
    prove(MODEL, ranks_of(2, _exchange))
    first = {"send": "  send(%w@GRAD)", "recv": "  %other: f32[4,3] local = recv()"}

    def in_turn(r):
        a = f'  send(%w@GRAD) {{peer={1 - r}, group="dp"}}'
        b = f'  %other: f32[4,3] local = recv() {{peer={1 - r}, shape=[4,3], group="dp"}}'
        assert all(v in a + b for v in first.values())
        return (
            "dist:\n" + "\n".join((a, b) if r == 0 else (b, a)) + "\n  %w@GRAD.sum: f32[4,3] = elementwise_add(%w@GRAD, %other)\n" + UPDATE
        )

    prove(MODEL, ranks_of(2, in_turn))


def test_the_order_of_messages_may_differ_from_that_of_common_operators():
    """Rank 0 sends before an operator that rank 1 runs before it receives."""

    def body(r):
        send = f'  send(%w@GRAD) {{peer={1 - r}, group="dp", batch="a"}}\n'
        recv = f'  %other: f32[4,3] local = recv() {{peer={1 - r}, shape=[4,3], group="dp", batch="{"a" if r else "b"}"}}\n'
        common = "  %c: f32[1] = fill_constant() {shape=[1], value=3.0}\n"
        total = "  %w@GRAD.sum: f32[4,3] = sum([%other, %w@GRAD])\n" + UPDATE
        return "dist:\n" + (send + common + recv if r == 0 else common + send + recv) + total

    prove(MODEL, ranks_of(2, body))


def test_several_hosts():
    groups = "group dp = [0, 1, 2, 3]; group node = [0, 1] [2, 3]; group rail = [0, 2] [1, 3]"
    body = f"""dist:
  %n: f32[4,3] local = all_reduce(%w@GRAD) {{group="node", op="sum"}}
  %w@GRAD.sum: f32[4,3] = all_reduce(%n) {{group="rail", op="sum"}}
{UPDATE}"""
    prove(MODEL, ranks_of(4, body, groups=groups))


def test_several_hosts_scatter_gather():
    groups = "group dp = [0, 1, 2, 3]; group node = [0, 1] [2, 3]; group rail = [0, 2] [1, 3]"
    body = f"""dist:
  %n: f32[2,3] local = reduce_scatter(%w@GRAD) {{group="node", op="sum"}}
  %r: f32[2,3] local = all_reduce(%n) {{group="rail", op="sum"}}
  %w@GRAD.sum: f32[4,3] = all_gather(%r) {{group="node"}}
{UPDATE}"""
    prove(MODEL, ranks_of(4, body, groups=groups))


TENSOR_PARALLEL = """program main {
  group dp = [0, 1] [2, 3]; group tp = [0, 2] [1, 3]
  data %x: f32[-1,4] shard(0) over dp
  param %w: f32[4,3] shard(1) over tp
  param %v: f32[3,5] shard(0) over tp
  var %lr: f32[1] persistable
startup:
  nccl_init() {group="dp"}
  nccl_init() {group="tp"}
  %w = uniform_random() {shape=[4,3], seed=3}
  %v = uniform_random() {shape=[3,5], seed=4}
  %lr = fill_constant() {shape=[1], value=0.1}
forward:
  %y: f32[-1,3] shard(0) over dp shard(1) over tp = matmul(%x, %w)
  %h: f32[-1,3] shard(0) over dp shard(1) over tp = tanh(%y)
  %z: f32[-1,5] shard(0) over dp partial(sum) over tp = matmul(%h, %v)
  %z.sum: f32[-1,5] shard(0) over dp = all_reduce(%z) {group="tp", op="sum"}
loss:
  %loss: f32[1] partial(sum) over dp = mean(%z.sum)
backward:
  %loss@GRAD: f32[1] = fill_constant() {shape=[1], value=1.0}
  %z@GRAD: f32[-1,5] shard(0) over dp = reduce_mean_grad(%z.sum, %loss@GRAD)
  %v@GRAD: f32[3,5] partial(sum) over dp shard(0) over tp = matmul(%h, %z@GRAD) {transpose_x=true}
  %v@GRAD.sum: f32[3,5] shard(0) over tp = all_reduce(%v@GRAD) {group="dp", op="sum"}
optimize:
  %v = sgd(%v, %v@GRAD.sum, %lr)
}"""
ONE_DEVICE = """program main {
  data %x: f32[-1,4]
  param %w: f32[4,3]
  param %v: f32[3,5]
  var %lr: f32[1] persistable
startup:
  %w = uniform_random() {shape=[4,3], seed=3}
  %v = uniform_random() {shape=[3,5], seed=4}
  %lr = fill_constant() {shape=[1], value=0.1}
forward:
  %y: f32[-1,3] = matmul(%x, %w)
  %h: f32[-1,3] = tanh(%y)
  %z: f32[-1,5] = matmul(%h, %v)
loss:
  %loss: f32[1] = mean(%z)
backward:
  %loss@GRAD: f32[1] = fill_constant() {shape=[1], value=1.0}
  %z@GRAD: f32[-1,5] = reduce_mean_grad(%z, %loss@GRAD)
  %v@GRAD: f32[3,5] = matmul(%h, %z@GRAD) {transpose_x=true}
optimize:
  %v = sgd(%v, %v@GRAD, %lr)
}"""


def test_two_axes():
    prove(ONE_DEVICE, [TENSOR_PARALLEL] * 4)


@pytest.mark.parametrize(
    "groups", ["group dp = [0, 1] [2, 3]; group tp = [0, 1] [2, 3]", "group dp = [0, 1] [3, 2]; group tp = [0, 2] [1, 3]"]
)
def test_a_mesh_that_is_none_is_refused(groups):
    from fluidx import VerifyError

    texts = edited([TENSOR_PARALLEL] * 4, "group dp = [0, 1] [2, 3]; group tp = [0, 2] [1, 3]", groups)
    with pytest.raises(VerifyError):
        prove(ONE_DEVICE, texts)


def test_programs_that_say_the_same_in_other_words_are_proved_too():
    """Equal operators that are not the same objects, in another order of attributes, with another name of the program."""
    texts = [
        t.replace("program main", f"program of_rank_{r}\n".strip()).replace("{mu=0.9}", "{mu=0.9, use_nesterov=false}")
        for r, t in enumerate(ZERO1)
    ]
    prove(MODEL, texts)


def test_an_unused_operator_does_no_harm():
    prove(MODEL, edited(DATA_PARALLEL, REDUCED, REDUCED + '  barrier() {group="dp"}\n  %unused: f32[4,3] = relu(%w)\n', None))


_NORM = """program main {{
  {groups}
  data %x: f32[-1,5]{cut}
  var %s: f32[5] persistable
  var %b: f32[5] persistable
  var %mean: f32[5] persistable
  var %variance: f32[5] persistable
startup:
  %s = fill_constant() {{shape=[5], value=1.0}}
  %b = fill_constant() {{shape=[5], value=0.0}}
  %mean = fill_constant() {{shape=[5], value=0.0}}
  %variance = fill_constant() {{shape=[5], value=1.0}}
forward:
{body}
  %d: f32[-1,5]{cut}, %mask: u8[-1,5]{cut} = dropout(%y) {{dropout_prob=0.5, seed={seed}}}
}}"""
FUSED = _NORM.format(groups="", cut="", seed=7, body="  %y: f32[-1,5], %mean, %variance = batch_norm(%x, %s, %b, %mean, %variance)")
PARTS = """  %sum: f32[5] partial(sum) over dp = bn_mean(%x)
  %m: f32[5] = all_reduce(%sum) {group="dp", op="sum"}
  %v: f32[5] partial(sum) over dp = bn_variance(%x, %m)
  %v.sum: f32[5] = all_reduce(%v) {group="dp", op="sum"}
  %y: f32[-1,5] shard(0) over dp, %mean, %variance = bn_apply(%x, %s, %b, %mean, %variance, %m, %v.sum)"""


def cut_norm(body, seed=7):
    return [_NORM.format(groups="group dp = [0, 1]", cut=" shard(0) over dp", seed=seed, body=body)] * 2


def test_an_operator_and_what_it_expands_to_are_the_same():
    prove(FUSED, cut_norm(PARTS))


@pytest.mark.parametrize(
    "old, new",
    [
        ("seed=7", "seed=8"),
        ("bn_mean(%x)", "bn_mean(%y)"),
        (", %m, %v.sum)", ", %m, %m)"),
        ('all_reduce(%v) {group="dp", op="sum"}', "assign(%m)"),
    ],
)
def test_parts_that_are_others_are_refused(old, new):
    from fluidx import VerifyError

    with pytest.raises(VerifyError):
        prove(FUSED, edited(cut_norm(PARTS), old, new))
