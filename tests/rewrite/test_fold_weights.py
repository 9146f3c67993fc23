"""fold_weights: what follows from parameters alone is computed once, before the first run."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor import Scope
from fluidx.rewrite.fold_weights import fold_weights

GIVEN = "data %x: f32[-1,3]; param %w: f32[3,4]; param %s: f32[1,4]; param %b: f32[4]; "


def folded(text, values, fetch=("y",)):
    """The program, and the values of its new parameters; both programs have the same results."""
    program = fx.Program.parse_from_string(f"program p {{ {GIVEN} {text} }}")
    found = fold_weights(program, values.__getitem__, fetch)
    rng, exe = np.random.default_rng(0), fx.Executor()
    feed = {"x": rng.standard_normal((5, 3), dtype="float32")}
    made = []
    for one, more in ((program, {}), (found.program, found.values)):
        scope = Scope()
        for n, v in {**values, **more}.items():
            scope.set(n, v)
        made.append(exe.run(one, feed, list(fetch), scope=scope))
    for a, b in zip(*made, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    return found


VALUES = {
    "w": np.arange(12, dtype="float32").reshape(3, 4), "s": np.float32([[1, 2, 3, 4]]), "b": np.float32([1, 0, -1, 2]),
}  # fmt: skip


def types(found):
    return [op.type for op in found.program.ops]


def test_scaled_weights_are_one_parameter_and_the_others_are_gone():
    found = folded("%v: f32[3,4] = elementwise_mul(%w, %s); %y: f32[-1,4] = matmul(%x, %v)", VALUES)
    assert types(found) == ["matmul"]
    np.testing.assert_array_equal(found.values["v"], [[0, 2, 6, 12], [4, 10, 18, 28], [8, 18, 30, 44]])
    held = found.program.global_block().descs
    assert held["v"].persistable and "w" not in held and "s" not in held


def test_only_the_last_of_a_chain_is_kept():
    text = "%u: f32[3,4] = exp(%w); %v: f32[3,4] = elementwise_add(%u, %b); %m: f32[-1,4] = matmul(%x, %v); %y: f32[-1,4] = tanh(%m)"
    found = folded(text, VALUES)
    assert types(found) == ["matmul", "tanh"] and set(found.values) == {"v"}


def test_a_parameter_that_others_read_stays():
    text = "%v: f32[3,4] = elementwise_mul(%w, %s); %a: f32[-1,4] = matmul(%x, %v); %c: f32[-1,4] = matmul(%x, %w)"
    found = folded(f"{text}; %y: f32[-1,4] = elementwise_add(%a, %c)", VALUES)
    assert "w" in found.program.global_block().descs and "s" not in found.program.global_block().descs


@pytest.mark.parametrize(
    "text, fetch",
    [
        ("%y: f32[-1,4] = matmul(%x, %w)", ["y"]),
        ("%v: f32[3,4] = elementwise_mul(%w, %s); %y: f32[-1,4] = matmul(%x, %v)", ["y", "v"]),
        ("%v: f32[4] = scale(%b) {scale=2.0}; %b = assign(%v); %y: f32[-1,4] = matmul(%x, %w)", ["y"]),
        ("%v: f32[4,3] = transpose(%w) {axis=[1, 0]}; %t: f32[3,-1] = transpose(%x) {axis=[1, 0]}; %y: f32[4,-1] = matmul(%v, %t)", ["y"]),
    ],
    ids=["nothing follows", "fetched", "written", "a view"],
)
def test_what_stays(text, fetch):
    found = folded(text, VALUES, fetch)
    assert not found.values


def test_a_result_that_is_larger_than_its_parameters_is_computed_in_every_run():
    """300 x 300 float32 are 360 KB, of parameters of 2.4 KB."""
    text = "param %p: f32[300,1]; param %q: f32[1,300]; %v: f32[300,300] = elementwise_mul(%p, %q); %y: f32[300,300] = tanh(%v)"
    program = fx.Program.parse_from_string(f"program p {{ data %x: f32[300,300]; {text}; %z: f32[300,300] = elementwise_add(%y, %x) }}")
    values = {"p": np.ones((300, 1), "float32"), "q": np.ones((1, 300), "float32")}
    assert not fold_weights(program, values.__getitem__, ["z"]).values


@pytest.mark.parametrize("turn", ["", "%v: f32[4,3] = transpose(%w) {axis=[1, 0]};"])
def test_matrices_that_products_read_transposed_are_stored_as_they_are_multiplied(turn):
    """Two products of one matrix, by their attribute; and by an operator before, which is a view of it: then as it is, no copy."""
    head = GIVEN.replace("%x: f32[-1,3]", "%x: f32[-1,4]")
    text = f"{turn} %a: f32[-1,3] = matmul(%x, {'%v' if turn else '%w'}) {{{'' if turn else 'transpose_y=true'}}}"
    again = text.replace("%a:", "%c:").replace(turn, "")
    program = fx.Program.parse_from_string(f"program p {{ {head} {text}; {again}; %y: f32[-1,3] = elementwise_mul(%a, %c) }}")
    found = fold_weights(program, VALUES.__getitem__, ["y"])
    ((name, made),) = found.values.items()
    assert made.flags.c_contiguous and [op.inputs["Y"] for op in found.program.ops][:2] == [(name,)] * 2
    np.testing.assert_array_equal(made, VALUES["w"].T)
    assert not any(op.attrs.get("transpose_y") for op in found.program.ops) and "w" not in found.program.global_block().descs


def test_a_matrix_that_is_also_a_table_is_not_copied():
    text = "data %i: i64[-1]; %e: f32[-1,4] = lookup_table_v2(%w, %i); %y: f32[-1,3] = matmul(%e, %w) {transpose_y=true}"
    program = fx.Program.parse_from_string(f"program p {{ {GIVEN} {text} }}")
    assert not fold_weights(program, VALUES.__getitem__, ["y"]).values
