"""Programs written by hand, as the strategies write them: for one device, and for the ranks."""

from fluidx.ir import parse_pair
from fluidx.verify import verify_ranks

MODEL = """program main {
  data %x: f32[-1,4]
  param %w: f32[4,3]
  var %m: f32[4,3] persistable
  var %lr: f32[1] persistable
startup:
  %w = uniform_random() {shape=[4,3], seed=3}
  %m = fill_constant() {shape=[4,3], value=0.0}
  %lr = fill_constant() {shape=[1], value=0.1}
forward:
  %y: f32[-1,3] = matmul(%x, %w)
  %h: f32[-1,3] = tanh(%y)
loss:
  %loss: f32[1] = mean(%h)
backward:
  %loss@GRAD: f32[1] = fill_constant() {shape=[1], value=1.0}
  %h@GRAD: f32[-1,3] = reduce_mean_grad(%h, %loss@GRAD)
  %y@GRAD: f32[-1,3] = tanh_grad(%h, %h@GRAD)
  %w@GRAD: f32[4,3] = matmul(%x, %y@GRAD) {transpose_x=true} for %w, %w@GRAD
optimize:
  %w, %m = momentum(%w, %w@GRAD, %m, %lr) {mu=0.9}
}"""

_HEAD = """program main {{
  {groups}
  data %x: f32[-1,4] shard(0) over dp
  param %w: f32[4,3]
  var %m: f32[4,3]{m} persistable
  var %lr: f32[1] persistable
startup:
  nccl_init() {{group="dp"}}
  %w = uniform_random() {{shape=[4,3], seed=3}}
  %w = broadcast(%w) {{group="dp", root=0}}
{init}
  %lr = fill_constant() {{shape=[1], value=0.1}}
forward:
  %y: f32[-1,3] shard(0) over dp = matmul(%x, %w)
  %h: f32[-1,3] shard(0) over dp = tanh(%y)
loss:
  %loss: f32[1] partial(sum) over dp = mean(%h)
backward:
  %loss@GRAD: f32[1] = fill_constant() {{shape=[1], value=1.0}}
  %h@GRAD: f32[-1,3] shard(0) over dp = reduce_mean_grad(%h, %loss@GRAD)
  %y@GRAD: f32[-1,3] shard(0) over dp = tanh_grad(%h, %h@GRAD)
  %w@GRAD: f32[4,3] partial(sum) over dp = matmul(%x, %y@GRAD) {{transpose_x=true}} for %w, %w@GRAD
"""
_INIT = "  %m = fill_constant() {shape=[4,3], value=0.0}"


def ranks_of(world, body, groups=None, m="", init=_INIT):
    """The texts of all ranks; body and init may be functions of the rank."""
    groups = groups or f"group dp = {list(range(world))}"
    out = []
    for r in range(world):
        told = [f(r) if callable(f) else f for f in (body, init)]
        out.append(_HEAD.format(groups=groups, m=m, init=told[1]) + told[0] + "}")
    return out


UPDATE = """optimize:
  %w, %m = momentum(%w, %w@GRAD.sum, %m, %lr) {mu=0.9}
"""
DATA_PARALLEL = ranks_of(2, 'dist:\n  %w@GRAD.sum: f32[4,3] = all_reduce(%w@GRAD) {group="dp", op="sum"}\n' + UPDATE)


def _reduce_broadcast(r):
    update = "  %w.new: f32[4,3] at(1) over dp, %m = momentum(%w, %w@GRAD.sum, %m, %lr) {mu=0.9}\n" if r == 1 else ""
    declared = "" if r == 1 else "  var %w.new: f32[4,3] at(1) over dp\n"
    return f"""{declared}dist:
  %w@GRAD.sum: f32[4,3] at(1) over dp = reduce(%w@GRAD) {{group="dp", op="sum", root=1}}
optimize:
{update}dist:
  %w = broadcast(%w.new) {{group="dp", root=1}}
"""


REDUCE_BROADCAST = ranks_of(2, _reduce_broadcast, m=" at(1) over dp", init=lambda r: _INIT if r == 1 else "")

_CUT = 'group="dp", axis=0'
ZERO1 = ranks_of(
    2,
    f"""dist:
  %w@GRAD.sum: f32[4,3] shard(0) over dp = reduce_scatter(%w@GRAD) {{{_CUT}, op="sum"}}
  %w.part: f32[4,3] shard(0) over dp = part(%w) {{{_CUT}}}
optimize:
  %w.new: f32[4,3] shard(0) over dp, %m = momentum(%w.part, %w@GRAD.sum, %m, %lr) {{mu=0.9}}
dist:
  %w = all_gather(%w.new) {{{_CUT}}}
""",
    m=" shard(0) over dp",
)

RING_BOUNDS = (0, 4, 8, 12)


def _ring(r):
    """Three ranks: piece k starts at rank k + 1 and is finished on rank k; then every rank hands its piece on, twice."""
    n, b = 3, RING_BOUNDS
    nxt, prv = (r + 1) % n, (r - 1) % n
    lines = ["dist:"]
    for k in range(n):
        lines.append(f"  %g.c{k}: f32[{b[k + 1] - b[k]}] local = chunk(%w@GRAD) {{start={b[k]}, stop={b[k + 1]}}}")
    have = f"%g.c{prv}"
    for hop in range(n - 1):
        k = (r - 2 - hop) % n
        size = b[k + 1] - b[k]
        lines.append(f'  send({have}) {{peer={nxt}, group="dp", batch="h{hop}"}}')
        lines.append(f'  %g.in{hop}: f32[{size}] local = recv() {{peer={prv}, shape=[{size}], group="dp", batch="h{hop}"}}')
        lines.append(f"  %g.s{hop}: f32[{size}] local = sum([%g.in{hop}, %g.c{k}])")
        have = f"%g.s{hop}"
    lines.append(f"  %w@GRAD.sum: f32[4,3] pieces(0, 4, 8, 12) over dp = assign({have})")
    lines += [
        "optimize:",
        '  %w.part: f32[4,3] pieces(0, 4, 8, 12) over dp = part(%w) {group="dp", bounds=[0, 4, 8, 12]}',
        "  %w.new: f32[4,3] pieces(0, 4, 8, 12) over dp, %m = momentum(%w.part, %w@GRAD.sum, %m, %lr) {mu=0.9}",
        "dist:",
    ]
    have, parts = "%w.new", {r: "%w.own"}
    lines.append("  %w.own: f32[4] local = assign(%w.new)")
    for hop in range(n - 1):
        k = (r - 1 - hop) % n
        lines.append(f'  send({have}) {{peer={nxt}, group="dp", batch="b{hop}"}}')
        lines.append(f'  %w.in{hop}: f32[4] local = recv() {{peer={prv}, shape=[4], group="dp", batch="b{hop}"}}')
        have = parts[k] = f"%w.in{hop}"
    lines.append(f"  %w.flat: f32[12] = concat([{', '.join(parts[k] for k in range(n))}])")
    lines.append("  %w = reshape(%w.flat) {shape=[4,3]}")
    return "\n".join(lines) + "\n"


RING = ranks_of(3, _ring, m=" pieces(0, 4, 8, 12) over dp")


def pair(text):
    return parse_pair(text)


def prove(source, texts):
    """Verify texts of ranks against the text for one device."""
    pairs = [parse_pair(t) for t in texts]
    return verify_ranks(parse_pair(source), [p.main for p in pairs], [p.startup for p in pairs], label="by hand")


# -- branches and loops ------------------------------------------------------------------------------------------------------------

_BRANCHES = """program main {{
  {groups}
  data %x: f32[-1,4]{cut}
  data %flag: bool[1]
  var %w: f32[4] persistable
startup:
  %w = fill_constant() {{shape=[4], value=1.0}}
forward:
  [%y: f32[-1,4]{cut}] = cond(%flag, [%x, %w]) {{true_block=block 1, false_block=block 2, true_out=["a"], false_out=["b"]}}
  %z: f32[-1,4]{cut} = tanh(%y)
block 1 in 0 {{
  %c: f32[-1,4]{cut} = elementwise_mul(%x, %w)
  [%a: f32[-1,4]{cut}] = cond(%flag, [%c, %x]) {{true_block=block 3, false_block=block 4, true_out=["d"], false_out=["e"]}}
}}
block 2 in 0 {{
  %b: f32[-1,4]{cut} = relu(%x)
}}
block 3 in 1 {{
  %d: f32[-1,4]{cut} = tanh(%c)
}}
block 4 in 1 {{
  %e: f32[-1,4]{cut} = sigmoid(%x)
}}
}}"""
BRANCHES = _BRANCHES.format(groups="", cut="")
BRANCHES_CUT = [_BRANCHES.format(groups="group dp = [0, 1]", cut=" shard(0) over dp")] * 2

_LOOP = """program main {{
  {groups}
  data %x: f32[-1,4]{cut}
startup:
forward:
  %i: i64[1] = fill_constant() {{shape=[1], dtype="int64", value=0}}
  %n: i64[1] = fill_constant() {{shape=[1], dtype="int64", value=3}}
  %go: bool[1] = less_than(%i, %n)
  %h: f32[-1,4]{cut} = assign(%x)
  [%h, %i, %go] = while(%go, [%h, %i, %n]) {{sub_block=block 1}}
  %y: f32[-1,4]{cut} = relu(%h)
block 1 in 0 {{
  %t: f32[-1,4]{cut} = tanh(%h)
  %h = elementwise_add(%h, %t)
  %i = increment(%i)
  %go = less_than(%i, %n)
}}
}}"""
LOOP = _LOOP.format(groups="", cut="")
LOOP_CUT = [_LOOP.format(groups="group dp = [0, 1]", cut=" shard(0) over dp")] * 2


def edited(texts, old, new, ranks=None):
    """The texts with one change, on some ranks or on all."""
    out = []
    for r, t in enumerate(texts):
        if ranks is None or r in ranks:
            assert old in t, (old, t)
            t = t.replace(old, new)
        out.append(t)
    return out
