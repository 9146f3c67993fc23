"""Ranks that run alike cost one rank's work, and one rank among many that is not alike is found."""

import pytest

import fluidx as fx
from fluidx.ir import Operator, ProgramPair, TensorType, parse_pair
from fluidx.ir.change_stamps import Stamp
from fluidx.verify import verify_ranks
from fluidx.verify.mesh import RankGroups
from fluidx.verify.operator_meaning import Operators
from fluidx.verify.rank_classes import RankClasses
from tests.verify.programs import BRANCHES, BRANCHES_CUT, DATA_PARALLEL, MODEL, UPDATE, ranks_of

SUM = 'dist:\n  %w@GRAD.sum: f32[4,3] = all_reduce(%w@GRAD) {group="dp", op="sum"}\n'


def deep():
    main, startup = fx.Program("deep"), fx.Program("deep_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 8], "float32")
        for _ in range(6):
            x = fx.layers.fc(x, 8, act="relu")
        fx.optimizer.Momentum(0.1, 0.9).minimize(fx.layers.mean(x))
    return main, startup


def transpiled(ranks, strategy="data_parallel"):
    main, startup = deep()
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=ranks)


@pytest.fixture
def work(monkeypatch):
    """How often operators are looked at, numbered, evaluated, and placements brought to their one form."""
    done = {}

    def counted(where, name):
        plain = getattr(where, name)

        def count(*args, **kwargs):
            done[name] = done.get(name, 0) + 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(where, name, count)

    for where, name in (
        (Operators, "class_of"),
        (Operators, "on_all_ranks"),
        (RankClasses, "_code"),
        (Operator, "__eq__"),
        (RankGroups, "_make_canonical"),
    ):
        counted(where, name)
    return done


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1"])
def test_the_work_does_not_grow_with_ranks_that_run_alike(work, strategy):
    found = []
    for ranks in (4, 64, 256):
        # the owners of parameters in startup are more with more ranks, and so are their buckets
        t = transpiled(ranks, fx.strategies.get(strategy, bucket_mb=0))
        t.get_trainer_program(0)
        work.clear()
        report = t.verify()
        assert report.ranks == ranks
        found.append(dict(work))
    assert found[0] == found[1] == found[2]
    assert found[0]["class_of"] > 100 and "_code" not in found[0] and "__eq__" not in found[0]


def test_programs_that_were_read_from_text_are_looked_at_once_too(work):
    """They share nothing; they are compared, and then one of them is looked at."""
    found = []
    for ranks in (2, 32):
        pairs = [parse_pair(t) for t in ranks_of(ranks, SUM + UPDATE)]
        work.clear()
        verify_ranks(parse_pair(MODEL), [p.main for p in pairs], [p.startup for p in pairs])
        found.append((work["class_of"], work["on_all_ranks"], work.get("_code", 0)))
    assert found[0] == found[1]


def test_a_model_with_branches_is_looked_at_once(work):
    found = []
    for ranks in (2, 32):
        texts = [BRANCHES_CUT[0].replace("[0, 1]", str(list(range(ranks))))] * ranks
        pairs = [parse_pair(t) for t in texts]
        work.clear()
        verify_ranks(parse_pair(BRANCHES), [p.main for p in pairs], [p.startup for p in pairs])
        found.append((work["class_of"], work["on_all_ranks"], work.get("_code", 0)))
    assert found[0] == found[1]


def test_one_rank_that_differs_adds_its_own_differences(work):
    """An operator more on one rank: all operators are numbered for two programs, and evaluated for all ranks together."""
    t = transpiled(64, fx.strategies.data_parallel(bucket_mb=0))  # two collectives that can be swapped
    mains, startups = ranks_of_transpiled(t)
    block = mains[17].global_block()
    block.oplist.append(block.oplist[-1].replace(type="assign", inputs={"X": ("x",)}, outputs={"Out": ("more",)}, attrs={}))
    block.descs["more"] = block.descs["x"].changed(name="more", is_data=False)
    work.clear()
    t.verify()
    alike = dict(work)
    work.clear()
    verify_ranks(t.source, mains, startups)
    assert work["class_of"] <= alike["class_of"] + 1
    assert work["_code"] <= len(block.oplist) + 1


# -- one rank among 64 -------------------------------------------------------------------------------------------------------------


def ranks_of_transpiled(t):
    return tuple([get(r).copy() for r in range(t.world_size)] for get in (t.get_trainer_program, t.get_startup_program))


def at(block, type_):
    return next(k for k in range(len(block.oplist) - 1, -1, -1) if block.oplist[k].type == type_)


def attribute(type_, **changed):
    def change(main, startup):
        for p in (main, startup):
            block = p.global_block()
            if any(op.type == type_ for op in block.oplist):
                k = at(block, type_)
                block.oplist[k] = block.oplist[k].replace(attrs={**block.oplist[k].attrs, **changed})
                return
        raise AssertionError(type_)

    return change


def desc(name, **changed):
    def change(main, startup):
        block = main.global_block()
        block.descs[name] = block.descs[name].changed(**changed)

    return change


def left_out(type_):
    def change(main, startup):
        block = main.global_block()
        del block.oplist[at(block, type_)]

    return change


def another_op(main, startup):
    block = main.global_block()
    k = at(block, "relu")
    block.oplist[k] = block.oplist[k].replace(type="tanh")


def another_operand(main, startup):
    block = main.global_block()
    k = at(block, "momentum")
    other = next(op for op in block.oplist if op.type == "momentum")
    block.oplist[k] = block.oplist[k].replace(inputs={**block.oplist[k].inputs, "Velocity": other.inputs["Velocity"]})


def swapped(main, startup):
    ops = main.global_block().oplist
    a, b = [k for k, op in enumerate(ops) if op.type == "all_reduce"][:2]
    ops[a], ops[b] = ops[b], ops[a]


def not_initialised(main, startup):
    del startup.global_block().oplist[at(startup.global_block(), "broadcast")]


def other_seeds(main, startup):
    """And nothing is handed round, which would make up for it."""
    block = startup.global_block()
    kept = [op for op in block.oplist if op.type != "broadcast"]
    block.oplist[:] = [op.replace(attrs={**op.attrs, "seed": 5}) if "seed" in op.attrs else op for op in kept]


def not_declared(main, startup):
    del main.global_block().descs["fc_0.w_0"]


def a_state_more(main, startup):
    block = main.global_block()
    block.descs["more"] = block.descs["fc_0.w_0"].changed(name="more", is_parameter=False)
    block.oplist.append(
        block.oplist[-1].replace(type="assign", inputs={"X": ("fc_0.w_0",)}, outputs={"Out": ("more",)}, attrs={}, role_var=())
    )


def other_groups(main, startup):
    for p in (main, startup):
        p.groups = {g: (s[0][::-1],) for g, s in p.groups.items()}


def another_rank(main, startup):
    main.rank += 1


CHANGES = {
    "a reduction": attribute("all_reduce", op="max"),
    "a group": attribute("all_reduce", group="nowhere"),
    "a factor": attribute("momentum", mu=0.8),
    "a switch": attribute("momentum", use_nesterov=True),
    "a number in place of a truth value": attribute("momentum", use_nesterov=0),
    "a truth value in place of a number": attribute("reduce_mean_grad", keep_dim=0),
    "a constant": attribute("fill_constant", value=3.0),
    "a root in startup": attribute("broadcast", root=40),
    "every seed in startup": other_seeds,
    "a type": desc("fc_0.w_0", type=TensorType("float32", (8, 9))),
    "a placement": desc("fc_0.w_0", placement=(fx.ir.Shard(0, "dp"),)),
    "what is kept": desc("fc_0.w_0", persistable=False),
    "what is fed": desc("fc_0.w_0", is_data=True),
    "a variable less": not_declared,
    "a state more": a_state_more,
    "a collective less": left_out("all_reduce"),
    "an update less": left_out("momentum"),
    "another op": another_op,
    "another operand": another_operand,
    "two collectives in another order": swapped,
    "nothing to begin with": not_initialised,
    "groups in another order": other_groups,
    "a rank's number": another_rank,
}


@pytest.fixture(scope="module")
def of_64():
    t = transpiled(64, fx.strategies.data_parallel(bucket_mb=0))  # two collectives that can be swapped
    t.verify()
    return t


@pytest.mark.parametrize("rank", [0, 17, 63])
@pytest.mark.parametrize("what", CHANGES)
def test_one_changed_rank_among_64_is_found(of_64, what, rank):
    mains, startups = ranks_of_transpiled(of_64)
    CHANGES[what](mains[rank], startups[rank])
    with pytest.raises(fx.VerifyError) as error:
        verify_ranks(of_64.source, mains, startups)
    assert "cannot be checked" not in str(error.value), str(error.value)


def test_a_section_or_a_device_of_one_rank_changes_nothing_that_is_computed(of_64):
    mains, startups = ranks_of_transpiled(of_64)
    block = mains[17].global_block()
    k = at(block, "relu")
    block.oplist[k] = block.oplist[k].replace(role=fx.ir.Role.OPTIMIZE, device="gpu:1")
    verify_ranks(of_64.source, mains, startups)


@pytest.mark.parametrize("rank", [0, 17, 63])
@pytest.mark.parametrize(
    "what", ["an operator of a block", "a block's variable", "a block that lies elsewhere", "a block's operator that writes outside"]
)
def test_one_changed_block_among_64_is_found(what, rank):
    text = BRANCHES_CUT[0].replace("[0, 1]", str(list(range(64))))
    pair = parse_pair(text)
    mains, startups = [pair.main.copy() for _ in range(64)], [pair.startup.copy() for _ in range(64)]
    source = parse_pair(BRANCHES)
    verify_ranks(source, mains, startups)
    block = mains[rank].blocks[3]
    if what == "an operator of a block":
        block.oplist[0] = block.oplist[0].replace(type="sigmoid")
    elif what == "a block's variable":
        block.descs["d"] = block.descs["d"].changed(placement=())
    elif what == "a block that lies elsewhere":
        block.parent_idx = 2
    else:
        block.oplist.append(block.oplist[0].replace(outputs={"Out": ("w",)}, inputs={"X": ("w",)}))
    with pytest.raises(fx.VerifyError) as error:
        verify_ranks(source, mains, startups)
    assert "cannot be checked" not in str(error.value), str(error.value)


def test_a_program_that_is_changed_in_place_is_proved_anew():
    """Also where the change is one that Python calls equal."""
    t = transpiled(8)
    report = t.verify()
    assert t.verify() is report
    block = t.get_trainer_program(5).global_block()
    k = at(block, "momentum")
    op = block.oplist[k]
    block.oplist[k] = op.replace(attrs={**op.attrs, "use_nesterov": 0})
    with pytest.raises(fx.VerifyError, match="use_nesterov"):
        t.verify()
    block.oplist[k] = op
    assert t.verify() == report
    block.descs["more"] = block.descs["x"].changed(name="more", persistable=True)
    with pytest.raises(fx.VerifyError, match="more"):
        t.verify()


def test_operators_that_python_would_call_equal_are_not():
    op = Operator("scale", {"X": ("x",)}, {"Out": ("y",)}, {"scale": 1.0, "shape": (0.0, 1)})
    for attrs in ({"scale": 1}, {"scale": True}, {"shape": (-0.0, 1)}, {"shape": (0.0, True)}):
        other = op.replace(attrs={**op.attrs, **attrs})
        assert op != other and not op == other and [op] != [other]
    assert op == op.replace(attrs=dict(op.attrs)) and hash(op) == hash(op.replace(attrs=dict(op.attrs)))


def test_programs_that_say_the_same_are_remembered_once():
    pairs = [parse_pair(t) for t in DATA_PARALLEL] + [parse_pair(DATA_PARALLEL[0])]
    programs = [p.main for p in pairs]
    twins = Stamp(programs).twins(programs)
    assert [ranks for _, ranks in twins] == [[0, 1, 2]]
    block = programs[1].global_block()
    block.oplist[0] = block.oplist[0].replace(type="tanh")
    assert [ranks for _, ranks in Stamp(programs).twins(programs)] == [[0, 2], [1]]


def test_the_same_program_for_several_ranks():
    pair = parse_pair(DATA_PARALLEL[0])
    assert verify_ranks(parse_pair(MODEL), [pair.main] * 2, [pair.startup] * 2).ranks == 2
    assert verify_ranks(ProgramPair(*[fx.Program("nothing")] * 2), [fx.Program("nothing")], [fx.Program("nothing")]).values == 0
