"""ParallelExecutor: what is fed and fetched, policies for uneven batches, state, threads, and programs that were changed."""

import threading
import time

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Program, ProgramPair, parse_pair
from fluidx.testing import run_ranks
from tests.executor.test_rank_programs import ONE, data_parallel, feed, mesh, on_ranks, one_device, reduce_broadcast, ring, same, zero1


def pairs(texts):
    return [parse_pair(t) for t in texts]


def alike(n, body, head="data %x: f32[-1,4] shard(0) over dp"):
    """n ranks with the same operators and no startup."""
    out = []
    for r in range(n):
        main = Program.parse_from_string(
            f"program main {{\n rank {r}; group dp = {list(range(n))}\n {head}\n{body}\n}}".replace("; ", "\n")
        )
        startup = fx.Program("startup")
        startup.groups, startup.rank = main.groups, r
        out.append(ProgramPair(main, startup))
    return out


def run(programs, given, fetch, **options):
    with fx.ParallelExecutor(programs, timeout=10, **options) as exe:
        return exe.run(feed=given, fetch_list=fetch)


# -- batches that do not divide -----------------------------------------------------------------------------------------------


def test_a_batch_is_padded_cut_short_or_refused():
    x = feed(5)["x"]
    fetch = ["y", "loss", "w@GRAD", "w"]
    for uneven, rows in (("pad", np.concatenate([x, x[-1:]])), ("drop", x[:4]), ("weight", x)):
        wanted, _ = one_device([{"x": rows}], fetch)
        found, _ = on_ranks(data_parallel(2), [{"x": x}], fetch, uneven=uneven)
        same(found, wanted)
    with pytest.raises(fx.FeedError) as error:
        on_ranks(data_parallel(2), [{"x": x}], fetch, uneven="error")
    assert str(error.value) == (
        "a batch of 5 rows does not divide among 2 ranks; feed a multiple of 2, "
        "or choose uneven='weight', 'pad' or 'drop' when making the ParallelExecutor"
    )
    with pytest.raises(fx.FeedError, match=r"^uneven='drop' would drop all 2 rows: there are 3 ranks; use uneven='weight' or 'pad'$"):
        on_ranks(data_parallel(3), [feed(2)], fetch, uneven="drop")
    with pytest.raises(fx.FeedError, match="a batch of no rows; leave it out$"):
        on_ranks(data_parallel(2), [feed(0)], fetch)


def test_a_mesh_pads_by_the_ranks_that_cut_the_batch():
    x = feed(5)["x"]
    wanted, _ = one_device([{"x": np.concatenate([x, x[-1:]])}], ["y"])
    same(on_ranks(mesh(2, 3), [{"x": x}], ["y"], uneven="pad")[0], wanted)


def test_batches_cut_together_have_one_size():
    programs = alike(
        2, "%y: f32[-1,4] shard(0) over dp = elementwise_add(%x, %z)",
        "data %x: f32[-1,4] shard(0) over dp\n data %z: f32[-1,4] shard(0) over dp\n data %scale: f32[-1]",
    )  # fmt: skip
    one = np.ones((3, 4), "float32")
    with pytest.raises(fx.FeedError) as error:
        run(programs, {"x": one, "z": one[:2], "scale": np.ones(9, "float32")}, ["y"])
    assert str(error.value) == "feeds that are split among the ranks must have the same number of rows, or a multiple: 'x' has 3, 'z' has 2"
    assert run(programs, {"x": one, "z": one, "scale": np.ones(9, "float32")}, ["y", "scale"])[1].shape == (9,)


def test_an_axis_of_a_declared_size_is_cut_as_it_is():
    programs = alike(2, "%y: f32[3,4] shard(0) over dp = scale(%x) {scale=2.0}", "data %x: f32[3,4] shard(0) over dp")
    x = np.arange(12, dtype="float32").reshape(3, 4)
    for uneven in ("weight", "pad", "drop", "error"):
        assert np.array_equal(run(programs, {"x": x}, ["y"], uneven=uneven)[0], 2 * x)


@pytest.mark.parametrize("rows", [8, 2, 1])
@pytest.mark.parametrize("n", [2, 3])
def test_means_and_maxima_of_uneven_parts_are_those_of_the_whole(rows, n):
    """Sums of powers of two of integers are exact, so that the mean of 4 * rows of them is."""
    programs = alike(n, """
      %mean: f32[1] partial(sum) over dp = mean(%x)
      %max: f32[4] partial(max) over dp = reduce_max(%x) {dim=[0]}
      %min: f32[1] partial(min) over dp = reduce_min(%x)
      %rows: f32[-1] shard(0) over dp = reduce_mean(%x) {dim=[1]}
      %one: f32[1] = fill_constant() {shape=[1], value=1.0}
      %g: f32[-1,4] shard(0) over dp = reduce_mean_grad(%x, %one)
      %all: f32[1] = all_reduce(%mean) {group="dp"}
      %top: f32[4] = all_reduce(%max) {group="dp", op="max"}
    """)  # fmt: skip
    x = np.random.default_rng(3).integers(-9, -2, (rows, 4)).astype("float32")
    mean, top, low, each, g, total, all_top = run(programs, {"x": x}, ["mean", "max", "min", "rows", "g", "all", "top"])
    assert mean == total == x.mean() and low == x.min()
    assert np.array_equal(top, x.max(0)) and np.array_equal(all_top, top)
    assert np.array_equal(each, x.mean(1))
    assert np.array_equal(g, np.full_like(x, 1 / x.size))


def test_only_the_shape_of_an_operand_is_read_where_its_part_would_be():
    programs = alike(2, """
      %one: f32[1] = fill_constant() {shape=[1], value=3.0}
      %g: f32[-1,4] shard(0) over dp = reduce_sum_grad(%whole, %one)
    """, "data %whole: f32[-1,4]\n data %x: f32[-1,4] shard(0) over dp")  # fmt: skip
    x = np.zeros((5, 4), "float32")
    with fx.ParallelExecutor(programs, timeout=10) as exe:
        (parts,) = exe.run(feed={"whole": x, "x": x}, fetch_list=["g"], return_merged=False)
        assert [p.shape for p in parts] == [(2, 4), (3, 4)]
        assert np.array_equal(exe.run(feed={"whole": x, "x": x}, fetch_list=["g"])[0], np.full((5, 4), 3, "float32"))


@pytest.mark.parametrize("rows", [6, 7, 2])
def test_random_numbers_are_those_of_one_device(rows):
    body = """
      %y: f32[-1,4] HERE, %mask: f32[-1,4] HERE = dropout(%x) {dropout_prob=0.5, seed=7, dropout_implementation="upscale_in_train"}
      %noise: f32[-1,3] HERE = uniform_random_batch_size_like(%x) {shape=[-1, 3], seed=3}
    """
    x = np.ones((rows, 4), "float32")
    source = Program.parse_from_string("program one { data %x: f32[-1,4]\n" + body.replace("HERE", "") + "}")
    exe = fx.Executor()
    with fx.ParallelExecutor(alike(3, body.replace("HERE", "shard(0) over dp")), timeout=10) as ranks:
        for _ in range(3):
            wanted = exe.run(source, feed={"x": x}, fetch_list=["y", "noise"], scope=fx.global_scope())
            same([ranks.run(feed={"x": x}, fetch_list=["y", "noise"])], [wanted])


# -- fetches ------------------------------------------------------------------------------------------------------------------


def test_a_rank_s_own_value_is_fetched_from_each_rank_only():
    with fx.ParallelExecutor(pairs(ring(2, [0, 8, 12])), timeout=10) as exe:
        exe.run_startup()
        with pytest.raises(fx.FeedError) as error:
            exe.run(feed=feed(4), fetch_list=["flat"])
        assert str(error.value) == (
            "fetch_list names 'flat', which is local: every rank has its own, and there is no global value; "
            "return_merged=False gives each rank's"
        )
        (flat, sums) = exe.run(feed=feed(4), fetch_list=["flat", "sum0"], return_merged=False)
        assert np.array_equal(flat[0], flat[1]) and flat[0].shape == (12,)
        assert sums[0].shape == (8,) and sums[1] is None


def test_a_value_on_one_rank_is_fetched_from_there():
    with fx.ParallelExecutor(pairs(reduce_broadcast(3)), timeout=10) as exe:
        exe.run_startup()
        (each,) = exe.run(feed=feed(4), fetch_list=["w.new"], return_merged=False)
        assert each[0] is None and each[2] is None
        (w, new) = exe.run(feed=feed(4), fetch_list=["w", "w.new"])
        assert np.array_equal(w, new)


def test_a_value_that_its_rank_does_not_compute_is_named():
    programs = alike(2, "", "data %x: f32[-1,4] shard(0) over dp\n var %y: f32[-1,4] shard(0) over dp")
    with pytest.raises(fx.FeedError) as error:
        run(programs, {"x": np.ones((2, 4), "float32")}, ["y"])
    assert str(error.value) == ("fetch_list names 'y', which no operator of rank 0 defines; return_merged=False gives what the ranks have")


@pytest.mark.parametrize("fetch", [object(), 3, [3], [None]])
def test_a_fetch_list_of_something_else_is_refused(fetch):
    with pytest.raises(fx.FeedError, match="^fetch_list takes "):
        run(alike(2, ""), feed(2), fetch)


# -- state --------------------------------------------------------------------------------------------------------------------


LAYOUTS = {
    "replicated": lambda: data_parallel(2), "at a root": lambda: reduce_broadcast(3), "sharded": lambda: zero1(3),
    "pieces": lambda: ring(2, [0, 8, 12]), "mesh": lambda: mesh(2, 2),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_set_and_read_whole(layout):
    with fx.ParallelExecutor(pairs(LAYOUTS[layout]()), timeout=10) as exe:
        exe.run_startup()
        for name in ("w", "v"):
            value = np.random.default_rng(1).integers(-9, 9, (4, 3)).astype("float64")
            exe.set_state(name, value)
            assert np.array_equal(exe.state(name), value)
            with pytest.raises(fx.FeedError):
                exe.set_state(name, value[:3])
        with pytest.raises(fx.ir.ProgramError):
            exe.state("nothing")


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_a_checkpoint_goes_on_in_another_layout(before, after, tmp_path):
    first, second = [feed(6, 0), feed(5, 1)], [feed(7, 2), feed(4, 3)]
    wanted, state = one_device([*first, *second], ["loss"])
    source = parse_pair(ONE).main
    with fx.ParallelExecutor(pairs(LAYOUTS[before]()), timeout=10) as exe:
        exe.run_startup()
        for f in first:
            exe.run(feed=f)
        fx.io.save_persistables(exe, tmp_path, source, filename="all")
        fx.io.save(source, tmp_path / "model", executor=exe)
    with fx.ParallelExecutor(pairs(LAYOUTS[after]()), timeout=10) as exe:
        for load in (
            lambda: fx.io.load_persistables(exe, tmp_path, source, filename="all"),
            lambda: fx.io.load(source, tmp_path / "model", executor=exe),
        ):
            exe.run_startup()
            load()
            same([exe.run(feed=f, fetch_list=["loss"]) for f in second], wanted[2:])
            same([[exe.state(n) for n in state]], [state.values()])


# -- who may call, and what with ----------------------------------------------------------------------------------------------


def together(job, count=6):
    errors = []

    def work(k):
        try:
            job(k)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]


def test_callers_on_several_threads_get_the_values_of_their_own_batches():
    programs = alike(2, "%y: f32[-1,4] shard(0) over dp = scale(%x) {scale=2.0}\n %s: f32[1] partial(sum) over dp = reduce_sum(%x)")
    one = Program.parse_from_string(
        "program one { data %x: f32[-1,4]\n %y: f32[-1,4] = scale(%x) {scale=2.0}\n %s: f32[1] = reduce_sum(%x)\n }"
    )
    single, scope = fx.Executor(), fx.Scope()
    with fx.ParallelExecutor(programs, timeout=10) as exe:

        def job(k):
            x = np.full((3, 4), k, "float32")
            for _ in range(40):
                for y, s in (
                    exe.run(feed={"x": x}, fetch_list=["y", "s"]),
                    single.run(one, feed={"x": x}, fetch_list=["y", "s"], scope=scope),
                ):
                    assert (y == 2 * k).all() and s == 12 * k

        together(job)


@pytest.mark.parametrize("when", ["while jobs are handed out", "when an outcome was taken"])
def test_an_interrupt_loses_no_job_and_no_time(when, monkeypatch):
    """Of jobs that are Python's; those in C have tests of their own in test_launch.py."""
    with fx.ParallelExecutor(pairs(data_parallel(3)), timeout=30) as exe:
        monkeypatch.setattr(exe.group, "launcher", lambda bounds: None)
        exe.run_startup()
        wanted = exe.run(feed=feed(6), fetch_list=["loss"])
        exe.run_startup()
        if when == "while jobs are handed out":
            crew = exe.group.threads
            monkeypatch.setattr(crew, "workers", Interrupting(crew.workers))
        else:

            def collect(order, wait=None, real=exe.group.threads.collect):
                if wait is None:
                    order.news.get()
                    raise KeyboardInterrupt
                real(order, wait)

            monkeypatch.setattr(exe.group.threads, "collect", collect)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            exe.run(feed=feed(6), fetch_list=["loss"])
        with pytest.raises(fx.RankError, match="^an earlier run was interrupted"):
            exe.run(feed=feed(6), fetch_list=["loss"])
        monkeypatch.undo()
        exe.run_startup()
        assert time.monotonic() - begin < 2
        same([exe.run(feed=feed(6), fetch_list=["loss"])], [wanted])


class Interrupting(list):
    """Workers, between the first two of which Ctrl-C is pressed once."""

    def __iter__(self):
        rest = list(super().__iter__())
        if not hasattr(self, "pressed"):
            self.pressed = True
            yield rest[0]
            raise KeyboardInterrupt
        yield from rest


def test_programs_that_were_changed_do_not_run():
    programs = pairs(data_parallel(2))
    with fx.ParallelExecutor(programs, timeout=10) as exe:
        exe.run_startup()
        exe.run(feed=feed(4), fetch_list=["loss"])
        block = programs[1].main.global_block()
        at = next(i for i, op in enumerate(block.oplist) if op.type == "all_reduce")
        block.oplist[at] = block.oplist[at].replace(attrs={**block.oplist[at].attrs, "op": "max"})
        with pytest.raises(fx.ir.ProgramError) as error:
            exe.run(feed=feed(5), fetch_list=["loss"])
        assert str(error.value) == (
            'rank 1: program main has\n    %g = all_reduce(%w@GRAD) {group="dp", op="max"}\n'
            '  where it had\n    %g = all_reduce(%w@GRAD) {group="dp", op="sum"}\n'
            "  the program was changed after this executor was made; transpile the changed source, or make a new executor"
        )
        del block.oplist[at]
        with pytest.raises(fx.ir.ProgramError, match="^rank 1: program main has 8 operators, it had 9\n"):
            exe.run(feed=feed(5), fetch_list=["loss"])


def test_programs_of_all_ranks_in_order_are_asked_for():
    two = pairs(data_parallel(2))
    for wrong, message in [
        (two[0].main, "ParallelExecutor takes the DistributeTranspiler that transpiled the program, "
                      "ParallelExecutor(t, places=fx.cpu_places(4)), or one ProgramPair for each rank; got Program"),
        (two[:1], "program main is one of 2 ranks, programs of 1 were given"),
        (two[::-1], "program main is the program of rank 1, but its position is 0; give the programs in rank order"),
        ([two[0], pairs(data_parallel(3))[1]],
         "rank 1: program main declares groups {'dp': ((0, 1, 2),)}, program main of rank 0 {'dp': ((0, 1),)}"),
    ]:  # fmt: skip
        with pytest.raises(fx.ExecutionError) as error:
            fx.ParallelExecutor(wrong)
        assert str(error.value) == message


def test_run_ranks_deals_one_feed_and_gives_every_rank_s_part():
    mains = [p.main for p in alike(2, "%y: f32[-1,4] shard(0) over dp = scale(%x) {scale=2.0}")]
    x = np.arange(12, dtype="float32").reshape(3, 4)
    (a,), (b,) = run_ranks(mains, {"x": x}, ["y"])
    assert np.array_equal(a, 2 * x[:1]) and np.array_equal(b, 2 * x[1:])
