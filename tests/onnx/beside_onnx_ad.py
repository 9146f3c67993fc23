"""Gradients beside those of onnx-ad 0.3.0, which writes derivatives as ONNX models: `python -m tests.onnx.beside_onnx_ad`.

Its models are run by ONNX's reference evaluator in float64. Ends with 1 where the two differ; what onnx-ad or the evaluator does not take
is listed with the reason. onnx-ad is no dependency: install it beside fluidx to run this.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from onnx import shape_inference
from onnx.reference import ReferenceEvaluator

from .one_node import given, gradients_of, model
from .test_gradients import ONE


def theirs(op: str, inputs: list[Any], known: tuple[int, ...], wrt: tuple[int, ...], weights: list[np.ndarray], attrs: Any) -> list[Any]:
    import onnx_ad

    names = [f"x{k}" for k in wrt]
    plain = shape_inference.infer_shapes(model(op, inputs, 1, known, **attrs), strict_mode=True, data_prop=True)
    back = onnx_ad.reverse(plain, inputs=names, layout="onnx")
    feed = given(inputs, known) | {"adj_y0": weights[0][..., None]}
    return [g[..., 0] for g in ReferenceEvaluator(back).run([f"adj_{n}" for n in names], feed)]


def main() -> int:
    agree, differ, left = [], [], []
    for name, (op, inputs, known, wrt, attrs) in ONE.items():
        ours, weights, _ = gradients_of(op, inputs, 1, wrt, known, **attrs)
        try:
            found = theirs(op, inputs, known, wrt, weights, attrs)
        except Exception as e:  # theirs to name
            left.append(f"{name}: {type(e).__name__}: {str(e).splitlines()[0]:.110}" if str(e) else f"{name}: {type(e).__name__}")
            continue
        # the evaluator has constants of bodies and the scales of Resize in float32; all else is float64
        same = all(a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(ours, found))
        (agree if same else differ).append(name)
    print(f"{len(agree)} agree: {', '.join(agree)}")
    print(f"{len(differ)} differ: {', '.join(differ) or 'none'}")
    print("\n  ".join([f"{len(left)} that onnx-ad or the evaluator does not take:", *left]))
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
