"""The interpreter that the executor is compared with, and central differences."""

import numpy as np
import pytest

import fluidx.ops  # noqa: F401 - fills OPS
from fluidx.ir import Builder, ExecutionError, Program
from fluidx.testing import interpret, numeric_grad


def linear():
    program = Program("linear")
    block = program.global_block()
    x = block.create_var("x", (-1, 2), "float32", is_data=True)
    w = block.create_parameter((2, 1), "float32", name="w")
    b = Builder(block)
    b.mean(b.elementwise_mul(b.matmul(x, w, name="y"), b.matmul(x, w)), name="loss")
    b.scale(w, scale=2.0, out={"Out": w})
    return program


def test_values_are_kept_by_name():
    state = {"w": np.float32([[1], [2]])}
    env = interpret(linear(), {"x": np.float32([[1, 1], [2, 0]])}, state)
    assert env["y"].tolist() == [[3], [2]]
    assert env["loss"].tolist() == [6.5]
    assert env["w"].tolist() == [[2], [4]]
    assert state["w"].tolist() == [[1], [2]], "the caller's state is left alone"


def test_a_name_without_a_value():
    with pytest.raises(ExecutionError, match="op matmul reads 'w', which has no value"):
        interpret(linear(), {"x": np.ones((1, 2), "float32")})


def test_numeric_grad_leaves_its_argument_as_it_was():
    x = np.array([1.0, -2.0])
    np.testing.assert_allclose(numeric_grad(lambda v: float((v**3).sum()), x), [3, 12], rtol=1e-8)
    assert x.tolist() == [1, -2]
