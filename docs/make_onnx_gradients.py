"""The page of gradients of ONNX operators: `python docs/make_onnx_gradients.py` writes docs/onnx_gradients.md.

An operator has a gradient if fluidx loads a case of the standard's test suite with it, or a model below, and a gradient from its outputs
reaches an input of floats. The cases are models and data of the installed package onnx, which takes half a minute to make them.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from onnx import TensorProto, defs, numpy_helper, parser

import fluidx as fx
from fluidx.ir.dtypes import FLOATS

PAGE = Path(__file__).with_name("onnx_gradients.md")
CASES = 12  # of one operator at most
FLOAT_TYPES = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
# Operators for which orttraining/orttraining/core/graph/gradient_builder_registry.cc of ONNX Runtime registers a gradient, as of release
# 1.17 (BatchNormInternal, LSTMTraining and GRUTraining under the names of the standard), and those that the wheel of 1.19.2, the last one,
# adds.
RUNTIME = """
    Abs Add AveragePool BatchNormalization Cast Clip Concat Conv Cos Div Dropout Erf Exp Expand Flatten GRU Gather GatherElements GatherND
    Gelu Gemm GlobalAveragePool Identity LSTM LayerNormalization LeakyRelu Log LogSoftmax MatMul Max MaxPool Min Mul Neg Pad Pow Reciprocal
    ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape ScatterElements ScatterND Sigmoid Sin Slice Softmax SoftmaxCrossEntropyLoss
    Split Sqrt Squeeze Sub Tanh Tile TopK Transpose Trilu Unsqueeze Where
    com.microsoft:BiasGelu com.microsoft:FastGelu com.microsoft:FusedMatMul com.microsoft:QuickGelu SimplifiedLayerNormalization
""".split()
RUNTIME_ON_CUDA = ["ConvTranspose", "Resize"]
MODELS = {
    "If": """g (bool c, float[3] x) => (float[3] y) {
        y = If (c) <then_branch = a () => (float[3] p) { p = Exp (x) }, else_branch = b () => (float[3] q) { q = Neg (x) }> }""",
    "Loop": """g (float[3] x) => (float[3] y) <int64 times = {2}, bool yes = {1}> {
        y = Loop (times, yes, x) <body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t) { d = Identity (c) t = Mul (s, s) }> }""",
    "GlobalLpPool": "g (float[n, 3, 4] x) => (float[n, 3, 1] y) { y = GlobalLpPool (x) }",
    "MaxRoiPool": "g (float[n, 1, 4, 4] x, float[2, 5] r) => (float[2, 1, 2, 2] y) { y = MaxRoiPool <pooled_shape = [2, 2]> (x, r) }",
    "SequenceConstruct": "g (float[3] x) => (float[6] y) { s = SequenceConstruct (x, x) y = ConcatFromSequence <axis = 0> (s) }",
    "ConcatFromSequence": "g (float[3] x) => (float[6] y) { s = SequenceConstruct (x, x) y = ConcatFromSequence <axis = 0> (s) }",
    "SequenceInsert": """g (float[3] x) => (float[6] y) {
        s = SequenceConstruct (x) t = SequenceInsert (s, x) y = ConcatFromSequence <axis = 0> (t) }""",
    "SequenceErase": """g (float[3] x) => (float[3] y) {
        s = SequenceConstruct (x, x) t = SequenceErase (s) y = ConcatFromSequence <axis = 0> (t) }""",
    "SequenceMap": """g (float[3] x) => (float[6] y) {
        s = SequenceConstruct (x, x) t = SequenceMap (s) <body = b (float[3] u) => (float[3] v) { v = Exp (u) }>
        y = ConcatFromSequence <axis = 0> (t) }""",
    "Optional": "g (float[3] x) => (float[3] y) { o = Optional (x) y = OptionalGetElement (o) }",
    "SplitToSequence": "g (float[2, 3] x, int64 k) => (float[1, 3] y) { s = SplitToSequence (x) y = SequenceAt (s, k) }",
    "SequenceAt": "g (float[2, 3] x, int64 k) => (float[1, 3] y) { s = SplitToSequence (x) y = SequenceAt (s, k) }",
    "Trilu": "g (float[3, 3] x) => (float[3, 3] y) { y = Trilu (x) }",
    "Dropout": "g (float[n] x) => (float[n] y) { y = Dropout (x) }",
    "com.microsoft:BiasGelu": "g (float[n, 3] x, float[3] b) => (float[n, 3] y) { y = com.microsoft.BiasGelu (x, b) }",
    "com.microsoft:FastGelu": "g (float[n, 3] x) => (float[n, 3] y) { y = com.microsoft.FastGelu (x) }",
    "com.microsoft:QuickGelu": "g (float[n, 3] x) => (float[n, 3] y) { y = com.microsoft.QuickGelu (x) }",
    "com.microsoft:FusedMatMul": "g (float[n, 3] x, float[3, 2] w) => (float[n, 2] y) { y = com.microsoft.FusedMatMul (x, w) }",
    "SimplifiedLayerNormalization": "g (float[n, 3] x, float[3] w) => (float[n, 3] y) { y = SimplifiedLayerNormalization (x, w) }",
}
HEAD = """\
# Gradients of ONNX operators

Which operators are trained through, in fluidx and in the training of ONNX Runtime, whose last release for Python was 1.19.2 (2024).
`python docs/make_onnx_gradients.py` writes this page: for each operator it loads cases of the standard's test suite (onnx {version}) and
asks for a gradient from the outputs to the inputs. For ONNX Runtime they are the operators of
`orttraining/core/graph/gradient_builder_registry.cc` and of the wheel of 1.19.2; *cuda* means that the CPU has no kernel of it.

{both} operators have a gradient in both, {ours} in fluidx only, {theirs} in ONNX Runtime only. Other operators give whole numbers, truth
values, text, random numbers or constants, or are flat, and `fx.gradients` through them gives None: {others}. `set_training` names a
parameter that only such a path reaches.

| operator | fluidx | ONNX Runtime's training |
|---|---|---|
"""


def main() -> None:
    warnings.simplefilter("ignore")
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The text of the page, in Markdown."""
    import onnx

    found = trained_through()
    theirs = {*RUNTIME, *RUNTIME_ON_CUDA}
    ours = {name for name, yes in found.items() if yes}
    others = ", ".join(k.name for k in fx.onnx.known("ai.onnx") if k.name not in ours)
    counts = {"both": len(ours & theirs), "ours": len(ours - theirs), "theirs": len(theirs - ours)}
    head = HEAD.format(version=onnx.__version__, others=others, **counts)
    rows = []
    for name in sorted(ours | theirs, key=lambda n: n.removeprefix("com.microsoft:").lower()):
        runtime = "cuda" if name in RUNTIME_ON_CUDA else "yes" if name in theirs else ""
        rows.append(f"| {name} | {'yes' if name in ours else ''} | {runtime} |\n")
    wrapped = "\n".join(fill(line, 140) for line in head.split("\n"))
    return wrapped + "".join(rows)


def trained_through() -> dict[str, bool]:
    """Operator -> has it a gradient? Operators of other domains are domain:name."""
    found = {name: has_gradient(parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> {text}'))
             for name, text in MODELS.items()}  # fmt: skip
    for name, models in by_operator().items():
        found[name] = found.get(name, False) or any(map(has_gradient, models[:CASES]))
    return found


def by_operator() -> dict[str, list[Any]]:
    """Operator -> models of one node, from the standard's suite, with single numbers and inputs that are not floats made constant."""
    from onnx.backend.test.case import node

    for module in pkgutil.walk_packages(node.__path__, f"{node.__name__}."):
        if not module.name.rsplit(".", 1)[1].startswith("_"):
            importlib.import_module(module.name)
    found = defaultdict(list)
    for case in node._NodeTestCases:
        graph = case.model.graph
        if len(graph.node) == 1 and defs.has(graph.node[0].op_type, graph.node[0].domain):
            domain = graph.node[0].domain
            found[f"{domain}:{graph.node[0].op_type}" if domain else graph.node[0].op_type].append((case.model, case.data_sets[0][0]))
    return {name: list(_constant(models)) for name, models in found.items()}


def _constant(cases: list[tuple[Any, Any]]) -> Iterator[Any]:
    for model, values in cases:
        made = type(model)()
        made.CopyFrom(model)
        kept = []
        for info, value in zip(model.graph.input, values):
            tensor = info.type.tensor_type
            if not isinstance(value, (np.ndarray, np.generic)) or tensor.elem_type in FLOAT_TYPES and np.ndim(value):
                kept.append(info)
            else:
                made.graph.initializer.append(numpy_helper.from_array(np.asarray(value), info.name))
        del made.graph.input[:]
        made.graph.input.extend(kept)
        yield made


def has_gradient(model: Any) -> bool:
    """Does a gradient of the outputs reach an input of floats? False for models that only a session runs."""
    try:
        with fx.unique_name.guard():
            loaded = fx.onnx.load(model)
            with fx.program_guard(loaded.program, loaded.startup):
                ends = [fx.layers.cast(v, "float32") for v in loaded.fetches if v.dtype in FLOATS]
                begins = [v for v in loaded.feeds if v.dtype in FLOATS]
                if not ends or not begins:
                    return False
                total = fx.layers.sum([fx.layers.reduce_sum(v) for v in ends])
                return any(g is not None for g in fx.gradients(total, begins))
    except (fx.onnx.OnnxError, fx.FluidxError, ValueError):
        return False


if __name__ == "__main__":
    main()
