"""A stand-in for the cupy module, on NumPy: it keeps host and device arrays apart, and knows no arguments that CuPy does not."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

# arguments beside the arrays, as CuPy's reference lists them; NumPy takes more
_UFUNC = {"__call__": {"out", "dtype", "casting"}, "reduce": {"axis", "dtype", "out", "keepdims"}, "at": set(), "accumulate": {"axis"}}
_TAKES = {
    "take": {"axis", "out"}, "take_along_axis": {"axis"}, "einsum": {"optimize", "dtype"}, "sum": {"axis", "dtype", "out", "keepdims"},
    "max": {"axis", "out", "keepdims"}, "min": {"axis", "out", "keepdims"}, "argsort": {"axis", "kind"},
    "argmax": {"axis", "keepdims", "out"},
    "cumsum": {"axis", "dtype", "out"}, "dot": {"out"}, "clip": {"out"}, "mean": {"axis", "dtype", "out", "keepdims"},
    "copyto": {"casting", "where"}, "concatenate": {"axis", "out"}, "where": set(), "argmin": {"axis", "keepdims", "out"},
}  # fmt: skip
_MISSING = ("errstate", "nditer", "bitwise_count", "getbufsize", "sliding_window_view", "vectorize", "emath", "matvec", "vecmat")


class DeviceArray(np.ndarray):
    """An array that refuses to meet one of the host."""

    device = nullcontext()
    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))

    def get(self, out=None):
        if out is None:
            return np.array(self.view(np.ndarray))
        assert type(out) is np.ndarray and out.dtype == self.dtype and out.shape == self.shape and out.flags.c_contiguous
        out[...] = self.view(np.ndarray)
        return out

    def set(self, value):
        assert type(value) is np.ndarray and value.dtype == self.dtype and value.shape == self.shape and value.flags.c_contiguous
        self.view(np.ndarray)[...] = value

    def __setitem__(self, index, value):
        _refuse_host((value,))
        super().__setitem__(index, value)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        # what NumPy's own methods of arrays add
        plain = {"where": (True,), "initial": (None, np._NoValue), "subok": (False,)}
        kwargs = {k: v for k, v in kwargs.items() if not any(v is p for p in plain.get(k, ()))}
        _check(ufunc.__name__, _UFUNC[method], kwargs)
        _refuse_host((*inputs, *out))
        if out:
            kwargs["out"] = tuple(map(_host, out))
        result = getattr(ufunc, method)(*map(_host, inputs), **kwargs)
        return out[0] if len(out) == 1 else out or device(result)

    def __array_function__(self, func, types, args, kwargs):
        return _run(func.__name__, func, args, kwargs)


def device(value):
    """`value` with every array in it on the device."""
    if isinstance(value, (tuple, list)):  # NumPy's tuples have names, CuPy's have none
        return [*map(device, value)] if isinstance(value, list) else tuple(map(device, value))
    if isinstance(value, np.generic):  # CuPy gives arrays of no axes, never scalars
        return np.array(value).view(DeviceArray)
    return value.view(DeviceArray) if type(value) is np.ndarray else value


def _host(value):
    if isinstance(value, (tuple, list)):
        return type(value)(map(_host, value))
    return value.view(np.ndarray) if isinstance(value, DeviceArray) else value


def _refuse_host(values):
    for v in values:
        if isinstance(v, (tuple, list)):
            _refuse_host(v)
        elif type(v) is np.ndarray:
            raise TypeError(
                f"Unsupported type <class 'numpy.ndarray'>: an array of the host, {v.dtype}{list(v.shape)}, meets one of the device"
            )


def _check(name, known, kwargs):
    if unknown := set(kwargs) - known:
        raise TypeError(f"cupy.{name} has no argument {sorted(unknown)}")


def _run(name, func, args, kwargs):
    if name in _TAKES:
        _check(name, _TAKES[name], kwargs)
    if name not in ("asarray", "array"):
        _refuse_host((*args, *kwargs.values()))
    out = kwargs.get("out")
    result = func(*_host(args), **{k: _host(v) for k, v in kwargs.items()})
    return out if out is not None else device(result)


class _Function:
    def __init__(self, name, func):
        self.name, self.func = name, func

    def __call__(self, *args, **kwargs):
        if isinstance(self.func, np.ufunc):
            _check(self.name, _UFUNC["__call__"], kwargs)
        return _run(self.name, self.func, args, kwargs)

    def __getattr__(self, method):
        if method not in _UFUNC:
            raise AttributeError(f"cupy.{self.name} has no attribute {method!r}")
        return lambda *args, **kwargs: _run(self.name, getattr(self.func, method), args, kwargs)


class FakeCupy:
    """`fake.add(x, y)` and the rest of cupy's names."""

    __name__, __version__ = "cupy", "14.2.0"
    ndarray = DeviceArray
    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None))
    lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=_Function("as_strided", np.lib.stride_tricks.as_strided)))

    def __getattr__(self, name):
        value = getattr(np, name)
        if name in _MISSING or name.startswith("_"):
            raise AttributeError(f"module 'cupy' has no attribute {name!r}")
        return value if isinstance(value, type) or not callable(value) else _Function(name, value)

    @staticmethod
    def asnumpy(x):
        return x.get() if isinstance(x, DeviceArray) else np.asarray(x)


fake = FakeCupy()
