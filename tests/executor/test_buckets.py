"""Buckets in plans: gradients are made in the value that is sent, what comes back is looked at where it lies, and nothing is copied."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.run.bind import bind
from fluidx.ir import Program, TensorType
from fluidx.testing.models import classifier

ROUNDING = 64  # buffers begin at multiples of 64 bytes


def planned(strategy, kind="mlp", rank=0, **options):
    model = classifier(kind=kind)
    t = fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=2)
    p = dry_plan(t.get_trainer_program(rank), batch=16)
    check_storage(p)
    return p, [g for _, g in model.gradients]


def kernels(p, name):
    return [step.kernel for step in p.steps if step.op.type == name]


@pytest.mark.parametrize("kind", ["mlp", "conv", "norm"])
def test_gradients_are_made_in_their_bucket_and_read_out_of_it(kind):
    p, gradients = planned(fx.strategies.data_parallel(), kind)
    assert kernels(p, "pack") == ["joined"] and kernels(p, "unpack") == ["view"]
    (sent,) = [step.op for step in p.steps if step.op.type == "all_reduce"]
    whole = p.values[sent.input_arg_names[0]]
    makers = {n: step.op.type for step in p.steps for n in step.op.output_arg_names}
    assert "matmul" in {makers[g] for g in gradients}
    # one behind the other, and what comes back lies where it was sent from
    ends = 0
    for g in next(step.op for step in p.steps if step.op.type == "pack").input_arg_names:
        assert (p.values[g].buffer, p.values[g].strided.offset) == (whole.buffer, ends)
        ends += p.values[g].type.nbytes
    assert ends == whole.type.nbytes
    assert {p.values[n].buffer for n in (*sent.output_arg_names, *[f"{g}.sum" for g in gradients])} == {whole.buffer}


@pytest.mark.parametrize("kind", ["mlp", "conv", "norm"])
def test_buckets_take_no_memory_beyond_that_of_the_gradients(kind):
    (bucket, gradients), (alone, _) = (planned(fx.strategies.data_parallel(bucket_mb=mb), kind) for mb in (25, 0))
    # all gradients are there together either way, before the updates; a bucket is there from its first one on
    ahead = sum(bucket.values[g].type.nbytes for g in gradients) - min(bucket.values[g].type.nbytes for g in gradients)
    assert bucket.arena_bytes <= alone.arena_bytes + ahead + ROUNDING * len(gradients)


def test_flat_ranges_of_a_bucket_are_updated_in_place():
    for rank in (0, 1):
        p, _ = planned(fx.strategies.zero2(), rank=rank)
        # gradients, and new values; the parameters themselves are no parts of a bucket
        assert kernels(p, "pack") == ["joined", "joined"] and kernels(p, "unpack")[0] == "view"


# -- operands of every kind -----------------------------------------------------------------------------------------------------

TEXT = """
program p {
  data %x: f32[4,4]
  param %w: f32[3]
forward:
  %a: f32[4,4] = softmax(%x)
  %b: f32[2,8] = reshape(%a) {shape=[2, 8]}
  %c: f32[4] = reduce_sum(%x) {dim=[0]}
  %d: f32[4] = relu(%c)
  %e: f32[4] = tanh(%d)
  %all: f32[SIZE] = pack([OPERANDS])
  %more: f32[SIZE] = scale(%all) {scale=2.0}
}
"""
SIZES = {"a": 16, "b": 16, "c": 4, "d": 4, "e": 4, "x": 16, "w": 3}
CASES = {
    # what lies in the bucket from the start, or whether some do
    "all made there": ("c a", "joined"),
    "through a view": ("c b", "joined"),
    "the end of a chain": ("e a", "joined"),
    "what is fed and what is kept": ("x w c", "native"),
    "twice the same": ("c c a", "native"),
    "what others read too": ("c e a", "joined"),
}


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_what_can_be_made_in_a_bucket_is_and_the_rest_is_copied_there(case, natively):
    names, kernel = CASES[case]
    names = names.split()
    text = TEXT.replace("SIZE", str(sum(SIZES[n] for n in names))).replace("OPERANDS", ", ".join(f"%{n}" for n in names))
    program = Program.parse_from_string(text)
    x, w = np.random.default_rng(0).standard_normal((4, 4)).astype("float32"), np.arange(3, dtype="float32")
    scope = Scope()
    scope.set("w", w)
    fetch = ["all", "more", *dict.fromkeys(names)]
    p = plan(program, {"x": TensorType("float32", (4, 4))}, fetch, scope.arrays, RunContext(), natively=natively)
    check_storage(p)
    assert kernels(p, "pack") == [kernel if natively or kernel == "joined" else "numpy"]
    whole, more, *parts = bind(p, scope, RunContext()).run({"x": x})
    values = dict(zip(dict.fromkeys(names), parts, strict=True))
    np.testing.assert_array_equal(whole, np.concatenate([values[n].reshape(-1) for n in names]))
    np.testing.assert_array_equal(more, 2 * whole)
    a = np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)
    c = x.sum(0)
    want = {"a": a, "b": a.reshape(2, 8), "c": c, "d": np.maximum(c, 0), "e": np.tanh(np.maximum(c, 0)), "x": x, "w": w}
    for n, v in values.items():
        np.testing.assert_allclose(v, want[n], rtol=1e-5, atol=1e-6)  # other orders of a few additions


@pytest.mark.parametrize("names", ["c a", "x w c"])
def test_a_plan_whose_bucket_has_an_operand_elsewhere_is_refused(names):
    names = names.split()
    text = TEXT.replace("SIZE", str(sum(SIZES[n] for n in names))).replace("OPERANDS", ", ".join(f"%{n}" for n in names))
    scope = Scope()
    scope.set("w", np.zeros(3, "float32"))
    p = plan(Program.parse_from_string(text), {"x": TensorType("float32", (4, 4))}, ["more"], scope.arrays, RunContext())
    check_storage(p)
    inside = {n: v for n, v in p.values.items() if v.strided is not None and n in names}
    assert inside
    for n, v in inside.items():
        moved = v._replace(strided=v.strided._replace(offset=v.strided.offset + (4 if n != names[-1] else -4)))
        with pytest.raises(fx.ExecutionError, match="this is a bug in fluidx"):
            check_storage(p._replace(values={**p.values, n: moved}))


def test_a_bucket_is_not_filled_while_it_is_on_its_way():
    model = classifier()
    small = fx.strategies.data_parallel(bucket_mb=512 / 2**20, first_bucket_mb=256 / 2**20)
    t = fx.DistributeTranspiler(small).transpile(program=model.main, startup_program=model.startup, trainers=2)
    p = dry_plan(t.get_trainer_program(0), batch=16, overlap=0)
    check_storage(p)
    first, *_ = sent = [k for k, step in enumerate(p.steps) if step.op.type == "all_reduce"]
    assert len(sent) > 1 and p.steps[first].overlapped
    # gradients of the next bucket are made meanwhile, and none of them where the first one lies
    there = p.values[p.steps[first].op.input_arg_names[0]]
    late = next(g for _, g in model.gradients if p.values[g].buffer != there.buffer)
    moved = p.values[late]._replace(buffer=there.buffer, strided=p.values[late].strided and p.values[late].strided._replace(offset=0))
    with pytest.raises(fx.ExecutionError, match="this is a bug in fluidx"):
        check_storage(p._replace(values={**p.values, late: moved}))
