"""Every operator that a trainer of ONNX models needs has a gradient: one node each, in float64, against central differences.

The list is that of the gradients which ONNX Runtime's training had, and of those that its users missed.
"""

import re
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402

import fluidx as fx  # noqa: E402

from .one_node import check_gradient  # noqa: E402


def r(*shape, seed=0):
    """Normal values of which no two are closer than a step of the difference quotient, nor is one so close to 0."""
    size = int(np.prod(shape))
    ranks = np.random.default_rng(seed).permutation(size).reshape(shape)
    return (ranks + 0.5) / size * 3 - 1.5 + 0.3 / size * np.sin(ranks)


def p(*shape, seed=0):
    """The same, from 0.5 on."""
    return np.abs(r(*shape, seed=seed)) + 0.5


def i(*values):
    return np.array(values, "int64")


X, Y = r(2, 3, 4), r(2, 3, 4, seed=1) + 0.05  # half a step, so that none of X is one of Y
WIDE = {"stash_type": int(TensorProto.DOUBLE)}  # statistics of float64, where float32 is the default
IMAGE, FILTER = r(2, 3, 5, 6), r(4, 3, 2, 3, seed=1)
ONE = {op: (op, [X], (), (0,), {}) for op in (
    "Abs", "Neg", "Exp", "Erf", "Sin", "Cos", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Softplus", "Softsign",
    "HardSigmoid", "HardSwish", "Mish", "Gelu", "Softmax", "LogSoftmax", "Identity", "Flatten", "ThresholdedRelu", "Shrink", "Swish",
    "Atan", "Sinh", "Cosh", "Asinh",
)}  # fmt: skip
ONE |= {op: (op, [p(2, 3, 4)], (), (0,), {}) for op in ("Sqrt", "Log", "Reciprocal", "ReduceLogSum")}
ONE |= {op: (op, [X, Y + 4 * (op == "Div")], (), (0, 1), {}) for op in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Mean", "Sum")}
ONE |= {f"{op} of an axis": (op, [p(2, 3, 4), i(1)], (1,), (0,), {"keepdims": 0}) for op in (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare",
)}  # fmt: skip
ONE |= {f"Pad {mode}": ("Pad", [X, i(0, 1, 2, 0, 1, 1)], (1,), (0,), {"mode": mode}) for mode in ("constant", "reflect", "edge", "wrap")}
ONE |= {
    f"Resize {mode}": ("Resize", [IMAGE, None, None, i(2, 3, 7, 4)], (3,), (0,), {"mode": mode}) for mode in ("nearest", "linear", "cubic")
}
ONE |= {f"{op} {pad}": (op, inputs, (), wrt, {"auto_pad": pad, "strides": [2, 1], **attrs})
        for pad in ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID") for op, inputs, wrt, attrs in (
            ("Conv", [IMAGE, FILTER, r(4)], (0, 1, 2), {}),
            ("ConvTranspose", [r(2, 4, 3, 4), FILTER], (0, 1), {}),
            ("MaxPool", [IMAGE], (0,), {"kernel_shape": [2, 3]}),
            ("AveragePool", [IMAGE], (0,), {"kernel_shape": [2, 3]}))}  # fmt: skip
ONE |= {f"Scatter{kind} {how}": (f"Scatter{kind}", [p(4, 3), at, updates], (), (0, 2), {"reduction": how})
        for how in ("none", "add", "mul", "max", "min") for kind, at, updates in (
            ("ND", i([3], [0]), p(2, 3, seed=2)), ("Elements", i([3, 0, 1]), p(1, 3, seed=2)))}  # fmt: skip
ONE |= {
    "Pow": ("Pow", [p(2, 3, 4), Y], (), (0, 1), {}),
    "PRelu": ("PRelu", [X, r(3, 1, seed=2)], (), (0, 1), {}),
    "Clip": ("Clip", [X, np.float64(-0.7), np.float64(0.7)], (1, 2), (0,), {}),
    "Where": ("Where", [X > 0.1, X, Y], (), (1, 2), {}),
    "Cast": ("Cast", [X], (), (0,), {"to": TensorProto.DOUBLE}),
    "Dropout": ("Dropout", [X], (), (0,), {}),
    "MatMul": ("MatMul", [X, r(4, 5)], (), (0, 1), {}),
    "Gemm": ("Gemm", [r(4, 2), r(4, 3), r(3)], (), (0, 1, 2), {"transA": 1, "alpha": 0.5, "beta": 2.0}),
    "Einsum": ("Einsum", [X, r(2, 4, 5)], (), (0, 1), {"equation": "bij,bjk->bki"}),
    "CumSum": ("CumSum", [X, np.int64(1)], (1,), (0,), {"exclusive": 1, "reverse": 1}),
    "GlobalMaxPool": ("GlobalMaxPool", [IMAGE], (), (0,), {}),
    "GlobalAveragePool": ("GlobalAveragePool", [IMAGE], (), (0,), {}),
    "BatchNormalization": ("BatchNormalization", [IMAGE, r(3), r(3), r(3), p(3)], (), (0, 1, 2), {}),
    "InstanceNormalization": ("InstanceNormalization", [IMAGE, p(3), r(3)], (), (0, 1, 2), {}),
    "GroupNormalization": ("GroupNormalization", [r(2, 4, 3), p(4), r(4)], (), (0, 1, 2), {"num_groups": 2, **WIDE}),
    "LayerNormalization": ("LayerNormalization", [X, p(4), r(4)], (), (0, 1, 2), WIDE),
    "RMSNormalization": ("RMSNormalization", [X, p(4)], (), (0, 1), WIDE),
    "LpNormalization": ("LpNormalization", [X], (), (0,), {}),
    "LRN": ("LRN", [IMAGE], (), (0,), {"size": 3}),
    "Reshape": ("Reshape", [X, i(3, 8)], (1,), (0,), {}),
    "Squeeze": ("Squeeze", [r(2, 1, 3), i(1)], (1,), (0,), {}),
    "Unsqueeze": ("Unsqueeze", [X, i(1)], (1,), (0,), {}),
    "Transpose": ("Transpose", [X], (), (0,), {"perm": [2, 0, 1]}),
    "Concat": ("Concat", [X, r(2, 5, 4)], (), (0, 1), {"axis": 1}),
    "Slice with steps": ("Slice", [r(6, 5), i(5, 0), i(0, 5), i(0, 1), i(-2, 3)], (1, 2, 3, 4), (0,), {}),
    "Tile": ("Tile", [X, i(1, 2, 3)], (1,), (0,), {}),
    "Expand": ("Expand", [r(3, 1), i(2, 3, 4)], (1,), (0,), {}),
    "Trilu": ("Trilu", [r(4, 5)], (), (0,), {}),
    "Gather": ("Gather", [X, i([2, 0], [2, 1])], (), (0,), {"axis": 1}),
    "GatherND": ("GatherND", [X, i([1, 2], [0, 0], [1, 2])], (), (0,), {}),
    "GatherElements": ("GatherElements", [X, i([[2, 0, 1, 1]], [[0, 0, 2, 1]])], (), (0,), {"axis": 1}),
    "DepthToSpace": ("DepthToSpace", [r(2, 8, 2, 3)], (), (0,), {"blocksize": 2, "mode": "CRD"}),
    "SpaceToDepth": ("SpaceToDepth", [r(2, 2, 4, 6)], (), (0,), {"blocksize": 2}),
    "NegativeLogLikelihoodLoss": ("NegativeLogLikelihoodLoss", [r(4, 3), i(2, 0, 1, 2)], (), (0,), {}),
    "SoftmaxCrossEntropyLoss": ("SoftmaxCrossEntropyLoss", [r(4, 3), i(2, 0, 1, 2)], (), (0,), {}),
    "RNN": ("RNN", [r(3, 2, 4), r(1, 5, 4), r(1, 5, 5), r(1, 10)], (), (0, 1, 2, 3), {"hidden_size": 5}),
    "GRU": ("GRU", [r(3, 2, 4), r(1, 15, 4), r(1, 15, 5), r(1, 30)], (), (0, 1, 2, 3), {"hidden_size": 5}),
    "LSTM": ("LSTM", [r(3, 2, 4), r(1, 20, 4), r(1, 20, 5), r(1, 40)], (), (0, 1, 2, 3), {"hidden_size": 5}),
    "GridSample": ("GridSample", [IMAGE, r(2, 3, 2, 2) * 0.6], (), (0, 1), {}),
    "RoiAlign": ("RoiAlign", [IMAGE, np.float64([[0.3, 0.4, 4.1, 3.3]]), i(1)], (), (0,), {"output_height": 2, "output_width": 3}),
    "AffineGrid": ("AffineGrid", [r(2, 2, 3), i(2, 1, 3, 4)], (1,), (0,), {}),
    "Attention": ("Attention", [r(2, 2, 3, 4), r(2, 2, 5, 4, seed=1), r(2, 2, 5, 4, seed=2)], (), (0, 1, 2), {}),
}
SEVERAL = {
    "Split": (2, "Split", [X], (), (0,), {"axis": 2, "num_outputs": 2}),
    "TopK": (1, "TopK", [X, i(2)], (1,), (0,), {}),
}


@pytest.mark.parametrize("name", ONE)
def test_it_has_its_gradient(name):
    op, inputs, known, wrt, attrs = ONE[name]
    check_gradient(op, inputs, wrt=wrt, known=known, **attrs)


@pytest.mark.parametrize("name", SEVERAL)
def test_it_has_its_gradient_through_several_outputs(name):
    outputs, op, inputs, known, wrt, attrs = SEVERAL[name]
    check_gradient(op, inputs, outputs=outputs, wrt=wrt, known=known, **attrs)


@pytest.mark.parametrize(
    "op, inputs",
    [(op, [X]) for op in ("Floor", "Ceil", "Round", "Sign", "ArgMax", "Shape", "Size", "IsNaN")] + [("Greater", [X, Y]), ("Equal", [X, Y])],
)
def test_what_is_flat_or_gives_no_floats_hands_no_gradient_on(op, inputs):
    names = [f"x{k}" for k in range(len(inputs))]
    infos = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, v.shape) for n, v in zip(names, inputs)]
    nodes = [helper.make_node(op, names, ["k"]), helper.make_node("Cast", ["k"], ["z"], to=TensorProto.DOUBLE)]
    nodes.append(helper.make_node("ReduceMean", ["z"], ["y"], keepdims=0))
    graph = helper.make_graph(nodes, op, infos, [helper.make_tensor_value_info("y", TensorProto.DOUBLE, [])])
    model = fx.onnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9))
    with fx.program_guard(model.program, model.startup):
        assert fx.gradients(model.fetches, model.feeds) == [None] * len(inputs)


def test_the_page_of_gradients_has_these_operators():
    """docs/make_onnx_gradients.py writes it; it is stored because that takes half a minute."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "onnx_gradients.md").read_text(encoding="utf-8")
    trained = set(re.findall(r"^\| (\S+) \| yes", page, re.MULTILINE))
    assert {op for op, *_ in ONE.values()} | {op for _, op, *_ in SEVERAL.values()} <= trained
    assert trained.isdisjoint(("Floor", "Ceil", "Round", "Sign", "ArgMax", "Shape", "Size", "IsNaN", "Greater", "Equal"))
