"""Initializers: each writes one operator into the startup program, which gives a parameter its first value.

The values depend on nothing but the operator's `seed` attribute and the element's index, so a startup program gives the same parameters in
every run and on every rank. A seed of 0 stands for one derived from the startup program's `random_seed` and the parameter's name; a
`random_seed` of 0 stands for FLUIDX_SEED, or for one that is drawn for the job.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, prod, sqrt
from typing import Any

import numpy as np

from ._checks import number, whole, wrong
from .fluid_names import module_getattr
from .ir import Block, Program, Variable
from .ir.constants import elements
from .ir.errors import explains_arguments


def derive_seed(program: Program, name: str) -> int:
    """A seed for the variable `name` of `program`. It is equal on all ranks and never 0.

    >>> p = Program()
    >>> derive_seed(p, "fc_0.w_0") == derive_seed(Program(), "fc_0.w_0") != derive_seed(p, "fc_1.w_0")
    True
    """
    from .comm.launch_environment import seed

    return zlib.crc32(f"{program.random_seed or seed()}:{name}".encode()) or 1


class Initializer:
    """Base of the initializers. A subclass defines the operator that computes the value: `op(var, seed) -> (type, attributes)`."""

    seed = 0
    draws = True  # does it need a seed?

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = explains_arguments(cls.__init__)  # type: ignore[method-assign]

    def __call__(self, var: Variable, block: Block | None = None) -> Any:
        """Append the operator that initializes `var` to `block` (by default the block that `var` was declared in)."""
        block = block or var.block
        op_type, attrs = self.op(var, self.seed or (derive_seed(block.program, var.name) if self.draws else 0))
        of = var.desc.type
        return block.write(op_type, {}, {"Out": (var.name,)}, {"shape": of.shape, "dtype": of.dtype, **attrs})

    def op(self, var: Variable, seed: int) -> tuple[str, dict[str, Any]]:
        """The operator type and its attributes, without shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} does not say which operator it writes")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items() if not isinstance(v, np.ndarray))})"


class Constant(Initializer):
    """Every element is `value`."""

    draws = False

    def __init__(self, value: float = 0.0, force_cpu: bool = False):
        self.value = number("Constant", "value", value)

    def op(self, var: Variable, seed: int) -> tuple[str, dict[str, Any]]:
        return "fill_constant", {"value": self.value}


class Uniform(Initializer):
    """Uniform over [low, high)."""

    def __init__(self, low: float = -1.0, high: float = 1.0, seed: int = 0):
        self.low, self.high, self.seed = number("Uniform", "low", low), number("Uniform", "high", high), whole("Uniform", "seed", seed, 0)
        if self.low > self.high:
            raise wrong(f"Uniform: low is {self.low}, above high, which is {self.high}")

    def op(self, var: Variable, seed: int) -> tuple[str, dict[str, Any]]:
        return "uniform_random", {"min": self.low, "max": self.high, "seed": seed}


class Normal(Initializer):
    """Normal with mean `loc` and standard deviation `scale`."""

    _op = "gaussian_random"

    def __init__(self, loc: float = 0.0, scale: float = 1.0, seed: int = 0):
        name = type(self).__name__
        self.loc, self.scale, self.seed = number(name, "loc", loc), number(name, "scale", scale), whole(name, "seed", seed, 0)
        if self.scale < 0:
            raise wrong(f"{name}: scale, a standard deviation, must be 0 or more, got {scale}")

    def op(self, var: Variable, seed: int) -> tuple[str, dict[str, Any]]:
        return self._op, {"mean": self.loc, "std": self.scale, "seed": seed}


class TruncatedNormal(Normal):
    """Normal with mean `loc` and standard deviation `scale`, drawn from within two standard deviations of the mean."""

    _op = "truncated_gaussian_random"


class _Fan(Initializer):
    """The base of Xavier and MSRA: the variance depends on the number of inputs and outputs of a weight."""

    uniform: bool

    def _spread(self, var: Variable) -> float:
        """The variance of the weight."""
        raise NotImplementedError

    def op(self, var: Variable, seed: int) -> tuple[str, dict[str, Any]]:
        variance = self._spread(var)
        if self.uniform:
            limit = sqrt(3.0 * variance)
            return "uniform_random", {"min": -limit, "max": limit, "seed": seed}
        return "gaussian_random", {"mean": 0.0, "std": sqrt(variance), "seed": seed}


class Xavier(_Fan):
    """Glorot and Bengio (2010): variance 2 / (fan_in + fan_out), uniform or normal.

    The fans of a [in, out] matrix are its sizes; of a filter [out, in, h, w] they are in*h*w and out*h*w.
    """

    def __init__(self, uniform: bool = True, fan_in: float | None = None, fan_out: float | None = None, seed: int = 0):
        self.uniform, self.fan_in, self.fan_out, self.seed = bool(uniform), fan_in, fan_out, whole("Xavier", "seed", seed, 0)

    def _spread(self, var: Variable) -> float:
        fan_in, fan_out = fans(var.shape)
        total = (fan_in if self.fan_in is None else self.fan_in) + (fan_out if self.fan_out is None else self.fan_out)
        return 2.0 / max(total, 1)


class MSRA(_Fan):
    """He et al. (2015), for weights before a relu: variance 2 / fan_in, uniform or normal."""

    def __init__(self, uniform: bool = True, fan_in: float | None = None, seed: int = 0):
        self.uniform, self.fan_in, self.seed = bool(uniform), fan_in, whole("MSRA", "seed", seed, 0)

    def _spread(self, var: Variable) -> float:
        return 2.0 / max(fans(var.shape)[0] if self.fan_in is None else self.fan_in, 1)


class Bilinear(Initializer):
    """Bilinear interpolation weights for the [c, 1, k, k] filter of a conv2d_transpose that upsamples."""

    draws = False

    def op(self, var: Variable, seed: int) -> tuple[str, dict[str, Any]]:
        shape = var.shape
        if len(shape) != 4 or shape[2] != shape[3]:
            raise wrong(f"Bilinear initializes [out, in, k, k] filters; parameter {var.name!r} has shape {list(shape)}")
        factor = ceil(shape[3] / 2.0)
        center = (2 * factor - 1 - factor % 2) / (2.0 * factor)
        line = 1 - np.abs(np.arange(shape[3]) / factor - center)
        return _values(np.broadcast_to(np.outer(line, line), shape), var)


class NumpyArrayInitializer(Initializer):
    """The values of an array, which has the parameter's shape."""

    draws = False

    def __init__(self, value: np.ndarray):
        if not isinstance(value, np.ndarray):
            raise wrong(f"NumpyArrayInitializer takes a numpy array, got {type(value).__name__}")
        self.value = value

    def op(self, var: Variable, seed: int) -> tuple[str, dict[str, Any]]:
        if self.value.shape != var.shape:
            raise wrong(f"parameter {var.name!r} has shape {list(var.shape)}, the array for it has shape {list(self.value.shape)}")
        return _values(self.value, var)

    def __repr__(self) -> str:
        return f"NumpyArrayInitializer({self.value.dtype.name}{list(self.value.shape)})"


ConstantInitializer = Constant
UniformInitializer = Uniform
NormalInitializer = Normal
TruncatedNormalInitializer = TruncatedNormal
XavierInitializer = Xavier
MSRAInitializer = MSRA
BilinearInitializer = Bilinear

__all__ = [
    "Bilinear", "BilinearInitializer", "Constant", "ConstantInitializer", "Initializer", "MSRA", "MSRAInitializer", "Normal",
    "NormalInitializer", "NumpyArrayInitializer", "TruncatedNormal", "TruncatedNormalInitializer", "Uniform", "UniformInitializer",
    "Xavier", "XavierInitializer", "derive_seed", "fans", "force_init_on_cpu", "init_on_cpu",
]  # fmt: skip
__getattr__ = module_getattr("initializer", __all__)


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of inputs and outputs of a weight (fan in, fan out).

    >>> fans((784, 128)), fans((20, 1, 5, 5)), fans((7,))
    ((784, 128), (25, 500), (7, 7))
    """
    if len(shape) < 2:
        n = prod(shape)
        return n, n
    if len(shape) == 2:
        return shape[0], shape[1]
    field = prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _values(array: np.ndarray, var: Variable) -> tuple[str, dict[str, Any]]:
    return "assign_value", {"values": elements(array, var.dtype)}


def force_init_on_cpu() -> bool:
    """False. In fluid: are parameters initialised on the host? In fluidx the executor of the startup program decides it."""
    return False


@contextmanager
def init_on_cpu() -> Iterator[None]:
    """fluid's guard, without effect: the executor of the startup program decides where parameters get their first values."""
    yield
