"""Updates on the host: what lies there, what is copied when, that answers stay one device's, and what a rank then holds in each memory."""

import json

import numpy as np
import pytest

import fluidx as fx
from fluidx.comm.threads.communicator import ThreadCommunicator
from fluidx.comm.threads.world import ThreadWorld
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.ranks import local_rank
from fluidx.ir import ProgramPair
from fluidx.ir.jsonform import from_json, to_json
from fluidx.ir.parser import parse_pair
from fluidx.testing import check_pass
from fluidx.testing.models import classifier, integer_mlp, train_ranks, train_single
from fluidx.transpiler.passes.offload import Offload
from fluidx.verify import verify_ranks
from tests.executor.fake_cupy import DeviceArray, fake
from tests.sweep import swept
from tests.transpiler import control_models
from tests.transpiler.models import MODELS, L, same_answers, written
from tests.transpiler.test_fsdp import deep

S = fx.strategies
KB = 1 / 2**10


def made(program, trainers=2, strategy=S.fsdp, **options):
    t = fx.DistributeTranspiler(strategy(cpu_offload=True, **options))
    t.transpile(program=program[0], startup_program=program[1], trainers=trainers)
    t.verify()
    return t


# -- the pass ---------------------------------------------------------------------------------------------------------------------


def test_an_update_reads_its_gradient_on_the_host_and_what_rests_there_is_copied_for_each_section():
    check_pass(
        Offload(),
        given="""
          group dp = [0, 1]
          data %x: f32[-1,4] shard(0) over dp
          param %w: f32[4,3] shard(0) over dp
          var %lr: f32[1] persistable
        """,
        before="""
        dist:
          %w.full: f32[4,3] = all_gather(%w) {group="dp"}
        forward:
          %y: f32[-1,3] shard(0) over dp = matmul(%x, %w.full)
        loss:
          %loss: f32[1] partial(sum) over dp = reduce_sum(%y)
        backward:
          %y@GRAD: f32[-1,3] shard(0) over dp = fill_any_like(%y) {value=1.0}
          %w@GRAD: f32[4,3] partial(sum) over dp = matmul(%x, %y@GRAD) {transpose_x=true}
        dist:
          %w@GRAD.sum: f32[4,3] shard(0) over dp = reduce_scatter(%w@GRAD) {group="dp", op="sum"}
          %w.full1: f32[4,3] = all_gather(%w) {group="dp"}
        backward:
          %x@GRAD: f32[-1,4] shard(0) over dp = matmul(%y@GRAD, %w.full1) {transpose_y=true}
        optimize:
          %w = sgd(%w, %w@GRAD.sum, %lr)
        """,
        after="""
          param %w: f32[4,3] shard(0) over dp on_host
          var %lr: f32[1] persistable on_host
        dist:
          %w.device: f32[4,3] shard(0) over dp = memcpy_h2d(%w)
          %w.full: f32[4,3] = all_gather(%w.device) {group="dp"}
        forward:
          %y: f32[-1,3] shard(0) over dp = matmul(%x, %w.full)
        loss:
          %loss: f32[1] partial(sum) over dp = reduce_sum(%y)
        backward:
          %y@GRAD: f32[-1,3] shard(0) over dp = fill_any_like(%y) {value=1.0}
          %w@GRAD: f32[4,3] partial(sum) over dp = matmul(%x, %y@GRAD) {transpose_x=true}
        dist:
          %w@GRAD.sum: f32[4,3] shard(0) over dp = reduce_scatter(%w@GRAD) {group="dp", op="sum"}
          %w@GRAD.sum.host: f32[4,3] shard(0) over dp on_host = memcpy_d2h(%w@GRAD.sum)
          %w.device1: f32[4,3] shard(0) over dp = memcpy_h2d(%w)
          %w.full1: f32[4,3] = all_gather(%w.device1) {group="dp"}
        backward:
          %x@GRAD: f32[-1,4] shard(0) over dp = matmul(%y@GRAD, %w.full1) {transpose_y=true}
        optimize:
          %w = sgd(%w, %w@GRAD.sum.host, %lr)
        """,
    )


def test_what_forward_works_on_is_copied_once_for_it_and_once_for_backward():
    """And of what backward only asks the shape, nothing is copied."""
    check_pass(
        Offload(),
        given="data %x: f32[-1,1]; param %b: f32[1]; var %lr: f32[1] persistable",
        before="""
        forward:
          %y: f32[-1,1] = elementwise_add(%x, %b)
          %z: f32[-1,1] = elementwise_mul(%y, %b)
        backward:
          %z@GRAD: f32[-1,1] = fill_any_like(%z) {value=1.0}
          %y@GRAD: f32[-1,1] = elementwise_mul(%z@GRAD, %b)
          %b@GRAD: f32[1] = reduce_to(%y@GRAD, %b)
        optimize:
          %b = sgd(%b, %b@GRAD, %lr)
        """,
        after="""
          param %b: f32[1] on_host
          var %lr: f32[1] persistable on_host
        dist:
          %b.device: f32[1] = memcpy_h2d(%b)
        forward:
          %y: f32[-1,1] = elementwise_add(%x, %b.device)
          %z: f32[-1,1] = elementwise_mul(%y, %b.device)
        backward:
          %z@GRAD: f32[-1,1] = fill_any_like(%z) {value=1.0}
        dist:
          %b.device1: f32[1] = memcpy_h2d(%b)
        backward:
          %y@GRAD: f32[-1,1] = elementwise_mul(%z@GRAD, %b.device1)
          %b@GRAD: f32[1] = reduce_to(%y@GRAD, %b)
        dist:
          %b@GRAD.host: f32[1] on_host = memcpy_d2h(%b@GRAD)
        optimize:
          %b = sgd(%b, %b@GRAD.host, %lr)
        """,
    )


def test_state_that_forward_writes_stays_on_the_device():
    model = classifier(kind="batch_norm")
    running = {n for op in model.main.ops if op.type == "batch_norm" for slot in ("MeanOut", "VarianceOut") for n in op.output(slot)}
    descs = made((model.main, model.startup), strategy=S.zero1).main.global_block().descs
    worked_on = {n for n, d in descs.items() if d.is_parameter}  # zero1 has parameters whole, as forward works on them
    assert len(running) == 2 and {n for n, d in descs.items() if d.persistable and not d.on_host} == worked_on >= running


def test_startup_makes_what_rests_on_the_host_there():
    t = made(deep())
    assert {op.type for op in t.startup.ops if op.output_arg_names[:1] in [(f"w{k}",) for k in range(4)]} == {"uniform_random"}


def test_programs_with_two_memories_come_back():
    t = made(deep())
    pair = ProgramPair(t.get_trainer_program(1), t.get_startup_program(1))
    assert str(from_json(json.loads(json.dumps(to_json(pair))))) == str(pair)
    again = parse_pair(str(pair))
    assert str(again) == str(pair) and again.main.global_block().descs["w0"].on_host
    assert not again.main.global_block().descs["w0.full"].on_host


# -- answers ----------------------------------------------------------------------------------------------------------------------

STRATEGIES = {
    "fsdp": lambda: S.fsdp(KB, cpu_offload=True),
    "fsdp that keeps": lambda: S.fsdp(0.1 * KB, reshard_after_forward=False, prefetch=2, cpu_offload=True),
    "zero1": lambda: S.zero1(cpu_offload=True),
    "zero2 along axes": lambda: S.zero2(bucket_mb=0, cpu_offload=True),
    "zero3": lambda: S.zero3(cpu_offload=True),
    "data_parallel": lambda: S.data_parallel(cpu_offload=True),
    "ring_optimizer": lambda: S.ring_optimizer(cpu_offload=True),
    "reduce_broadcast by trees": lambda: S.reduce_broadcast(algorithm="tree", cpu_offload=True),
    "micro-batches": lambda: S.micro_batches(3, S.fsdp(KB, cpu_offload=True)),
}


@swept(2, strategy=list(STRATEGIES), trainers=[1, 2, 3, fx.Cluster(2, 2)])
def test_a_step_is_one_devices_bit_for_bit(strategy, trainers):
    model = integer_mlp("sum")
    fetch = [model.loss, *[g for _, g in model.gradients], *[p for p, _ in model.gradients]]
    feeds = [model.feed(24)]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, STRATEGIES[strategy](), trainers, feeds, fetch)
    for name, a, b in zip(fetch, one, many, strict=True):
        assert np.array_equal(a, b), name
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


@swept(2, name=list(MODELS), strategy=["fsdp", "zero1"])
def test_models_keep_their_answers(name, strategy):
    same_answers(name, STRATEGIES[strategy](), 3)


OPTIMIZERS = {
    "clipped": lambda: fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(0.5)),
    "decayed": lambda: fx.optimizer.Momentum(fx.layers.piecewise_decay([1, 2], [0.5, 0.25, 0.125]), 0.5),
    "in a branch": lambda: fx.optimizer.GradientMergeOptimizer(fx.optimizer.Momentum(0.5, 0.5), 2),
    "with powers": lambda: fx.optimizer.Adam(fx.layers.noam_decay(8, 2)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_updates_do_beside_updating_is_done_on_the_host_too(optimizer):
    def step():
        x = fx.data("x", [-1, 6], "float64")
        loss = L.mean(L.square(L.fc(L.fc(x, 8, act="tanh"), 3)))
        return loss, OPTIMIZERS[optimizer](), lambda rows, seed=0: {"x": np.random.default_rng(seed).standard_normal((rows, 6))}

    same_answers(written(step), STRATEGIES["fsdp"](), 2)


IN_BODIES = {
    "branch": (("cond", "flag", ("fc",), ("scale", "parameter")),),
    "loop": (("loop", 2, ("fc", "mean")),),
    "branch in a loop": (("loop", 2, (("cond", "size", ("parameter",), ("fc", "scale")),)), "fc"),
}


@pytest.mark.parametrize("recipe", IN_BODIES)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp that keeps", "zero1"])
def test_what_bodies_read_of_the_host_is_copied_and_answers_stay(recipe, strategy):
    same_answers(control_models.model(IN_BODIES[recipe]), STRATEGIES[strategy](), 2)


def test_one_stage_of_a_pipeline_offloads_its_parameters():
    def step():
        x = fx.data("x", [-1, 6], "float64")
        with fx.device_guard("stage:0"):
            h = L.fc(x, 8, act="tanh")
        with fx.device_guard("stage:1"):
            loss = L.mean(L.square(L.fc(h, 4)))
        return loss, fx.optimizer.Adam(0.01), lambda rows, seed=0: {"x": np.random.default_rng(seed).standard_normal((rows, 6))}

    same_answers(written(step), S.pipeline(2, of=S.fsdp(KB, cpu_offload=True)), fx.Mesh(pp=2, dp=2))


# -- memory -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_device_has_parameters_in_use_gradients_and_activations_and_the_host_the_state(ranks):
    layers, width = 16, 64
    layer = width * width * 4
    t = made(deep(layers, width), ranks, units=layer / 2**20)
    whole = layers * layer
    small = 4 * (1 + 2 * layers)  # the learning rate, and of each parameter the two powers that Adam keeps
    shard = layer // ranks
    for p in (dry_plan(t.get_trainer_program(r), batch=ranks, fetch=[]) for r in range(ranks)):
        assert p.nbytes("state") == 0 and p.nbytes("state", on_host=True) == 3 * whole // ranks + small
        assert p.host_bytes == p.nbytes("state", on_host=True) + p.nbytes("arena", on_host=True)
        assert p.nbytes("arena", on_host=True) <= whole // ranks  # the gradients, which were sent as they were finished
        assert p.peak_bytes == p.nbytes("feed") + p.arena_bytes
        # two units in use, a gradient and its shard, the shards of two units on their way into use, activations; no other gradients
        assert p.arena_bytes <= 3 * layer + 3 * shard + 2 * layers * width * 4 + 64 * 3 * layers
        assert f"on the host arena {p.nbytes('arena', on_host=True)}, state {p.nbytes('state', on_host=True)}" in str(p).splitlines()[0]


@pytest.mark.parametrize("strategy", [S.data_parallel, S.zero1, S.zero2])
def test_a_gradient_is_on_the_host_as_soon_as_it_is_finished(strategy):
    """On one rank nothing is reduced: the device has one or two gradients at a time."""
    layers, width = 16, 64
    layer = width * width * 4
    t = made(deep(layers, width), 1, strategy)
    plan = dry_plan(t.get_trainer_program(0), batch=1, fetch=[])
    assert plan.arena_bytes <= 2 * layer + 2 * layers * width * 4 + 64 * 3 * layers
    assert plan.nbytes("arena", on_host=True) <= layers * layer + 64
    ops = t.main.ops
    for k, op in enumerate(ops):
        if op.type == "memcpy_d2h":
            (name,) = op.input_arg_names
            writer = max(j for j in range(k) if name in ops[j].output_arg_names)
            assert all(between.type == "memcpy_d2h" for between in ops[writer + 1 : k]), name


def one_scale():
    """A parameter of one element, which lies whole on every rank."""
    x = fx.data("x", [-1, 6], "float64")
    scale = L.create_parameter([1], "float64", name="scale")
    return L.mean(L.square(L.square(x * scale) * scale)), fx.optimizer.SGD(0.5), None


def test_forward_and_backward_copy_what_rests_on_the_host_each_for_itself():
    """Else a rewrite could keep the shards on the device from the one to the other."""
    model = written(one_scale)
    p = dry_plan(made((model.main, model.startup)).get_trainer_program(0), batch=4)
    names = [n for step in p.steps for op in step.ops if op.type == "memcpy_h2d" for n in op.input_arg_names]
    assert names == ["scale", "scale"]


# -- wrong programs ---------------------------------------------------------------------------------------------------------------

COPY = "%fc_1.w_0.device: f32[5,4] shard(1) over dp stop_gradient = memcpy_h2d(%fc_1.w_0)"
WRONG = {
    "a collective reads the host": (
        "all_gather(%fc_1.w_0.device)", "all_gather(%fc_1.w_0)",
        "op all_gather communicates, which needs values on the device, and %fc_1.w_0 is on the host",
    ),
    "an update reads the device": (
        "sgd(%fc_1.w_0, %fc_1.w_0@GRAD.sum.host,", "sgd(%fc_1.w_0, %fc_1.w_0@GRAD.sum,",
        "op sgd works in the memory of %fc_1.w_0, which is on the host, and %fc_1.w_0@GRAD.sum is on the device",
    ),
    "a copy goes the other way": (
        "memcpy_h2d(%fc_1.w_0)", "memcpy_d2h(%fc_1.w_0)", "op memcpy_d2h copies to the host, and %fc_1.w_0 is on the host",
    ),
    "a plain copy crosses": (
        "memcpy_h2d(%fc_1.w_0)", "assign(%fc_1.w_0)",
        "op assign works in the memory of %fc_1.w_0.device, which is on the device, and %fc_1.w_0 is on the host",
    ),
    "a value is said to lie elsewhere": (
        "%fc_0.tmp_0: f32[-1,5] shard(0) over dp", "%fc_0.tmp_0: f32[-1,5] shard(0) over dp on_host",
        "op mul works in the memory of %fc_0.tmp_0, which is on the host, and %x is on the device",
    ),
    "a copy is of another value": ("memcpy_d2h(%fc_1.b_0@GRAD.sum)", "memcpy_d2h(%fc_1.b_0@GRAD)", "."),
    "a copy comes too early": (COPY, f"{COPY}\n  %fc_1.w_0 = scale(%fc_1.w_0) {{scale=2.0}}", "."),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["on all", "on one rank"])
@pytest.mark.parametrize("old, new, why", WRONG.values(), ids=WRONG.keys())
def test_wrong_memories_and_wrong_copies_are_refused(old, new, why, ranks):
    model = integer_mlp("sum")
    t = made((model.main, model.startup), strategy=S.zero3)
    pairs = [parse_pair(str(ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)))) for r in range(2)]
    for r in ranks:
        assert old in str(pairs[r].main), str(pairs[r].main)
        pairs[r] = parse_pair(str(pairs[r]).replace(old, new))
    with pytest.raises(fx.VerifyError) as e:
        verify_ranks(t.source, [p.main for p in pairs], [p.startup for p in pairs])
    assert why == "." or len(ranks) == 1 or why in str(e.value), e.value


def test_servers_are_not_offloaded():
    with pytest.raises(fx.TranspileError, match="parameter_server: cpu_offload is not available: servers do nothing but update"):
        S.parameter_server(cpu_offload=True)


# -- a device that is not the host ------------------------------------------------------------------------------------------------


class DeviceCommunicator(ThreadCommunicator):
    """Takes arrays of the device alone, as NCCL does."""

    calls = None

    def wait(self):
        pass


def _only_device(value):
    if isinstance(value, (list, tuple)):
        return type(value)(map(_only_device, value))
    assert type(value) is not np.ndarray, "an array of the host is communicated"
    return value.view(np.ndarray) if isinstance(value, DeviceArray) else value


def _of_device(name):
    def method(self, *args):
        return getattr(ThreadCommunicator, name)(self, *_only_device(args))

    return method


for _name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
    setattr(DeviceCommunicator, _name, _of_device(_name))


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_the_host_updates_for_a_device_that_never_sees_the_state(strategy, monkeypatch):
    """Ranks on a stand-in for CuPy, whose arrays refuse to meet NumPy's."""
    monkeypatch.setattr(local_rank, "array_module", lambda place: fake)
    monkeypatch.setattr(ThreadWorld, "communicator", lambda world, rank: DeviceCommunicator(world, rank))
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "1")
    model = integer_mlp("sum", fx.optimizer.Momentum(0.5, 0.5))
    feeds = [model.feed(24)]
    (one,), scope = train_single(model, feeds, [model.loss, "fc_0.w_0"])
    t = fx.DistributeTranspiler(STRATEGIES[strategy]())
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        many = exe.run(feed=feeds[0], fetch_list=[model.loss, "fc_0.w_0"])
        assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))
        descs = t.main.global_block().descs
        for n, a in exe.scopes[0].arrays.items():
            assert (type(a) is np.ndarray) is descs[n].on_host
            assert np.array_equal(exe.state(n), scope.get(n)), n
