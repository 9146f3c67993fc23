"""Random operators and Dropout. They draw new numbers in each run; without a seed, from the seed of the program."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import ANY, Variable
from ...ir.dtypes import as_dtype, np_dtype
from ..export_graph import Op
from ..node import Node
from ..table import exports, on_numpy
from ..values import Outputs, fits_program, numpy_dtype

_DRAWS = {"RandomNormal": "gaussian_random", "RandomUniform": "uniform_random"}


@on_numpy("RandomNormal", "RandomUniform")
def drawn(n: Node) -> object:
    return _draw(n, _DRAWS[n.op_type], tuple(n.attr("shape")), _dtype(n, "float32"))


@on_numpy("RandomNormalLike", "RandomUniformLike")
def drawn_like(n: Node) -> object:
    return _draw(n, _DRAWS[n.op_type.removesuffix("Like")], n.shape(0), _dtype(n, n.dtype(0)))


def _draw(n: Node, op: str, shape: tuple[int, ...], dtype: str) -> Variable:
    if op == "gaussian_random":
        given = {"mean": n.attr("mean", 0.0), "std": n.attr("scale", 1.0)}
    else:
        given = {"min": n.attr("low", 0.0), "max": n.attr("high", 1.0)}
    return n.b.emit(op, shape=shape, dtype=dtype, seed=_seed(n), per_run=True, **given)


@on_numpy("Bernoulli")
def bernoulli(n: Node) -> object:
    return n.cast(n.b.bernoulli(n.x(0), seed=_seed(n), per_run=True), _dtype(n, n.dtype(0)))


@on_numpy("Multinomial")
def multinomial(n: Node) -> object:
    """Each row of unnormalized log-probabilities gives `sample_size` classes."""
    count, (rows, classes) = n.attr("sample_size", 1), n.shape(0)
    x = n.b.reshape(n.b.softmax(n.x(0)), shape=(rows, 1, classes))
    x = n.b.reshape(n.b.expand(x, expand_times=(1, count, 1)), shape=(rows * count, classes))
    drawn = n.b.reshape(n.b.sampling_id(x, seed=_seed(n), per_run=True), shape=(rows, count))
    return n.cast(drawn, _dtype(n, "int32"))


@on_numpy("Dropout")
def dropout(n: Node) -> object:
    """Dropout. In sessions a seed gives the mask that NumPy draws with it in each run, as in the standard's reference; training draws new
    masks."""
    ratio = float(np.asarray(n.value(1)).item()) if n.has(1) else 0.5
    training = n.has(2) and bool(np.asarray(n.value(2)).item())
    x = n.operands[0]
    if not training or ratio == 0:
        if isinstance(x, Variable) and 0 < ratio < 1:  # it has no effect until set_training activates it
            x, _ = n.b.dropout(x, out={"Mask": None}, dropout_prob=ratio, is_test=True, dropout_implementation="upscale_in_train")
        return Outputs([x, _all_true(n) if n.wants(1) else None])
    if not 0 <= ratio < 1:
        raise n.wrong(f"its ratio must be at least 0 and below 1, found {ratio}")
    seed = n.attr("seed")
    if seed is None or n.importer.evaluate is None:
        out, mask = n.b.dropout(n.x(0), dropout_prob=ratio, seed=seed or 0, dropout_implementation="upscale_in_train")
        return Outputs([out, n.b.cast(mask, dtype="bool") if n.wants(1) else None])
    kept = np.random.RandomState(seed).uniform(0, 1, n.shape(0)) >= ratio
    return Outputs([n.b.elementwise_mul(n.x(0), n.const(kept / (1 - ratio), np_dtype(n.dtype(0)))), kept])


def _all_true(n: Node) -> Any:
    """True in the shape of the input, which may have open axes."""
    return n.b.fill_any_like(n.x(0), value=1.0, dtype="bool") if ANY in n.shape(0) else np.ones(n.shape(0), bool)


def _seed(n: Node) -> int:
    """The seed from an attribute that is a float; 0 means the seed of the program."""
    given = n.attr("seed")
    return 0 if given is None else int(np.float32(given).view(np.uint32)) + 1


def _dtype(n: Node, default: str) -> str:
    code = n.attr("dtype", 0)
    if not code:
        return default
    found = numpy_dtype(code)
    if not fits_program(np.zeros(0, found)):
        raise n.wrong(f"fluidx cannot draw random {found}")
    return as_dtype(found)


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("dropout")
def export_dropout(op: Op) -> str | dict[str, str]:
    """In inference, a Dropout node without effect, so that a program that trains the model again knows the rate."""
    rate, upscale = op.attrs["dropout_prob"], op.attrs["dropout_implementation"] == "upscale_in_train"
    if not op.attrs["is_test"]:
        return _training_dropout(op, rate, upscale)
    if upscale:
        return op.emit("Dropout", op["X"], op.const(np.array(rate, np.float32))) if rate < 1 else op.emit("Identity", op["X"])
    return op.emit("Mul", op["X"], op.const(np.array(1.0 - rate, np_dtype(op.dtype("X")))))


def _training_dropout(op: Op, rate: float, upscale: bool) -> dict[str, str]:
    if rate >= 1:
        raise op.wrong("it drops everything, which a Dropout node cannot do")
    y, kept = op.emit_many("Dropout", 2, op["X"], op.const(np.array(rate, np.float32)), op.const(np.array(True)), seed=op.attrs["seed"])
    if not upscale:
        y = op.emit("Mul", op["X"], op.emit("Cast", kept, to=op.code(op.dtype("X"))))
    return {"Out": y, "Mask": op.emit("Cast", kept, to=op.code("uint8"))}


@exports("dropout_grad")
def dropout_grad(op: Op) -> str:
    rate, kept = op.attrs["dropout_prob"], op.emit("Cast", op["Mask"], to=op.code(op.dtype("Out@GRAD")))
    g = op.emit("Mul", op["Out@GRAD"], kept)
    if op.attrs["dropout_implementation"] != "upscale_in_train":
        return g
    return op.emit("Mul", g, op.const(np.array(1 / (1 - rate), np_dtype(op.dtype("Out@GRAD")))))
