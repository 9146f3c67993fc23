"""ONNX models: read them, run them, train them as programs, and write them. Needs the extra `fluidx[onnx]`.

`load` returns a model as a program to train, `set_training` prepares it, with low-rank adapters (`Lora`) if asked, and `save` writes any
program as a model; `save_adapters` writes adapters alone, and `merge` adds them to the weights of a model. `session` runs models
that cannot become a program too, such as tree ensembles and loops whose results grow. `known` lists the supported operators; `face` and
`host` add operators of your own. `fluidx.onnx.backend` implements the standard's backend interface.

>>> import fluidx as fx, numpy as np
>>> from onnx import TensorProto, helper
>>> x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, 2]) for n in "xy")
>>> model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "small", [x], [y]))
>>> fx.onnx.session(model).run({"x": np.float32([[1, -1]])})[0].tolist()
[[1.0, 0.0]]
"""

from __future__ import annotations

from .adapter_files import save_adapters
from .errors import OnnxError
from .export import save
from .lora import Lora
from .losses import Loss
from .merge import merge
from .model import OnnxModel, load
from .read import read
from .registry import face, host, known
from .sessions import Session, session
from .training import set_training
from .training_info import training_step

__all__ = [
    "Lora", "Loss", "OnnxError", "OnnxModel", "Session", "face", "host", "known", "load", "merge", "read", "save", "save_adapters",
    "session", "set_training", "training_step",
]  # fmt: skip
