"""ONNX models: read, run, trained as programs, and written. Needs the extra `fluidx[onnx]`.

`load` gives a model as a program to train, `set_training` prepares it, `save` writes any program as a model, and `session` runs models that
are no programs too: forests, loops whose results grow. `known` lists the operators that are taken, `face` and `host` add
one of your own. `fluidx.onnx.backend` is the standard's interface of backends.

>>> import fluidx as fx, numpy as np
>>> from onnx import TensorProto, helper
>>> x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, 2]) for n in "xy")
>>> model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "small", [x], [y]))
>>> fx.onnx.session(model).run({"x": np.float32([[1, -1]])})[0].tolist()
[[1.0, 0.0]]
"""

from __future__ import annotations

from .errors import OnnxError
from .export import save
from .model import OnnxModel, load
from .read import read
from .registry import face, host, known
from .sessions import Session, session
from .training import set_training
from .training_info import training_step

__all__ = [
    "OnnxError", "OnnxModel", "Session", "face", "host", "known", "load", "read", "save", "session", "set_training", "training_step",
]  # fmt: skip
