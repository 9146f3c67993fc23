"""Rank programs written by hand, read from their texts and run by those alone: bit for bit what one device computes."""

from itertools import pairwise

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import parse_pair

W = np.arange(12, dtype="float64").reshape(4, 3) % 5 - 2

# -- one device -------------------------------------------------------------------------------------------------------------

FORWARD = """
forward:
  %y: f64[-1,3] ROWS = matmul(%x, %w)
  %s: f64[-1,3] ROWS = square(%y)
loss:
  %loss: f64[1] TERM = reduce_sum(%s)
backward:
  %loss@GRAD: f64[1] = fill_constant() {dtype="float64", shape=[1], value=1.0}
  %s@GRAD: f64[-1,3] ROWS = reduce_sum_grad(%s, %loss@GRAD)
  %y@GRAD: f64[-1,3] ROWS = square_grad(%y, %s@GRAD)
  %w@GRAD: f64[4,3] TERM = matmul(%x, %y@GRAD) {transpose_x=true} for %w, %w@GRAD
"""
STARTUP = f"""
startup:
  %w = assign_value() {{dtype="float64", shape=[4, 3], values={W.reshape(-1).tolist()}}}
  %v = fill_constant() {{dtype="float64", shape=[4, 3]}}
  %lr = fill_constant() {{dtype="float64", shape=[1], value=0.5}}
"""
ONE = f"""
program main {{
  data %x: f64[-1,4]
  param %w: f64[4,3]
  var %v: f64[4,3] persistable
  var %lr: f64[1] persistable
{STARTUP}
{FORWARD.replace("ROWS", "").replace("TERM", "")}
optimize:
  %w, %v = momentum(%w, %w@GRAD, %v, %lr) {{mu=0.5}}
}}
"""


def feed(rows, seed=0):
    return {"x": np.random.default_rng(seed).integers(-3, 4, (rows, 4)).astype("float64")}


def one_device(feeds, fetch, text=ONE, state=("w", "v")):
    pair, exe, scope = parse_pair(text), fx.Executor(), fx.Scope()
    exe.run(pair.startup, scope=scope)
    values = [exe.run(pair.main, feed=f, fetch_list=fetch, scope=scope) for f in feeds]
    return values, {n: scope.get(n) for n in state}


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


# -- many ranks, as text ------------------------------------------------------------------------------------------------------


def program(rank, ranks, optimize, v="", startup=STARTUP, more="", head=""):
    """The text of one rank's programs; `v` is where the velocity lies."""
    forward = FORWARD.replace("ROWS", "shard(0) over dp").replace("TERM", "partial(sum) over dp")
    return f"""
program main {{
  rank {rank}
  strategy "by_hand"
  group dp = {list(range(ranks))}
  data %x: f64[-1,4] shard(0) over dp
  param %w: f64[4,3]
  var %v: f64[4,3] {v} persistable
  var %lr: f64[1] persistable
  {head}
{startup.replace("startup:", "startup:" + chr(10) + '  nccl_init() {group="dp"}')}
{forward}
{optimize}
{more}
}}
"""


def data_parallel(n):
    return [
        program(r, n, """
dist:
  %g: f64[4,3] = all_reduce(%w@GRAD) {group="dp", op="sum"}
optimize:
  %w, %v = momentum(%w, %g, %v, %lr) {mu=0.5}
""")
        for r in range(n)
    ]  # fmt: skip


def reduce_broadcast(n, root=1):
    """The update on one rank; the others only hand their terms in and get the result."""
    update = """
optimize:
  %w.new: f64[4,3] at(ROOT) over dp, %v = momentum(%w, %g, %v, %lr) {mu=0.5}
"""
    others = "  var %w.new: f64[4,3] at(ROOT) over dp"
    out = []
    for r in range(n):
        text = f"""
dist:
  %g: f64[4,3] at(ROOT) over dp = reduce(%w@GRAD) {{group="dp", op="sum", root=ROOT}}
{update if r == root else others}
dist:
  %w = broadcast(%w.new) {{group="dp", root=ROOT}}
"""
        startup = STARTUP if r == root else "\n".join(line for line in STARTUP.splitlines() if "%v" not in line)
        out.append(program(r, n, text.replace("ROOT", str(root)), f"at({root}) over dp", startup))
    return out


def zero1(n):
    """State and update cut by rows: 4 of them among n ranks."""
    return [
        program(r, n, """
dist:
  %g: f64[4,3] shard(0) over dp = reduce_scatter(%w@GRAD) {group="dp", op="sum"}
optimize:
  %w.part: f64[4,3] shard(0) over dp = part(%w) {group="dp"}
  %w.new: f64[4,3] shard(0) over dp, %v = momentum(%w.part, %g, %v, %lr) {mu=0.5}
dist:
  %w = all_gather(%w.new) {group="dp"}
""", "shard(0) over dp")
        for r in range(n)
    ]  # fmt: skip


def columns(n):
    """The same by columns, 3 of them, so that slices are strided and with 5 ranks some have none."""
    return [text.replace("shard(0) over dp = reduce_scatter(%w@GRAD) {", "shard(1) over dp = reduce_scatter(%w@GRAD) {axis=1, ")
            .replace("f64[4,3] shard(0)", "f64[4,3] shard(1)")
            .replace('part(%w) {', 'part(%w) {axis=1, ').replace('all_gather(%w.new) {', 'all_gather(%w.new) {axis=1, ')
            for text in zero1(n)]  # fmt: skip


def pieces(n):
    """State and update cut into flat ranges, by collectives."""
    cuts = [12 * k // n // 2 for k in range(n)] + [12]
    return [
        program(r, n, f"""
dist:
  %g: f64[4,3] PIECES = reduce_scatter(%w@GRAD) {{bounds={cuts}, group="dp", op="sum"}}
optimize:
  %w.part: f64[4,3] PIECES = part(%w) {{bounds={cuts}, group="dp"}}
  %w.new: f64[4,3] PIECES, %v = momentum(%w.part, %g, %v, %lr) {{mu=0.5}}
dist:
  %w = all_gather(%w.new) {{bounds={cuts}, group="dp"}}
""", "PIECES").replace("PIECES", f"pieces({', '.join(map(str, cuts))}) over dp")
        for r in range(n)
    ]  # fmt: skip


def ring(n, cuts):
    """Pieces again, written out as messages: sums go around until they are at their root, results go around until all have them."""
    here = f"pieces({', '.join(map(str, cuts))}) over dp"
    size = [b - a for a, b in pairwise(cuts)]
    texts = []
    for r in range(n):
        ahead, came_from = (r + 1) % n, f'dtype="float64", group="dp", peer={(r - 1) % n}'
        lines = ["dist:"]
        # the sum for root k starts at k + 1 and comes around to k; nothing is sent of a piece without elements
        for hop in range(n - 1):
            out, came = (r - 1 - hop) % n, (r - 2 - hop) % n
            term, passed = f"%term{out}: f64[{size[out]}] local", f"%sum{out}" if hop else f"%term{out}"
            if size[out] and not hop:
                lines.append(f"  {term} = chunk(%w@GRAD) {{start={cuts[out]}, stop={cuts[out + 1]}}}")
            if size[out]:
                lines.append(f'  send({passed}) {{peer={ahead}, group="dp", batch="g{hop}"}}')
            if size[came]:
                of = f"f64[{size[came]}] local"
                lines += [
                    f'  %in{came}: {of} = recv() {{{came_from}, batch="g{hop}", shape=[{size[came]}]}}',
                    f"  %term{came}: {of} = chunk(%w@GRAD) {{start={cuts[came]}, stop={cuts[came + 1]}}}",
                    f"  %sum{came}: {of} = sum([%in{came}, %term{came}])",
                ]
        lines += [
            f"  %g: f64[4,3] {here} = assign(%sum{r})" if size[r] else f"  var %g: f64[4,3] {here}",
            "optimize:",
            f'  %w.part: f64[4,3] {here} = part(%w) {{bounds={cuts}, group="dp"}}',
            f"  %w.new: f64[4,3] {here}, %v = momentum(%w.part, %g, %v, %lr) {{mu=0.5}}",
            "dist:",
        ]
        for hop in range(n - 1):
            out, came = (r - hop) % n, (r - 1 - hop) % n
            if size[out]:
                lines.append(f'  send({f"%new{out}" if hop else "%w.new"}) {{peer={ahead}, group="dp", batch="w{hop}"}}')
            if size[came]:
                lines.append(f'  %new{came}: f64[{size[came]}] local = recv() {{{came_from}, batch="w{hop}", shape=[{size[came]}]}}')
        parts = ", ".join("%w.new" if k == r else f"%new{k}" for k in range(n) if size[k])
        lines += [f"  %flat: f64[12] local = concat([{parts}])", "  %w = reshape(%flat) {shape=[4, 3]}"]
        texts.append(program(r, n, "\n".join(lines), here))
    return texts


def on_ranks(texts, feeds, fetch, state=("w", "v"), uneven="weight", **options):
    pairs = [parse_pair(t) for t in texts]
    for p in pairs:
        assert parse_pair(str(p)) == p
    with fx.ParallelExecutor(pairs, places=fx.cpu_places(len(pairs)), uneven=uneven, timeout=10, **options) as exe:
        exe.run_startup()
        values = [exe.run(feed=f, fetch_list=fetch) for f in feeds]
        return values, {n: exe.state(n) for n in state}


STRATEGIES = {
    "data_parallel on 2": lambda: data_parallel(2),
    "data_parallel on 3": lambda: data_parallel(3),
    "reduce_broadcast on 2": lambda: reduce_broadcast(2),
    "reduce_broadcast on 3": lambda: reduce_broadcast(3),
    "zero1 on 2": lambda: zero1(2),
    "zero1 on 3": lambda: zero1(3),
    "columns on 2": lambda: columns(2),
    "columns on 5": lambda: columns(5),
    "pieces on 3": lambda: pieces(3),
    "ring on 2": lambda: ring(2, [0, 8, 12]),
    "ring on 3": lambda: ring(3, [0, 5, 6, 12]),
    "ring on 3, one without a piece": lambda: ring(3, [0, 5, 5, 12]),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_steps_give_one_devices_values_and_state(strategy):
    feeds = [feed(6, 0), feed(7, 1), feed(1, 2)]  # even, uneven, fewer rows than ranks
    fetch = ["loss", "y", "s@GRAD", "y@GRAD", "w@GRAD", "w"]
    wanted, state = one_device(feeds, fetch)
    found, held = on_ranks(STRATEGIES[strategy](), feeds, fetch)
    same(found, wanted)
    same([held.values()], [state.values()])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_computed_on_the_way_can_be_fetched(strategy):
    texts = STRATEGIES[strategy]()
    wanted, state = one_device([feed(5)], ["w@GRAD", "w", "v"])
    declared = parse_pair(texts[0]).main.global_block().descs
    (found,), _ = on_ranks(texts, [feed(5)], ["g", "w", "v", *(n for n in ("w.new",) if n in declared)])
    same([found[:3]], wanted)
    same([found[3:]], [[state["w"]] * len(found[3:])])


# -- a mesh -------------------------------------------------------------------------------------------------------------------


def mesh(dp, tp):
    """Rows of x over dp, columns of w over tp."""
    texts = []
    for r in range(dp * tp):
        lines = FORWARD.replace("f64[-1,3] ROWS", "f64[-1,3] shard(0) over dp shard(1) over tp")
        lines = lines.replace("f64[1] TERM", "f64[1] partial(sum) over dp partial(sum) over tp")
        lines = lines.replace("f64[4,3] TERM", "f64[4,3] shard(1) over tp partial(sum) over dp")
        across = [[k + tp * j for j in range(dp)] for k in range(tp)]
        along = [[tp * j + k for k in range(tp)] for j in range(dp)]
        texts.append(f"""
program main {{
  rank {r}
  group dp = {" ".join(map(str, across))}
  group tp = {" ".join(map(str, along))}
  data %x: f64[-1,4] shard(0) over dp
  param %w: f64[4,3] shard(1) over tp
  var %v: f64[4,3] shard(1) over tp persistable
  var %lr: f64[1] persistable
startup:
  nccl_init() {{group="dp"}}
  nccl_init() {{group="tp"}}
  %w.all: f64[4,3] = assign_value() {{dtype="float64", shape=[4, 3], values={W.reshape(-1).tolist()}}}
  %w = part(%w.all) {{axis=1, group="tp"}}
  %v = fill_constant() {{dtype="float64", shape=[4, 3]}}
  %lr = fill_constant() {{dtype="float64", shape=[1], value=0.5}}
{lines}
dist:
  %g: f64[4,3] shard(1) over tp = all_reduce(%w@GRAD) {{group="dp", op="sum"}}
optimize:
  %w, %v = momentum(%w, %g, %v, %lr) {{mu=0.5}}
}}
""")
    return texts


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 3), (3, 1), (3, 2), (1, 1)])
def test_a_mesh_gives_one_devices_values_and_state(dp, tp):
    feeds = [feed(6, 0), feed(7, 1), feed(1, 2)]
    fetch = ["loss", "y", "y@GRAD", "w@GRAD", "w", "v"]
    wanted, state = one_device(feeds, fetch)
    found, held = on_ranks(mesh(dp, tp), feeds, fetch)
    same(found, wanted)
    same([held.values()], [state.values()])


def test_a_feed_is_cut_over_dp_and_whole_over_tp():
    with fx.ParallelExecutor([parse_pair(t) for t in mesh(2, 2)], timeout=10) as exe:
        exe.run_startup()
        x = feed(5)["x"]
        (parts, y) = exe.run(feed={"x": x}, fetch_list=["x", "y"], return_merged=False)
    assert [p.shape for p in parts] == [(2, 4), (2, 4), (3, 4), (3, 4)]
    assert np.array_equal(np.concatenate(parts[::2]), x) and np.array_equal(np.concatenate(parts[1::2]), x)
    assert [a.shape for a in y] == [(2, 1), (2, 2), (3, 1), (3, 2)]


# -- from several transpiles ------------------------------------------------------------------------------------------------


def texts_of(strategy="data_parallel", drop=True):
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x = fx.data("x", [-1, 4])
        hidden = fx.layers.dropout(x, 0.5, seed=7) if drop else x
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(hidden, 2, bias_attr=False)))
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=main, startup_program=startup, trainers=3)
    return [str(fx.ProgramPair(t.get_trainer_program(r), t.get_startup_program(r))) for r in range(3)]


def test_texts_of_one_transpile_are_the_same_wherever_it_is_made():
    assert texts_of() == texts_of()


@pytest.mark.parametrize(
    "other, difference",
    [
        ({"drop": False}, r"\n  ranks 0, 2: .* = dropout\(%x\) .*\n  rank 1: %fc_0.tmp_0 = mul\(%x, %fc_0.w_0\)"),
        ({"strategy": "zero1"}, r"\n  ranks 0, 2: strategy data_parallel\(\)\n  rank 1: strategy zero1\(\)\n  ranks 0, 2: .* = "),
    ],
)
def test_programs_of_other_transpiles_are_refused_with_what_differs(other, difference):
    texts = texts_of()
    texts[1] = texts_of(**other)[1]
    with pytest.raises(fx.ExecutionError, match=f"the ranks' programs are not from one transpile; the first difference is{difference}"):
        fx.ParallelExecutor([parse_pair(text) for text in texts])
