"""Passes: one class for programs and for pairs, which holds them to what they state."""

import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest

import fluidx as fx
from fluidx.ir import ProgramPair
from fluidx.ir.pass_base import ONE_DEVICE, PASSES, Job, changed_fields, named, run_passes
from fluidx.testing.models import integer_mlp
from fluidx.transpiler import Pass, skip


@dataclass(frozen=True)
class TanhForRelu(Pass):
    """A rule."""

    most: int = 9

    def rule(self, b, op):
        if op.type != "relu":
            return None
        if b.block.desc(op.input("X")[0]).type.shape[-1] > self.most:
            return skip("it is too large")
        return b.tanh(op.input("X")[0], name=op.output("Out")[0])


@dataclass(frozen=True)
class DropLast(Pass):
    """A program."""

    def rewrite(self, program, job):
        new = program.copy()
        new.global_block().oplist.pop()
        return new


@dataclass(frozen=True)
class DropBoth(Pass):
    """A pair."""

    def rewrite_pair(self, pair, job):
        return ProgramPair(DropLast().rewrite(pair.main, job), DropLast().rewrite(pair.startup, job))


@dataclass(frozen=True)
class DropMain(Pass):
    def rewrite_pair(self, pair, job):
        return ProgramPair(DropLast().rewrite(pair.main, job), pair.startup)


@dataclass(frozen=True)
class Starts(Pass):
    def rewrite_pair(self, pair, job):
        startup = pair.startup.copy()
        startup.global_block().append_op("nccl_init", attrs={"group": "dp"})
        return ProgramPair(pair.main, startup)


@pytest.fixture
def pair():
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4], "float32")
        fx.layers.relu(fx.layers.relu(fx.layers.fc(x, 16)) @ fx.layers.create_parameter([16, 3], "float32"))
    return ProgramPair(main, startup)


def types(program):
    return [op.type for op in program.ops]


def test_a_rule_rewrites_a_program_and_the_main_program_of_a_pair(pair):
    before, job = str(pair), Job()
    made = TanhForRelu().run(pair.main, job)
    assert isinstance(made, fx.Program) and str(pair) == before
    assert types(made) == ["mul", "elementwise_add", "relu", "matmul", "tanh"]
    assert made.ops[-1].output_arg_names == pair.main.ops[-1].output_arg_names
    assert job.log == [f"TanhForRelu kept {pair.main.ops[2]}: it is too large"]
    both = TanhForRelu(most=16).run(pair)
    assert types(both.main) == ["mul", "elementwise_add", "tanh", "matmul", "tanh"] and both.startup is pair.startup


def test_a_rewrite_of_one_program_leaves_startup_alone(pair):
    assert types(DropLast().run(pair.main)) == types(DropLast().run(pair).main) == types(pair.main)[:-1]
    assert DropLast().run(pair).startup is pair.startup


def test_a_rewrite_of_a_pair_takes_a_program_if_it_writes_no_startup(pair):
    made = DropBoth().run(pair)
    assert (len(made.main.ops), len(made.startup.ops)) == (len(pair.main.ops) - 1, len(pair.startup.ops) - 1)
    assert types(DropMain().run(pair.main)) == types(pair.main)[:-1]
    with pytest.raises(fx.TranspileError, match=r"pass Starts\(\) writes a startup program too; give it a ProgramPair"):
        Starts().run(pair.main)


@dataclass(frozen=True)
class Prepared(Pass):
    ensures = ("prepared",)
    ends = (ONE_DEVICE,)


@dataclass(frozen=True)
class Needy(Pass):
    requires = ("prepared", "finished")


@dataclass(frozen=True)
class OfSource(Pass):
    requires = (ONE_DEVICE,)


def test_what_a_pass_requires_must_hold(pair):
    with pytest.raises(fx.TranspileError, match=r"pass Needy\(\) requires programs that are prepared and finished; a pass that ensures it"):
        Needy().run(pair)
    job = Job()
    Prepared().run(pair, job)
    assert job.facts == {"prepared"}
    with pytest.raises(fx.TranspileError, match=r"pass Needy\(\) requires programs that are finished"):
        Needy().run(pair.main, job)
    Needy().run(pair, Job(facts={"prepared", "finished"}))


def test_a_fact_that_a_step_ended_names_that_step(pair):
    OfSource().run(pair)
    with pytest.raises(fx.TranspileError, match=r"that are for one device; put it before step 'first': \.before\('first', OfSource\(\)\)"):
        run_passes([("first", Prepared()), ("second", OfSource())], pair, Job(), lambda *_: None)


@dataclass(frozen=True)
class Changes(Pass):
    def rewrite(self, program, job):
        program.global_block().oplist.pop()
        return program


@dataclass(frozen=True)
class Declares(Pass):
    def rewrite(self, program, job):
        program.global_block().create_var("new", [1], "float32")
        return program.copy()


@dataclass(frozen=True)
class ChangesStartup(Pass):
    def rewrite_pair(self, pair, job):
        pair.startup.global_block().oplist.pop()
        return pair


@pytest.mark.parametrize("one", [Changes(), Declares(), ChangesStartup()])
def test_a_pass_that_changes_what_it_is_given_is_refused(pair, one):
    with pytest.raises(fx.TranspileError, match="changed the program it was given; it must return new ones"):
        one.run(pair)


@dataclass(frozen=True)
class Nothing(Pass):
    def rewrite(self, program, job):
        return None


@dataclass(frozen=True)
class OnlyMain(Pass):
    def rewrite_pair(self, pair, job):
        return pair.main


def test_a_pass_gives_back_the_kind_that_it_was_given(pair):
    with pytest.raises(fx.TranspileError, match=r"pass Nothing\(\) must return a Program, got NoneType"):
        Nothing().run(pair.main)
    with pytest.raises(fx.TranspileError, match=r"pass OnlyMain\(\) must return a ProgramPair, got Program"):
        OnlyMain().run(pair)


@dataclass(frozen=True)
class Drops(DropBoth):
    """A pass as they were written before `rewrite` and `rewrite_pair`."""

    returns: bool = True

    def run(self, unit, job):
        job.log.append(type(unit).__name__)
        result = super().run(unit, job)
        return result if self.returns else None


def test_a_pass_that_overrides_run_is_checked_too(pair):
    job = Job()
    assert isinstance(Drops().run(pair, job), ProgramPair)
    assert str(Drops().run(pair, job)) == str(DropBoth().run(pair))
    assert job.log == ["ProgramPair", "ProgramPair"] and job.running == []
    with pytest.raises(fx.TranspileError, match="must return a ProgramPair, got NoneType"):
        Drops(returns=False).run(pair)


def test_a_class_of_passes_overrides_one_way():
    with pytest.raises(TypeError, match="Two overrides rule and rewrite: a pass overrides one of rule, rewrite, rewrite_pair"):
        type("Two", (Pass,), {"rule": lambda self, b, op: None, "rewrite": lambda self, program, job: program})
    with pytest.raises(TypeError, match="More overrides rule and rewrite_pair"):
        type("More", (DropBoth,), {"rule": lambda self, b, op: None})


def test_rewrites_are_passes():
    assert fx.rewrite.Rewrite is Pass
    assert {PASSES[n] for n in ("drop_dead", "join_attention")} == {fx.rewrite.DropDead, fx.rewrite.JoinAttention}
    exported = [v for v in vars(fx.rewrite).values() if isinstance(v, type) and issubclass(v, Pass) and v is not Pass]
    assert set(exported) <= set(PASSES.values())


@dataclass(frozen=True, repr=False)
class Optioned(Pass):
    a: int = 1
    names: tuple = field(default_factory=tuple)


def test_the_recipe_has_what_is_not_by_default():
    assert repr(Optioned()) == "Optioned()" and changed_fields(Optioned()) == []
    assert repr(Optioned(names=("x",))) == "Optioned(names=('x',))"


def test_a_name_in_texts_stands_for_one_class():
    other = type("DropDead", (Pass,), {"__module__": __name__})
    with pytest.raises(TypeError, match="texts call fluidx.rewrite.base.DropDead 'drop_dead' already"):
        named(other)


def test_what_is_fetched_is_what_nobody_reads_of_the_first_program(pair):
    job = Job()
    assert job.fetched(pair.main) == (pair.main.ops[-1].output_arg_names[0],)
    assert job.fetched(DropLast().run(pair.main)) == job.fetch
    assert Job(fetch=("a",)).fetched(pair.main) == ("a",)


def test_a_program_that_users_hold_becomes_what_a_pass_makes_of_it(pair):
    block, v = pair.main.global_block(), pair.main.global_block().var("x")
    version = pair.main.version
    made = TanhForRelu().run(pair.main)
    pair.main.become(made)
    assert pair.main == made and pair.main.global_block() is block is v.block and pair.main.version > version
    assert v.shape == (-1, 4)


def test_blocks_come_and_go_as_in_the_program_that_a_pass_made():
    def loop():
        program = fx.Program("loop")
        with fx.unique_name.guard(), fx.program_guard(program):
            i = fx.layers.fill_constant([1], "int64", 0)
            if sub_blocks:
                fx.layers.while_loop(lambda i: fx.layers.less_than(i, fx.layers.fill_constant([1], "int64", 3)), lambda i: [i + 1], [i])
        return program

    sub_blocks = True
    looping = loop()
    sub_blocks = False
    straight = loop()
    straight.become(looping)
    assert straight == looping and [b.program for b in straight.blocks] == [straight] * len(looping.blocks)
    straight.become(loop())
    assert straight.num_blocks == 1 and looping.num_blocks > 1


# -- as steps of strategies -----------------------------------------------------------------------------------------------------


def head():
    """Attention written with small layers, trained."""
    L = fx.layers
    main, startup = fx.Program("head"), fx.Program("head_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4, 8], "float64")
        q, k, v = (L.fc(x, 8, num_flatten_dims=2, bias_attr=False) for _ in range(3))
        loss = L.mean(L.matmul(L.softmax(L.matmul(q, k, transpose_y=True, alpha=0.5)), v))
        fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup


def transpiled(strategy, programs, trainers=2):
    main, startup = programs
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=trainers)


def test_a_rewrite_is_a_step_of_a_strategy(monkeypatch):
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    zero1, join = fx.strategies.zero1(), fx.rewrite.JoinAttention()
    stepped = zero1.before("groups", join)
    assert stepped == zero1.with_rewrites(join) and stepped.steps_named()[:2] == ["JoinAttention", "groups"]
    assert str(stepped) == "zero1,join_attention" and repr(stepped).endswith(".with_rewrites(JoinAttention())")
    t = transpiled(stepped, head())
    assert "scaled_dot_product_attention" in types(t.get_trainer_program(1)) and "softmax" in str(t.diff())
    t.verify()


def test_a_rewrite_is_printed_and_checked_as_every_step(monkeypatch, capsys):
    monkeypatch.setenv("FLUIDX_DEBUG", "2")
    transpiled("data_parallel,join_attention", head())
    said = capsys.readouterr().err
    assert said.startswith("fluidx: JoinAttention: JoinAttention(): ") and "- " in said.partition("fluidx: groups: ")[0]


@pytest.mark.parametrize("step", ["groups", "place", "lower", "bucket"])
def test_a_rewrite_of_the_source_is_refused_behind_the_groups(step):
    behind = fx.strategies.data_parallel().after(step, fx.rewrite.JoinAttention())
    with pytest.raises(fx.TranspileError, match=r"JoinAttention\(\) requires .* for one device; put it before step 'groups'"):
        transpiled(behind, head())


@dataclass(frozen=True)
class Halves(Pass):
    """Scale every mean by a half: wrong, and a proof must say so."""

    def rule(self, b, op):
        return b.scale(b.mean(op.input("X")[0], suffix="whole"), scale=0.5, name=op.output("Out")[0]) if op.type == "mean" else None


def test_a_proof_takes_the_word_of_rewrites_of_the_source_only():
    """Others may stand in front too: what they do is proved, whatever comes behind them."""
    join = fx.rewrite.JoinAttention()
    for strategy in (fx.strategies.zero1().with_rewrites(Halves(), join), fx.strategies.zero1().with_rewrites(join, Halves())):
        with pytest.raises(fx.VerifyError):
            transpiled(strategy, head()).verify()


def test_rewrites_of_one_class_are_steps_of_their_own():
    drop = fx.rewrite.DropDead()
    strategy = fx.strategies.data_parallel().with_rewrites(drop, fx.rewrite.MergeEqual(), drop)
    assert strategy.steps_named()[:4] == ["DropDead", "MergeEqual", "DropDead_1", "groups"]
    assert fx.strategies.get(str(strategy)) == strategy
    transpiled(strategy, head()).verify()


def test_dead_operators_are_dropped_by_what_is_fetched_of_the_given_program():
    main, startup = fx.Program("copies"), fx.Program("copies_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        y = fx.layers.fc(fx.layers.assign(fx.data("x", [-1, 4], "float32")), 1)
        fx.layers.mean(y)
    t = transpiled("data_parallel,drop_identities,drop_dead", (main, startup))
    assert "assign" not in types(t.main)


def test_passes_and_strategies_of_a_module_are_named_by_it(monkeypatch):
    module = ModuleType("my_passes")
    exec(
        "from dataclasses import dataclass\nimport fluidx as fx\n"
        "@dataclass(frozen=True)\n"
        "class Mine(fx.transpiler.Pass):\n"
        "    most: int = 1\n"
        "    word: str = ''\n"
        "LIMITED = Mine(2)\n"
        "@dataclass(frozen=True)\n"
        "class Needs(fx.transpiler.Pass):\n"
        "    most: int\n"
        "def deep(depth):\n"
        "    return fx.strategies.zero1()\n"
        "def small(bucket_mb=1, **more):\n"
        "    return fx.strategies.data_parallel(bucket_mb=bucket_mb).with_rewrites(fx.rewrite.DropDead())\n"
        "def plain(depth=1):\n"
        "    return fx.strategies.zero1()\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "my_passes", module)
    module.Mine.__module__ = "my_passes"
    get = fx.strategies.get
    made = get("my_passes:Mine{most=3,word=ring},zero1")
    assert made == fx.strategies.zero1().with_rewrites(module.Mine(3, "ring"))
    assert str(made) == "zero1,my_passes:Mine{most=3,word=ring}" and get(str(made)) == made
    assert get("zero1,my_passes:LIMITED") == fx.strategies.zero1().with_rewrites(module.Mine(2))
    own = get("my_passes:small{bucket_mb=4,x=true},join_attention")
    assert [type(p).__name__ for p in own.rewrites] == ["DropDead", "JoinAttention"]
    assert str(own) == "my_passes:small{bucket_mb=4,x=true},join_attention" and get(str(own)) == own
    assert str(get("my_passes:plain")) == "my_passes:plain"
    for text, said in (
        ("my_passes:Mine", "must have one strategy, found none"),
        ("zero1,my_passes:Mine{mst=3}", "my_passes:Mine has no option 'mst'; did you mean 'most'?"),
        ("zero1,my_passes:LIMITED{most=3}", "my_passes:LIMITED has no option 'most'; it has none"),
        ("my_passes:plain{dept=3}", "my_passes:plain has no option 'dept'; did you mean 'depth'?"),
        ("zero1,my_passes:Nine", "my_passes has no 'Nine'"),
        ("zero1,no_such_module:Mine", "cannot import 'no_such_module'"),
        ("zero1,my_passes:Needs", "my_passes:Needs needs most; write my_passes:Needs{most=...}"),
        ("my_passes:deep", "my_passes:deep needs depth; write my_passes:deep{depth=...}"),
        (":Mine", "'' is no name of a module"),
        (".my_passes:Mine", "'.my_passes' is no name of a module"),
        ("zero1,channels_last{always=no}", "channels_last: always is true or false, got 'no'"),
        ("zero1{name=x}", "zero1 has no option 'name'"),
    ):
        with pytest.raises(fx.TranspileError) as e:
            get(text)
        assert said in str(e.value)


def test_a_class_that_no_module_has_gives_no_text():
    @dataclass(frozen=True)
    class Local(Pass):
        pass

    strategy = fx.strategies.zero1().with_rewrites(Local())
    assert str(strategy) == repr(strategy) and repr(strategy).startswith("zero1().with_rewrites(")


def test_a_plain_pass_of_the_users_in_front_is_proved():
    m = integer_mlp()
    t = transpiled(fx.strategies.data_parallel().before("groups", TanhForRelu()), (m.main, m.startup))
    if any(op.type == "relu" for op in m.main.ops):
        with pytest.raises(fx.VerifyError):
            t.verify()


@pytest.mark.parametrize("given", [None, 5, "text"])
def test_a_step_that_returns_no_program_is_refused_by_its_name(given):
    @dataclass(frozen=True)
    class Returns(Pass):
        def rewrite(self, program, job):
            return given

    m = integer_mlp()
    for strategy in (fx.strategies.zero1().with_rewrites(Returns()), fx.strategies.zero1().after("lower", Returns())):
        with pytest.raises(fx.TranspileError, match=rf"Returns\(\) must return a Program, got {type(given).__name__}"):
            transpiled(strategy, (m.main, m.startup))


@pytest.mark.parametrize("kind", ["requires", "ensures", "ends"])
@pytest.mark.parametrize("facts", [ONE_DEVICE, 5, (5,)])
def test_facts_are_a_tuple_of_texts(kind, facts):
    with pytest.raises(TypeError, match=f"Odd.{kind}: facts are a tuple of texts"):
        type("Odd", (Pass,), {kind: facts})


@pytest.mark.parametrize("word", ['a"b', "a'b", "a\\b", "a\nb", "6\\", "4", "", "none", "\\n"])
def test_any_word_without_two_kinds_of_quotes_is_an_option_in_a_text(word, monkeypatch):
    module = ModuleType("my_words")
    exec(
        "from dataclasses import dataclass\nimport fluidx as fx\n"
        "@dataclass(frozen=True)\nclass Says(fx.transpiler.Pass):\n    word: str = 'x'\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "my_words", module)
    module.Says.__module__ = "my_words"
    strategy = fx.strategies.zero1().with_rewrites(module.Says(word))
    assert str(strategy).startswith("zero1,my_words:Says{word=") and fx.strategies.get(str(strategy)) == strategy


def test_an_option_that_a_pass_refuses_points_at_the_line_of_the_text():
    with pytest.raises(fx.FluidxError) as e:
        fx.strategies.get("zero1,amp{dtype=int8}")
    assert f'written at "{__file__}", line' in str(e.value) and "<string>" not in str(e.value)


@pytest.mark.parametrize("found", [5, "x", [], (), False])
def test_a_rule_that_writes_nothing_keeps_the_operator_or_is_refused(found):
    @dataclass(frozen=True)
    class Nothing(Pass):
        def rule(self, b, op):
            return found if op.type == "relu" else None

    said = r"pass .*Nothing\(\): rule returned .* and wrote no operator in place of .*relu.*; return None to keep it.*overrides rewrite"
    with pytest.raises(fx.TranspileError, match=said):
        Nothing().run(integer_mlp().main)


def test_a_pass_removes_operators_by_rewrite():
    main = integer_mlp().main
    assert len(DropLast().run(main).ops) == len(main.ops) - 1


@pytest.mark.parametrize("step", ["groups", "place", "carry"])
def test_no_pass_ensures_one_device_after_it_has_ended(step):
    @dataclass(frozen=True)
    class BackToOne(Pass):
        ensures = (ONE_DEVICE,)

    with pytest.raises(fx.TranspileError, match=r"BackToOne\(\) ensures programs that are for one device, which step 'groups' ended"):
        transpiled(fx.strategies.data_parallel().after(step, BackToOne()), head())
    transpiled(fx.strategies.data_parallel().before("groups", BackToOne()), head())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fx.rewrite.Recompute(3), "Recompute() got 1 argument by position; it takes: none"),
        (lambda: fx.rewrite.ChannelsLast(1, 2), "ChannelsLast() got 2 arguments by position; it takes: always"),
        (lambda: fx.rewrite.Amp(dtipe="float16"), "Amp() got an unexpected keyword argument 'dtipe'; did you mean 'dtype'?"),
    ],
)
def test_wrong_options_of_a_pass_list_those_that_it_takes(make, message):
    with pytest.raises(TypeError) as failure:
        make()
    assert str(failure.value) == message
