"""`fluidx onnx info | check | run`."""

import numpy as np
import pytest
from click.testing import CliRunner

from fluidx.cli import main

onnx = pytest.importorskip("onnx")


@pytest.fixture
def file(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        small (float[n, 2] x) => (float[n, 2] y) <float[2] w = {2, 3}> { m = Mul(x, w)  y = Relu(m) }
    """)
    onnx.save(model, tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


def fluidx(*args):
    result = CliRunner().invoke(main, ["onnx", *map(str, args)])
    return result.exit_code, result.output


def test_info_lists_what_is_in_a_model(file):
    assert fluidx("info", file) == (
        0,
        "small: IR 9, opset ai.onnx 18, written by nobody who says so\n"
        "  input   x: float32[n,2]\n  output  y: float32[n,2]\n  1 initializers of 2 elements, 2 nodes\n        1  Mul\n        1  Relu\n",
    )


def test_check_says_whether_a_model_can_be_trained(file):
    assert fluidx("check", file) == (
        0,
        f"{file}: valid, and fluidx has every operator of it\n  as a program: 2 operators, 1 parameters; it can be trained\n",
    )
    file.write_bytes(file.read_bytes()[:-20])
    code, said = fluidx("check", file)
    assert code == 1 and said.startswith("Error: ") and "Traceback" not in said


def test_run_computes_outputs_for_arrays_in_files(file, tmp_path):
    np.save(tmp_path / "x.npy", np.float32([[1, -1]]))
    code, said = fluidx("run", file, "-i", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "y.npz")
    assert (code, said) == (0, f"y: float32[1, 2]\n[[2. 0.]]\nwrote {tmp_path / 'y.npz'}\n")
    assert np.load(tmp_path / "y.npz")["y"].tolist() == [[2.0, 0.0]]
    assert fluidx("run", file) == (1, "Error: input 'x' is not fed; the model has: x\n")
    assert "'x' is no input; give NAME=FILE.npy" in fluidx("run", file, "-i", "x")[1]
