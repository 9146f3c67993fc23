"""Which operators of ONNX are taken: the table, its page, its command, and operators that users add."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.cli import main

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402

from fluidx.onnx.read import NEWEST  # noqa: E402
from fluidx.onnx.table import IMPORTERS, NUMPY_IMPORTERS  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def own():
    """Operators of org.tests are there for one test."""
    yield
    for table in (IMPORTERS, NUMPY_IMPORTERS):
        for key in [k for k in table if k[0] == "org.tests"]:
            del table[key]


def model_of(*nodes, outputs=("y",)):
    x, *ys = (helper.make_tensor_value_info(v, TensorProto.FLOAT, ["n", 2]) for v in ("x", *outputs))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("org.tests", 1)]
    return helper.make_model(helper.make_graph(list(nodes), "own", [x], ys), opset_imports=opsets)


def test_the_page_has_a_row_for_every_operator_that_is_taken():
    spec = importlib.util.spec_from_file_location("make_onnx_ops", DOCS / "make_onnx_ops.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = re.findall(r"^\| (\w+) \| (\w+) \|", module.page(), re.MULTILINE)
    assert {("Gemm", "operators"), *((k.name, k.how) for k in fx.onnx.known("ai.onnx"))} <= set(rows)


def test_every_operator_of_the_standard_is_taken_or_was_given_up():
    taken = {k.name for k in fx.onnx.known("ai.onnx")}
    now = {s.name for s in onnx.defs.get_all_schemas() if not s.domain and not s.deprecated and s.since_version <= NEWEST}
    assert now - taken == set()


def test_versions_are_those_of_the_standard():
    (relu,) = [k for k in fx.onnx.known("") if k.name == "Relu"]
    assert relu == ("ai.onnx", "Relu", (1, 6, 13, 14), "operators")
    hows = {k.name: k.how for k in fx.onnx.known()}
    assert (hows["EyeLike"], hows["Celu"], hows["Resize"], hows["NonZero"]) == ("host", "body", "operators", "operators")


def test_the_command_lists_one_domain():
    said = CliRunner().invoke(main, ["onnx", "ops", "--domain", "ai.onnx.preview.training"]).output.split()
    assert said[::4] == ["ai.onnx.preview.training"] * 4
    refused = CliRunner().invoke(main, ["onnx", "ops", "--domain", "org.nobody"])
    assert refused.exit_code == 1
    assert "fluidx supports no operator of domain 'org.nobody'; there are: ai.onnx, ai.onnx.ml" in refused.output


def test_an_operator_of_a_users_domain_is_loaded_trained_and_run(own):
    @fx.onnx.face("Twist", domain="org.tests")
    def twist(n):
        return n.b.scale(n.x(), scale=n.attr("by", 1.0)), n.b.square(n.x())

    assert fx.onnx.known("org.tests") == [("org.tests", "Twist", (), "operators")]
    model = fx.onnx.load(model_of(helper.make_node("Twist", ["x"], ["y", "z"], domain="org.tests", by=3.0), outputs=("y", "z")))
    with fx.program_guard(model.program, model.startup):
        (grad,) = fx.gradients(model.fetches, model.feeds)
    exe, x = fx.Executor(fx.CPUPlace()), np.float32([[1, -2]])
    exe.run(model.startup)
    y, z, g = exe.run(model.program, feed={"x": x}, fetch_list=[*model.fetches, grad])
    assert (y.tolist(), z.tolist(), g.tolist()) == ([[3, -6]], [[1, 4]], [[5, -1]])


def test_an_operator_on_the_host_is_run_by_a_session(own):
    @fx.onnx.host("Sorted", domain="org.tests")
    def sort(n):
        return np.sort(n.value(), axis=n.attr("axis", -1))

    ready = fx.onnx.session(model_of(helper.make_node("Sorted", ["x"], ["y"], domain="org.tests")))
    assert ready.run({"x": np.float32([[2, 1]])})[0].tolist() == [[1, 2]]


def test_a_name_that_is_taken_is_refused(own):
    with pytest.raises(fx.onnx.OnnxError, match="fluidx has operator Relu of domain 'ai.onnx'; use another name"):
        fx.onnx.face("Relu", domain="ai.onnx")
    for _ in range(2):  # as a notebook's cell that is run again does
        fx.onnx.face("Twist", domain="org.tests")(lambda n: n.x())
    with pytest.raises(fx.onnx.OnnxError, match="name the operators"):
        fx.onnx.face(domain="org.tests")
