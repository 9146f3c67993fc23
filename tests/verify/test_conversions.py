"""The proof of rewrites that convert values: what they make is taken, and what is not the program that it was made of is refused."""

import pytest

import fluidx as fx
from fluidx.ir import Program, parse_pair
from fluidx.mixed_precision import AutoMixedPrecisionLists
from fluidx.rewrite import Amp, amp, rewritten
from fluidx.rewrite.amp import Casts
from fluidx.testing.models import TestModel, classifier
from fluidx.transpiler import transpiler
from fluidx.transpiler.passes.offload import MemoryCopies
from fluidx.verify.conversions import check_conversions
from tests.mixed_precision.test_bodies import BODIES, mlp, model
from tests.transpiler import control_models
from tests.transpiler.test_fsdp import deep

CASTS = Casts(AutoMixedPrecisionLists(), "bfloat16")


def parsed(text):
    return Program.parse_from_string("program p {\n" + text + "\n}")


def refused(before, after, promise=CASTS):
    with pytest.raises(fx.VerifyError) as e:
        check_conversions(before, after, promise)
    return str(e.value)


# -- what rewrites make --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("optimizer", [None, lambda: fx.optimizer.Momentum(0.125, 0.5)], ids=["forward", "training"])
def test_casts_in_bodies_are_proved(body, optimizer):
    main = model(body, optimizer=optimizer and optimizer()).main
    check_conversions(main, rewritten(main, [Amp()]), CASTS)


@pytest.mark.parametrize("kind", ["mlp", "conv", "batch_norm", "norm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_of_models_are_proved(kind, dtype):
    main = classifier(kind=kind).main.clone(for_test=True)
    check_conversions(main, rewritten(main, [Amp(dtype)]), Casts(AutoMixedPrecisionLists(), dtype))


OFFLOADED = {
    "classifier": lambda: classifier(fx.optimizer.Adam(0.01)),
    "branch": lambda: control_models.model((("cond", "flag", ("fc",), ("scale", "parameter")),)),
    "loop": lambda: control_models.model((("loop", 2, ("fc", "mean")),)),
    "updates in a branch": lambda: classifier(fx.optimizer.GradientMergeOptimizer(fx.optimizer.Momentum(0.5, 0.5), 2)),
}


def offloaded(m, strategy="fsdp"):
    """The pair before and after the pass."""
    made = getattr(fx.strategies, strategy)(cpu_offload=True)
    before = fx.DistributeTranspiler(made.__class__(made.name, made.options, made.steps[:-1]))
    before.transpile(program=m.main, startup_program=m.startup, trainers=2)
    t = fx.DistributeTranspiler(made).transpile(program=m.main, startup_program=m.startup, trainers=2)
    return before.pair, t.pair


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_copies_between_memories_are_proved(name, strategy):
    before, after = offloaded(OFFLOADED[name](), strategy)
    check_conversions(before.main, after.main, MemoryCopies())
    check_conversions(before.startup, after.startup, MemoryCopies())


# -- what is refused -----------------------------------------------------------------------------------------------------------------

HEAD = "data %x: f32[-1,4]; param %w: f32[4,4]; param %v: f32[4,4]; data %go: bool[1]\n".replace("; ", "\n")
PLAIN = HEAD + "forward:\n%h: f32[-1,4] = matmul(%x, %w)\n%y: f32[-1,4] = softmax(%h)"
HALF = HEAD + """forward:
  %x.h: bf16[-1,4] = cast(%x) {dtype="bfloat16"}
  %w.h: bf16[4,4] = cast(%w) {dtype="bfloat16"}
  %h: bf16[-1,4] = matmul(%x.h, %w.h)
  %h.f: f32[-1,4] = cast(%h) {dtype="float32"}
  %y: f32[-1,4] = softmax(%h.f)"""

WRONG = {
    "a cast is dropped": ("matmul(%x.h, %w.h)", "matmul(%x.h, %w)", "op matmul needs operands of one dtype"),
    "all casts of an operator are dropped": (
        "%h: bf16[-1,4] = matmul(%x.h, %w.h)", "%h: f32[-1,4] = matmul(%x, %w)", "op matmul works in bfloat16 and reads %x in float32",
    ),
    "what needs digits reads 16 bits": (
        "%y: f32[-1,4] = softmax(%h.f)", "%y: bf16[-1,4] = softmax(%h)", "op softmax works in float32 and reads %h in bfloat16",
    ),
    "a cast is of another value": ("cast(%w)", "cast(%v)", "op matmul reads %w.h, which is not the value %w that it read before"),
    "an operand is read twice": ("matmul(%x.h, %w.h)", "matmul(%x.h, %x.h)", "op matmul reads %x.h, which is not the value %w"),
    "an operator has other attributes": ("matmul(%x.h, %w.h)", "matmul(%x.h, %w.h) {transpose_y=true}", "has other attributes"),
    "an operator is another": ("softmax(%h.f)", "relu(%h.f)", "op relu is in the place of op softmax"),
    "an operator is missing": ("\n  %y: f32[-1,4] = softmax(%h.f)", "", "op softmax is missing"),
    "an operator is more": ("softmax(%h.f)", "softmax(%h.f)\n  %z: f32[-1,4] = softmax(%y)", "op softmax is new"),
    "a value ends as another": ("softmax(%h.f)", 'softmax(%h.f)\n  %v = cast(%w) {dtype="float32"}', "%v ends with another value"),
}  # fmt: skip


def test_the_right_one_is_taken():
    check_conversions(parsed(PLAIN), parsed(HALF), CASTS)


@pytest.mark.parametrize("old, new, said", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_conversion_is_refused(old, new, said):
    assert old in HALF
    assert said in refused(parsed(PLAIN), parsed(HALF.replace(old, new)))


WRITTEN_AGAIN = HEAD + """forward:
  %h: f32[-1,4] = matmul(%x, %w)
  %w = scale(%w) {scale=2.0}
  %y: f32[-1,4] = matmul(%x, %w)"""


@pytest.mark.parametrize("second", ["%w.h", "%w.h2"])
def test_a_copy_is_no_copy_once_its_source_is_written_again(second):
    after = HEAD + f"""forward:
  %x.h: bf16[-1,4] = cast(%x) {{dtype="bfloat16"}}
  %w.h: bf16[4,4] = cast(%w) {{dtype="bfloat16"}}
  %h: bf16[-1,4] = matmul(%x.h, %w.h)
  %w = scale(%w) {{scale=2.0}}
  %w.h2: bf16[4,4] = cast(%w) {{dtype="bfloat16"}}
  %y: bf16[-1,4] = matmul(%x.h, {second})"""
    if second == "%w.h2":
        check_conversions(parsed(WRITTEN_AGAIN), parsed(after), CASTS)
    else:
        assert "op matmul reads %w.h, which is not the value %w that it read before" in refused(parsed(WRITTEN_AGAIN), parsed(after))


LOOP = HEAD + """forward:
  %h: f32[-1,4] = assign(%x)
  [%h, %go] = while(%go, [%h, %go, %w], _) {{sub_block=block 1}}
  block 1 in 0 {{
    {body}
    %go = logical_not(%go)
  }}"""


@pytest.mark.parametrize(
    "ahead, body, said",
    [
        ("", '%h.b: bf16[-1,4] = cast(%h) {dtype="bfloat16"}', ""),
        ('%h.b: bf16[-1,4] = cast(%h) {dtype="bfloat16"}', "", "op matmul reads %h.b, which is not the value %h that it read before"),
    ],
    ids=["in the body", "in front of the loop"],
)
def test_a_copy_of_what_a_loop_carries_is_made_in_each_round(ahead, body, said):
    before = parsed(LOOP.format(body="%m: f32[-1,4] = matmul(%h, %w)\n    %h = assign(%m)"))
    made = f"""{body}
    %w.b: bf16[4,4] = cast(%w) {{dtype="bfloat16"}}
    %m: bf16[-1,4] = matmul(%h.b, %w.b)
    %m.f: f32[-1,4] = cast(%m) {{dtype="float32"}}
    %h = assign(%m.f)"""
    after = parsed(LOOP.format(body=made).replace("= assign(%x)", f"= assign(%x)\n  {ahead}"))
    if said:
        assert said in refused(before, after)
    else:
        check_conversions(before, after, CASTS)


def test_what_a_round_leaves_is_what_it_left_before():
    before = parsed(LOOP.format(body="%m: f32[-1,4] = relu(%h)\n    %h = assign(%m)"))
    after = parsed(LOOP.format(body="%m: f32[-1,4] = relu(%h)\n    %h = assign(%m)\n    %h = cast(%w) {dtype=\"float32\"}"))
    assert "reads" in refused(before, after) or "another value of %h" in refused(before, after)


def test_gradients_are_finished_where_they_were():
    main = mlp().main
    after = rewritten(main, [Amp()])
    block = after.global_block()
    block.oplist = [op.replace(role_var=()) if op.role_var[:1] == ("fc_0.w_0",) else op for op in block.oplist]
    assert "the final gradients differ from those before the rewrite: fc_0.w_0@GRAD" in refused(main, after)


MEMORY = {
    "a copy of another value": ("= memcpy_h2d(%w1)", "= memcpy_h2d(%w0)", "which is not the value %w1 that it read before"),
    "an update of what lies on the device": ("%w1@GRAD.sum.host,", "%w1@GRAD.sum,", "works in the memory of %w1"),
}


@pytest.mark.parametrize("old, new, said", MEMORY.values(), ids=MEMORY.keys())
def test_wrong_copies_between_memories_are_refused(old, new, said):
    main, startup = deep(2, 4)
    before, after = offloaded(TestModel(main, startup, None, None, []), "zero3")
    text = str(after)
    assert old in text, text
    assert said in refused(before.main, parse_pair(text.replace(old, new)).main, MemoryCopies())


# -- behind passes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["zero1,amp{dtype=bfloat16}", "fsdp{cpu_offload=true}", "fsdp{cpu_offload=true},amp"])
@pytest.mark.parametrize("body", BODIES)
def test_passes_are_proved_where_all_passes_are(strategy, body, monkeypatch):
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    proved = []
    monkeypatch.setattr(transpiler, "check_conversions", lambda *given: proved.append(given[2]) or check_conversions(*given))
    m = model(body, optimizer=fx.optimizer.Momentum(0.125, 0.5))
    fx.DistributeTranspiler(strategy).transpile(program=m.main, startup_program=m.startup, trainers=2)
    assert {type(p) for p in proved} == {*([Casts] if "amp" in strategy else []), *([MemoryCopies] if "offload" in strategy else [])}


def test_a_pass_that_converts_wrongly_is_named(monkeypatch):
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    monkeypatch.setattr(amp, "cast_program", lambda program, *_: program.global_block().oplist.pop(0))
    m = mlp()
    with pytest.raises(fx.VerifyError, match=r"behind step '[^']*', Amp\(\), the program does not compute what it was made of does: op"):
        fx.DistributeTranspiler("zero1,amp").transpile(program=m.main, startup_program=m.startup, trainers=2)


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("var %count: f32[2] persistable", "var %count: bf16[2] persistable", "declares %count otherwise"),
        ("var %count: f32[2] persistable", "var %count: f32[2]", "declares %count otherwise"),
        ("param %w: f32[2]", "var %w: f32[2] persistable", "declares %w otherwise"),
        ("var %count: f32[2] persistable", "", "does not declare %count"),
        ("data %x: f32[2]", "data %x: bf16[2]", "declares %x otherwise"),
    ],
)
def test_state_and_data_are_declared_as_they_were(old, new, said):
    text = "data %x: f32[2]\nparam %w: f32[2]\nvar %count: f32[2] persistable\n"
    text += "forward:\n%y: f32[1] = fill_constant() {shape=[1], value=1.0}"
    assert said in refused(parsed(text), parsed(text.replace(old, new)))
