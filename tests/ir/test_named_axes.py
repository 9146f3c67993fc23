"""Open axes with names: how they are written, what type rules make of them, and that a name stands for one size."""

from __future__ import annotations

import copy
import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluidx as fx
from fluidx.ir import ANY, Builder, FeedError, ParseError, ProgramError, TensorType
from fluidx.ir.jsonform import from_json, to_json
from fluidx.ir.opdef import OPS
from fluidx.ir.types import Dim, common_size, equal_size, size_names
from fluidx.ops.shared.types import type_of

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,8}", fullmatch=True)
SIZES = st.one_of(st.just(ANY), st.integers(0, 1 << 40), NAMES)


@pytest.fixture
def b():
    main = fx.Program("main")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        yield Builder(main.global_block())


# -- as text, JSON and objects --------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(SIZES, max_size=4), max_size=4))
def test_text_and_json_give_back_the_names(shapes):
    program = fx.Program("p")
    for k, shape in enumerate(shapes):
        program.global_block().create_var(f"v{k}", shape, is_data=True)
    for again in (fx.Program.parse_from_string(str(program)), from_json(json.loads(json.dumps(to_json(program))))):
        assert again == program and str(again) == str(program)
        assert [size_names(v.shape) for v in again.list_vars()] == [size_names(v.shape) for v in program.list_vars()]


def test_a_name_is_an_open_size_and_is_called_what_it_is():
    n = Dim("n")
    assert n == ANY == -1 and ANY in (4, n) and hash(n) == hash(-1) and (str(n), repr(n), f"{n:>3}") == ("n", "n", "  n")
    assert (n + 1, type(n + 1), int(n), type(int(n))) == (0, int, -1, int)
    for again in (copy.copy(n), copy.deepcopy(n), pickle.loads(pickle.dumps(n))):
        assert type(again) is Dim and again.name == "n"


@pytest.mark.parametrize("name", ["", "2n", "2*n", "a b", "-1", "größe", "n]", None])
def test_a_name_that_text_cannot_write_is_refused(name):
    with pytest.raises(ProgramError, match="an axis cannot be called"):
        Dim(name)


def test_data_and_variables_are_declared_with_names(b):
    assert str(fx.data("x", ["batch", None, -1, 4])) == "<Variable x: f32[batch,-1,-1,4]>"
    assert str(fx.layers.data("y", ["seq", 4])) == "<Variable y: f32[seq,4]>"  # an open axis is there already
    assert b.block.create_var("z", [Dim("n"), "m"]).shape == (ANY, ANY)
    with pytest.raises(ProgramError, match=r"data: an axis cannot be called '2\*n'"):
        fx.data("w", ["2*n"])
    with pytest.raises(ProgramError, match=r"'x' is already declared as f32\[batch,-1,-1,4\], not f32\[n,-1,-1,4\]"):
        fx.data("x", ["n", -1, -1, 4])


def test_a_parameter_has_no_open_axes(b):
    with pytest.raises(ProgramError, match="every size of a parameter must be known"):
        b.block.create_parameter(["n", 4])


def test_a_type_that_is_no_type_is_pointed_at():
    with pytest.raises(ParseError, match=r'expected sizes of 0 to [0-9]+, or a name or -1 for an open axis, .*, found "f32\[a b\]"'):
        fx.Program.parse_from_string("program p { data %x: f32[a b] }")
    with pytest.raises(ParseError, match=r"blocks\[0\].vars\[0\].shape\[0\]: an axis cannot be called '2n'"):
        from_json({**to_json(fx.Program("p")), "blocks": [{"parent": -1, "vars": [{"name": "x", "dtype": "float32", "shape": ["2n"]}]}]})


# -- in type rules --------------------------------------------------------------------------------------------------------------


def test_names_flow_through_type_rules(b):
    x = fx.data("x", ["batch", "seq", 4])
    written = {
        "relu": b.relu(x), "transposed": b.transpose(x, axis=(1, 0, 2)), "joined": b.concat([x, x], axis=2),
        "product": b.matmul(x, x, transpose_y=True), "sum": b.elementwise_add(x, x), "row": b.slice(x, axes=[1], starts=[0], ends=[1]),
        "mean": b.reduce_mean(x, dim=(1,)), "longer": b.concat([x, x], axis=1),
    }  # fmt: skip
    assert {k: str(v.desc.type) for k, v in written.items()} == {
        "relu": "f32[batch,seq,4]", "transposed": "f32[seq,batch,4]", "joined": "f32[batch,seq,8]", "product": "f32[batch,seq,seq]",
        "sum": "f32[batch,seq,4]", "row": "f32[batch,-1,4]", "mean": "f32[batch,4]", "longer": "f32[batch,-1,4]",
    }  # fmt: skip


def test_what_one_program_was_told_of_a_type_is_not_told_of_an_equal_one(b):
    for name in ("n", -1, "m", "n"):
        x = fx.data(f"x_{name}", [name, 4])
        assert str(b.relu(x).desc.type) == f"f32[{name},4]"


def test_where_two_names_meet(b):
    n, m = Dim("n"), Dim("m")
    assert [str(common_size(*p)) for p in ((n, n), (n, m), (n, -1), (3, 3), (n, 3))] == ["n", "-1", "-1", "3", "-1"]
    assert [str(equal_size(*p)) for p in ((n, m), (-1, n), (n, -1), (n, 3), (3, n))] == ["n", "n", "n", "3", "3"]
    x, y, one = fx.data("x", ["n", 4]), fx.data("y", ["m", 4]), fx.data("one", [1, 4])
    assert str((x + y).desc.type) == "f32[-1,4]"  # n may be 1 and m not
    assert str((one + x).desc.type) == "f32[n,4]"


def named(t, slot, sizes, one_for_each):
    """A type with a name for every axis: for each axis, or for each size."""
    if not isinstance(t, TensorType):
        return [named(v, f"{slot}_{k}", sizes, one_for_each) for k, v in enumerate(t)] if t is not None else None
    names = [f"v{slot}_{axis}" if one_for_each else f"s{size}" for axis, size in enumerate(t.shape)]
    sizes.update(zip(names, t.shape, strict=True))
    return t.with_shape(map(Dim, names))


def flat(types):
    return [t for v in types for t in flat(v)] if isinstance(types, (list, tuple)) else [types]


def test_no_type_rule_gives_a_name_to_what_has_another_size():
    """The sizes of the samples are known: an axis of a result that has a name must be as long as the axes of that name."""
    kept = 0
    for definition in OPS.values():
        for sample in definition.samples():
            args = [None if a is None else [*map(type_of, a)] if isinstance(a, (list, tuple)) else type_of(a) for a in sample.args]
            attrs = definition.complete_attrs(sample.attrs)
            if not args or definition.control.bodies:
                continue
            want = flat(definition.infer(*args, **attrs))
            for one_for_each, which in itertools.product((False, True), itertools.product((False, True), repeat=min(len(args), 3))):
                sizes: dict[str, int] = {}
                chosen = [*which, *(len(args) - len(which)) * [which[-1]]]
                given = [named(a, k, sizes, one_for_each) if on else a for k, (a, on) in enumerate(zip(args, chosen, strict=True))]
                try:
                    made = flat(definition.infer(*given, **attrs))
                except ProgramError:  # it asks for sizes that are known
                    continue
                for got, known in zip(made, want, strict=True):
                    if got is None or got.ndim != known.ndim:  # squeeze leaves an open axis, which may be 1
                        continue
                    found = [(d.name, size) for d, size in zip(got.shape, known.shape, strict=True) if isinstance(d, Dim)]
                    assert all(sizes[n] == size for n, size in found), f"{definition.name}{given} {attrs} gives {got}, which is {known}"
                    kept += len(found)
    assert kept > 5000


# -- which sizes are known to be equal --------------------------------------------------------------------------------------------


def test_axes_of_one_name_are_equal_and_of_two_may_differ(b):
    x, y, z = fx.data("x", ["n", "k"]), fx.data("y", ["k", "n"]), fx.data("z", ["m", "k"])
    assert b.sizes.equal(x, b.transpose(y, axis=(1, 0))) and not b.sizes.equal(x, y) and not b.sizes.equal(x, z)
    assert b.sizes.equal(x, b.relu(x)) and not b.sizes.equal(x, b.elementwise_add(x, z))


def test_gradients_of_a_broadcast_between_two_names_are_summed_where_one_is_1(b):
    x, y = fx.data("x", ["n", 2]), fx.data("y", ["m", 2])
    loss = fx.layers.reduce_sum(x * y)
    gx, gy = fx.gradients(loss, [x, y])
    feed = {"x": np.float32([[1, 2]]), "y": np.float32([[1, 2], [3, 4], [5, 6]])}
    found = fx.Executor(fx.CPUPlace()).run(b.block.program, feed=feed, fetch_list=[gx, gy])
    assert found[0].tolist() == [[9, 12]] and found[1].tolist() == [[1, 2]] * 3


# -- what is fed ------------------------------------------------------------------------------------------------------------------


def test_a_feed_that_gives_a_name_two_sizes_is_refused(b):
    x, y = fx.data("x", ["n", 2]), fx.data("y", [3, "n"])
    exe, out = fx.Executor(fx.CPUPlace()), b.matmul(y, x)
    for n in (4, 5):
        (made,) = exe.run(b.block.program, feed={"x": np.ones((n, 2), "float32"), "y": np.ones((3, n), "float32")}, fetch_list=[out])
        assert (made == n).all()
    said = (
        r"axes called 'n' have one size in a run: it is 4 along axis 0 of 'x', f32\[n,2\], and 5 along axis 1 of 'y', f32\[3,n\]; "
        "feed one size, or declare the axes with two names"
    )
    with pytest.raises(FeedError, match=said):
        exe.run(b.block.program, feed={"x": np.ones((4, 2), "float32"), "y": np.ones((3, 5), "float32")}, fetch_list=[out])


@pytest.mark.parametrize("strategy", ["data_parallel", "ring_optimizer", "zero3"])
def test_rank_programs_keep_the_names_and_refuse_what_one_device_refuses(b, strategy):
    x, label = fx.data("x", ["batch", 4]), fx.data("label", ["batch", 1])
    loss = fx.layers.reduce_mean(fx.layers.square_error_cost(fx.layers.fc(x, 1), label))
    startup = fx.default_startup_program()
    fx.optimizer.SGD(0.1).minimize(loss)
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=b.block.program, startup_program=startup, trainers=2)
    assert t.verify()
    for rank in range(2):
        declared = t.get_trainer_program(rank).global_block().descs
        assert [str(declared[n].type) for n in ("x", "label")] == ["f32[batch,4]", "f32[batch,1]"] and "-1" not in str(declared)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        exe.run(feed={"x": np.ones((4, 4), "float32"), "label": np.ones((4, 1), "float32")}, fetch_list=[loss])
        with pytest.raises(FeedError, match="axes called 'batch' have one size in a run"):
            exe.run(feed={"x": np.ones((4, 4), "float32"), "label": np.ones((3, 1), "float32")}, fetch_list=[loss])
