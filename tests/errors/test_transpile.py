"""Every message of transpiling and of choosing a strategy, whole."""

from dataclasses import dataclass

import pytest

import fluidx as fx

L = fx.layers


def net(optimize=True, shape=(-1, 4), loss=lambda h: L.mean(h)):
    """A small program, its startup and its loss."""
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", list(shape))
        value = loss(L.fc(x, 3, param_attr=fx.ParamAttr(name="w"), bias_attr=False))
        if optimize:
            fx.optimizer.SGD(0.1).minimize(value)
    return main, startup, value


def transpile(made=None, strategy=None, **options):
    main, startup, _ = made or net()
    return fx.DistributeTranspiler(strategy).transpile(**{"program": main, "startup_program": startup, "trainers": 2, **options})


def message(call, error=fx.TranspileError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# -- strategies and options ---------------------------------------------------------------------------------------------------------

CHOICES = [
    (lambda: fx.DistributeTranspiler("ring_optimiser"), "unknown strategy 'ring_optimiser'; did you mean 'ring_optimizer'?"),
    (lambda: fx.strategies.get("zro1"), "unknown strategy 'zro1'; did you mean 'zero1'?"),
    (
        lambda: fx.strategies.get("fairy"),
        f"unknown strategy 'fairy'; there are: {', '.join(fx.strategies.CATALOGUE)}",
    ),
    (lambda: fx.strategies.get("ring_optimizer", chunk_md=3), "ring_optimizer has no option 'chunk_md'; did you mean 'chunk_mb'?"),
    (lambda: fx.strategies.data_parallel(bucket_size=25), "data_parallel has no option 'bucket_size'; did you mean 'bucket_mb'?"),
    (lambda: fx.strategies.get("data_parallel", bucket_size=25), "data_parallel has no option 'bucket_size'; did you mean 'bucket_mb'?"),
    (
        lambda: fx.strategies.data_parallel(depth=2),
        "data_parallel has no option 'depth'; it has: bucket_mb, first_bucket_mb, overlap; and as every strategy: loss, strict, algorithm, "
        "hierarchical, wire, wire_scale, cpu_offload, rings",
    ),
    (lambda: fx.strategies.ring_optimizer(chunk_mb="4"), "ring_optimizer: chunk_mb must be a number of MiB above 0, got '4'"),
    (lambda: fx.strategies.data_parallel(bucket_mb=-1), "data_parallel: bucket_mb must be a number of MiB, 0 or more, got -1"),
    (lambda: fx.strategies.zero2(bucket_mb="25"), "zero2: bucket_mb must be a number of MiB, 0 or more, got '25'"),
    (lambda: fx.strategies.zero1(first_bucket_mb=0), "zero1: first_bucket_mb must be a number of MiB, above 0, got 0"),
    (lambda: fx.strategies.reduce_broadcast(bucket_mb=True), "reduce_broadcast: bucket_mb must be a number of MiB, 0 or more, got True"),
    (lambda: fx.strategies.data_parallel(wire="fp16"), "data_parallel: unknown wire='fp16'; there are: bfloat16, float16"),
    (
        lambda: fx.strategies.zero1(wire_scale=0.5),
        "zero1: wire_scale is a number above 0, for wire='float16' or 'bfloat16'; got 0.5",
    ),
    (
        lambda: fx.strategies.zero1(wire="float16", wire_scale=0),
        "zero1: wire_scale is a number above 0, for wire='float16' or 'bfloat16'; got 0",
    ),
    (lambda: fx.strategies.get(["zero1"]), "unknown strategy ['zero1']; did you mean 'zero1'?"),
    (lambda: fx.strategies.data_parallel(loss=5), "data_parallel: loss is a Variable or the name of one, got 5"),
    (lambda: fx.strategies.zero1(strict="no"), "zero1: strict is True or False, got 'no'"),
    (lambda: fx.strategies.fsdp(strict=None), "fsdp: strict is True or False, got None"),
    (lambda: fx.strategies.data_parallel(overlap=0), "data_parallel: overlap is True or False, got 0"),
    (lambda: fx.strategies.ring_optimizer(chunk_mb=0), "ring_optimizer: chunk_mb must be a number of MiB above 0, got 0"),
    (lambda: fx.strategies.reduce_broadcast("greeedy"), "unknown roots='greeedy'; did you mean 'greedy'?"),
    (lambda: fx.strategies.reduce_broadcast(3), "unknown roots=3; there are: greedy, hash, round_robin"),
    (
        lambda: fx.DistributeTranspiler(fx.strategies.ring_optimizer),
        "strategies.ring_optimizer is a function; call it: strategies.ring_optimizer()",
    ),
    (
        lambda: fx.DistributeTranspiler(3),
        "DistributeTranspiler takes a strategy, its name, or a DistributeTranspilerConfig, got int: 3; fx.strategies has them",
    ),
]


@pytest.mark.parametrize("call, text", CHOICES, ids=[text[:40] for _, text in CHOICES])
def test_a_strategy_that_does_not_exist(call, text):
    assert message(call) == text


def test_a_strategy_looked_up_as_an_attribute():
    text = message(lambda: fx.strategies.ring_optimiser, AttributeError)
    assert text == "there is no strategy 'ring_optimiser'; did you mean 'ring_optimizer'?"


def configured(**fields):
    config = fx.DistributeTranspilerConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return fx.DistributeTranspiler(config)


ASYNCHRONOUS = (
    "parameter_server: sync=False is not available: the result of a step would depend on which gradient arrives first, so it could not "
    "be proved; with strategies.replicas() and optimizer.LocalSGDOptimizer trainers run separately and are averaged at fixed steps"
)
CONFIGS = [
    ({"collective_mod": "reduce"}, "DistributeTranspilerConfig has no field 'collective_mod'; did you mean 'collective_mode'?"),
    ({"mode": "nccl"}, "unknown mode='nccl'; did you mean 'nccl2'?"),
    ({"mode": "fsdp,recompute"}, "unknown mode='fsdp,recompute'; DistributeTranspiler('fsdp,recompute') takes strategies"),
    ({"sync_mode": False}, ASYNCHRONOUS),
    ({"collective_mode": "ring_optimiser"}, "unknown collective_mode='ring_optimiser'; did you mean 'ring_optimizer'?"),
    ({"collective_mode": "zero"}, "unknown collective_mode='zero'; there are: grad_allreduce, reduce, ring_optimizer"),
    ({"split_method": "HashNames"}, "unknown split_method='HashNames'; did you mean 'HashName'?"),
]


@pytest.mark.parametrize("fields, text", CONFIGS, ids=[str(f) for f, _ in CONFIGS])
def test_a_configuration_that_does_not_exist(fields, text):
    assert message(lambda: configured(**fields)) == text


# -- ranks and endpoints ----------------------------------------------------------------------------------------------------------------

WHERE = [
    ({"trainers": 0}, "trainers must be at least 1, got 0"),
    ({"trainers": 2.0}, "trainers must be a rank count, a Cluster, a Mesh, or endpoints 'host:port' in a list, got 2.0"),
    ({"trainers": []}, "trainers must be a rank count, a Cluster, a Mesh, or endpoints 'host:port' in a list, got []"),
    ({"trainers": ["a:1", 3]}, "trainers must be a rank count, a Cluster, a Mesh, or endpoints 'host:port' in a list, got ['a:1', 3]"),
    ({"trainers": "4"}, "endpoint '4' is not 'host:port'; a number of ranks is given as an integer: trainers=4"),
    ({"trainers": "a:1,b:2,a:1"}, "endpoint 'a:1' is listed twice; every rank needs its own"),
    ({"trainers": "a:1,b:1,a:2"}, "endpoints of host 'a' are not next to each other; list them host by host"),
    (
        {"trainers": ["a:1", "a:2", "b:1"]},
        "every host must have the same number of ranks: a has 2, b has 1; list as many endpoints for each",
    ),
    (
        {"trainers": "a:1,a:2", "current_endpoint": "a:3"},
        "current_endpoint 'a:3' is not among trainers: a:1, a:2; give this process's own, spelled as in the list",
    ),
    (
        {"current_endpoint": "a:3"},
        "current_endpoint 'a:3' is not among trainers: no endpoints were given; give this process's own, spelled as in the list",
    ),
    ({"trainer_id": 2}, "trainer_id must be from 0 to 1, got 2"),
    ({"trainer_id": "0"}, "trainer_id must be from 0 to 1, got '0'"),
    ({"pservers": 2}, "pservers must be endpoints 'host:port' in a list, got 2"),
    ({"pservers": "a:1,,a:2"}, "pservers must be endpoints 'host:port' in a list, got 'a:1,,a:2'"),
    ({"pservers": "a,b"}, "endpoint 'a' is not 'host:port'; a number of ranks is given as an integer: strategies.parameter_server(4)"),
    ({"pservers": ["a:1", "a:1"]}, "endpoint 'a:1' is listed twice; every rank needs its own"),
    ({"sync_mode": False}, ASYNCHRONOUS),
    ({"program": "net"}, "transpile takes Programs as program and startup_program, got str: 'net'"),
]


@pytest.mark.parametrize("options, text", WHERE, ids=[str(o) for o, _ in WHERE])
def test_ranks_and_endpoints_that_make_no_sense(options, text):
    assert message(lambda: transpile(**options)) == text


def test_a_cluster_of_no_hosts():
    assert message(lambda: fx.Cluster(0, 2)) == "Cluster: hosts must be an integer of at least 1, got 0"
    assert message(lambda: fx.Cluster(2, 2.5)) == "Cluster: devices_per_host must be an integer of at least 1, got 2.5"


@pytest.mark.parametrize("rank", [2, -1, "0"])
def test_a_rank_out_of_range(rank):
    text = f"the program was transpiled for 2 ranks: rank must be from 0 to 1, got {rank!r}"
    t = transpile()
    assert message(lambda: t.get_trainer_program(rank)) == text
    assert message(lambda: t.get_startup_program(rank)) == text
    assert message(lambda: t.diff(rank)) == text


def test_results_before_transpile():
    text = "nothing was transpiled yet; call transpile(program=..., startup_program=..., trainers=...) first"
    t = fx.DistributeTranspiler()
    for call in (t.get_trainer_program, t.get_startup_program, t.verify, t.diff, t.explain, t.balance, lambda: fx.ParallelExecutor(t)):
        assert message(call) == text


# -- programs ---------------------------------------------------------------------------------------------------------------------------


def test_a_second_transpile_is_refused():
    t = transpile(strategy="ring_optimizer")
    text = "program net is already the result of ring_optimizer(chunk_mb=4, roots='greedy'); transpile the program that it was made from"
    assert message(lambda: transpile((t.main, t.startup, None))) == text
    assert message(lambda: transpile((t.get_trainer_program(0), t.get_startup_program(0), None))) == text
    assert message(lambda: t.main.global_block().append_op("relu", {"X": "x"}, {"Out": "y"}), fx.ProgramError) == (
        "program net is the result of transpiling with ring_optimizer(chunk_mb=4, roots='greedy') and is frozen; "
        "change the program it was made from and transpile that"
    )


def test_a_loss_that_is_none():
    without = net(optimize=False)
    assert message(lambda: transpile(without, fx.strategies.data_parallel(loss="mean_0.tmp_0"))) == (
        "program net has no gradients, so 'mean_0.tmp_0' is not its loss; call optimizer.minimize(loss) before transpile"
    )
    assert message(lambda: transpile(strategy=fx.strategies.data_parallel(loss="mean_0.tmp_1"))) == (
        "program net has no loss 'mean_0.tmp_1'; did you mean 'mean_0.tmp_0'?"
    )


def test_an_inference_program_is_fine():
    t = transpile(net(optimize=False))
    assert "4 parameters" not in str(t.verify())
    assert [op.type for op in t.get_trainer_program(1).ops] == ["mul", "mean"]


def test_a_named_loss_is_fine():
    main, startup, loss = net()
    assert transpile((main, startup, loss), fx.strategies.data_parallel(loss=loss)).verify().parameters == 1


def test_updates_without_gradients():
    def sgd(h):
        block = h.block
        block.create_parameter([4, 3], name="g")
        L.fill_constant([1], "float32", 0.1)
        lr = block.oplist[-1].output_arg_names[0]
        slots = {"Param": "w", "Grad": "g", "LearningRate": lr}
        block.append_op("sgd", slots, {"ParamOut": "w"}, role=fx.ir.Role.OPTIMIZE)
        return h

    main, startup, _ = net(optimize=False, loss=sgd)
    startup.global_block().create_var("g", [4, 3])
    startup.global_block().append_op("fill_constant", {}, {"Out": "g"}, {"shape": [4, 3], "dtype": "float32", "value": 0.0})
    assert message(lambda: transpile((main, startup, None))) == (
        "program net has optimizer operators but no gradients; build it with optimizer.minimize(loss)"
    )


def test_no_batch_axis():
    assert message(lambda: transpile(net(shape=(8, 4)))) == (
        "program net has no input with an open batch axis to split among the ranks: 'x' f32[8,4]; declare it with -1 or a name as axis 0"
    )


def test_startup_lacks_parameters():
    assert message(lambda: transpile(startup_program=fx.Program("empty"))) == (
        "the startup program does not initialise parameter w; pass the startup_program that was built together with the program"
    )


def line_of(function, offset):
    return function.__code__.co_firstlineno + offset


# -- strict: what no strategy asks for is refused ----------------------------------------------------------------------------------------


def test_strict_refuses_an_operator_across_the_batch():
    def loss(h):
        return L.mean(L.cumsum(h, axis=0))

    assert message(lambda: transpile(net(loss=loss), fx.strategies.data_parallel(strict=True))) == (
        "strict: a redistribute would be needed: %fc_0.tmp_0: shard(0) over dp to replicate, 12288 bytes, for cumsum: whole; "
        "annotate the operands so that they agree, or leave strict off\n"
        "  in %cumsum_0.tmp_0 = cumsum(%fc_0.tmp_0) {axis=0}\n"
        f'  written at "{__file__}", line {line_of(loss, 1)}, in loss'
    )
    assert "%fc_0.tmp_0: shard(0) over dp to replicate, 12288 bytes, for cumsum: whole" in transpile(net(loss=loss)).explain()


def test_strict_allows_numbers_which_nobody_could_have_otherwise():
    """What a norm over all gradients sends, wherever these are."""
    for name in ("reduce_broadcast", "ring_optimizer", "zero1", "zero2", "zero3", "fsdp"):
        main, startup, loss = net(optimize=False)
        with fx.unique_name.guard(), fx.program_guard(main, startup):
            fx.optimizer.Lamb(0.1, grad_clip=fx.clip.GradientClipByGlobalNorm(1.0)).minimize(loss)
        transpile((main, startup, loss), fx.strategies.get(name, strict=True)).verify()


def test_strict_allows_what_the_strategy_asks_for():
    for name in ("data_parallel", "reduce_broadcast", "ring_optimizer", "zero1", "zero2", "zero3", "fsdp"):
        strict = fx.strategies.get(name, strict=True)
        assert repr(strict).endswith("strict=True)")
        transpile(strategy=strict).verify()


# -- steps of strategies -----------------------------------------------------------------------------------------------------------------


def test_a_step_that_a_strategy_has_not():
    ring, nothing = fx.strategies.ring_optimizer(), fx.transpiler.Pass()
    for call in (ring.before, ring.after, ring.replace):
        assert message(lambda call=call: call("batch", nothing)) == (
            "ring_optimizer(chunk_mb=4, roots='greedy') has no step 'batch'; it has: "
            "bucket, carry, groups, hosts, lower, pack, place, startup, waves"
        )
    assert message(lambda: ring.before("lover", nothing)) == (
        "ring_optimizer(chunk_mb=4, roots='greedy') has no step 'lover'; did you mean 'lower'?"
    )
    assert message(lambda: ring.after("place", nothing, name="pack")) == (
        "ring_optimizer(chunk_mb=4, roots='greedy') has a step 'pack' already; give the pass another name: name=..."
    )


def test_a_step_that_is_no_pass():
    plain = fx.strategies.data_parallel()
    for no_pass in (5, fx.transpiler.Pass):
        for call in (plain.replace, plain.before, plain.after):
            assert message(lambda call=call, no_pass=no_pass: call("startup", no_pass)).endswith(
                f"must be a pass, an instance of a transpiler.Pass, got {no_pass!r}"
            )
    assert message(lambda: plain.replace("startup", 5)) == (
        "data_parallel: step 'startup' must be a pass, an instance of a transpiler.Pass, got 5"
    )


def test_a_pass_that_comes_too_early():
    early = fx.strategies.data_parallel().before("place", fx.transpiler.passes.lower.Lower())
    assert message(lambda: transpile(strategy=early)) == (
        "pass Lower() requires programs that are placed; a pass that ensures it must come before"
    )


def test_an_unknown_algorithm():
    odd = fx.strategies.data_parallel().replace("carry", fx.transpiler.passes.carry.Carry("rings"))
    assert message(lambda: transpile(strategy=odd)) == "unknown algorithm 'rings'; did you mean 'ring'?"
    assert message(lambda: fx.strategies.zero1(algorithm="hring")) == "zero1: unknown algorithm 'hring'; did you mean 'ring'?"


def test_an_algorithm_that_does_not_do_what_the_strategy_needs():
    assert message(lambda: transpile(strategy=fx.strategies.reduce_broadcast(algorithm="double_binary_tree"))) == (
        "reduce of %w@GRAD over dp: double_binary_tree has only an all_reduce: its two trees have different roots; tree has one root"
    )


def test_a_hierarchy_on_one_host():
    assert message(lambda: transpile(strategy=fx.strategies.data_parallel(hierarchical=True))) == (
        "hierarchical=True needs several hosts: transpile(trainers=fx.Cluster(hosts=2, devices_per_host=4)); on one host, leave it off"
    )
    assert message(lambda: transpile(strategy=fx.strategies.zero1(hierarchical=True), trainers=fx.Mesh(dp=2, tp=2))) == (
        "hierarchical=True goes over the hosts of a Cluster, whose one axis is dp; with Mesh(dp=2, tp=2), leave it off"
    )


@dataclass(frozen=True)
class Forgetful(fx.transpiler.Pass):
    def rewrite_pair(self, pair, job):
        return pair.main


@dataclass(frozen=True)
class InPlace(fx.transpiler.Pass):
    def rewrite_pair(self, pair, job):
        pair.main.global_block().oplist.pop()
        return pair


def test_a_pass_that_breaks_its_contract():
    wrong = fx.strategies.data_parallel().before("groups", Forgetful())
    assert message(lambda: transpile(strategy=wrong)) == "pass Forgetful() must return a ProgramPair, got Program"
    wrong = fx.strategies.data_parallel().after("place", InPlace())
    assert message(lambda: transpile(strategy=wrong)) == (
        "pass InPlace() changed the program it was given; it must return new ones: pair.main.copy()"
    )


# -- meshes ------------------------------------------------------------------------------------------------------------------------------


def test_a_mesh_that_is_none():
    assert message(lambda: fx.Mesh()) == "Mesh: name at least one axis: Mesh(dp=4)"
    assert message(lambda: fx.Mesh(dp=0)) == "Mesh: axis dp must be an integer of at least 1, got 0"


def test_an_annotation_over_an_axis_that_is_not_there():
    def annotated():
        main, startup = fx.Program("net"), fx.Program("net_startup")
        with fx.unique_name.guard(), fx.program_guard(main, startup):
            x = fx.data("x", [-1, 4])
            loss = L.mean(L.fc(x, 3, param_attr=fx.ParamAttr(name="w", placement=fx.ir.Shard(1, "tp")), bias_attr=False))
            fx.optimizer.SGD(0.1).minimize(loss)
        return main, startup, loss

    assert message(lambda: transpile(annotated())) == (
        "'w' is annotated shard(1) over tp, but the ranks have no axis 'tp'; they have: dp; give trainers=fx.Mesh(dp=2, tp=2)"
    )
    transpile(annotated(), trainers=fx.Mesh(dp=1, tp=3)).verify()


# -- executors --------------------------------------------------------------------------------------------------------------------------


def test_places_that_do_not_match():
    text = message(lambda: fx.ParallelExecutor(transpile(), places=fx.cpu_places(3)), fx.ExecutionError)
    assert text.startswith("the program was transpiled for 2 ranks, 3 places were given")


def test_an_unknown_policy():
    text = message(lambda: fx.ParallelExecutor(transpile(), uneven="weigh"), fx.ExecutionError)
    assert text == "unknown policy uneven='weigh'; did you mean 'weight'?"


def test_an_executor_without_a_transpiler():
    text = message(lambda: fx.ParallelExecutor(7), fx.ExecutionError)
    assert text.startswith("ParallelExecutor takes the DistributeTranspiler that transpiled the program") and text.endswith("got int")


def test_fluids_parallel_executor_arguments_beside_a_transpiler():
    with pytest.raises(fx.ExecutionError) as e:
        fx.ParallelExecutor([], use_cuda=False, loss_name="loss")
    assert str(e.value) == (
        "ParallelExecutor has no argument 'use_cuda': instead of fluid's use_cuda, loss_name and main_program it takes the "
        "transpiler and the places, ParallelExecutor(t, places=fx.cuda_places())"
    )
