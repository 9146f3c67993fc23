"""The optional C kernels: loading, threads, and blocks of calls that run without the GIL.

A `NativeCall` is one kernel with its arguments, 64-bit words: addresses, sizes, strides, numbers. `compile` packs any number of calls, in
order, into one block, and returns a function without arguments that executes all of them in one call into C, which costs about 100 ns.

The extension is loaded when it is first needed. `enabled()`: are native kernels used? `why_not()`: the reason if they are not. If the
processor has fused multiply-add (all levels above base), matrix products are the extension's own. At level base they are those of NumPy's
BLAS, with one thread, in pieces that are split over the thread pool.
"""

from __future__ import annotations

import ctypes
import glob
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .. import config
from ..ir.dtypes import dtype_name


class NativeError(RuntimeError):
    """Native kernels were requested and are missing, or a call does not fit its kernel."""


class NativeCall(NamedTuple):
    """One kernel and its arguments. `keeps` are the arrays whose addresses are in `args`. `tail`: may a tail be added (`then`)?"""

    fn: str
    args: tuple[int | float, ...]
    keeps: tuple[Any, ...] = ()
    tail: bool = False


# -- loading ------------------------------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    module: ModuleType | None
    reason: str  # the reason why there is no module
    blas: str  # the library's name for sgemm, or ""
    no_blas: str  # the reason why there is none


_BASE = "base"  # the level whose products are those of a BLAS
_lock = threading.Lock()
_state: _State | None = None


def _load() -> _State:
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = _start()
    return _state


def _start() -> _State:
    try:
        _native = import_module("fluidx._native")
    except ModuleNotFoundError:
        # built for another Python: a free-threaded Python cannot load an extension of the stable ABI, and vice versa
        others = sorted(glob.glob("_native.*", root_dir=os.path.dirname(os.path.dirname(__file__))))
        here = f" for this Python (there is {', '.join(others)})" if others else ""
        return _State(None, f"the extension is not built{here}; install fluidx with a C compiler at hand", "", "")
    except ImportError as e:
        return _State(None, f"the extension does not load ({e}); install fluidx again", "", "")
    if wanted := config.native_level():
        if wanted not in _native.levels():
            reason = f"FLUIDX_NATIVE_LEVEL={wanted}, and this processor has {', '.join(_native.levels())}"
            warnings.warn(f"{reason}; NumPy computes instead, which is slower: give one of these, or unset it", stacklevel=2)
            return _State(None, reason, "", "")
        _native.set_level(wanted)
    _native.set_num_threads(config.threads() or cores())
    blas, no_blas = _find_blas(_native)
    return _State(_native, "", blas, no_blas)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(which_cores())


def which_cores() -> list[int]:
    """The cores that this process may use, by their numbers."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def why_not() -> str:
    """The reason why native kernels are not used; "" if they are."""
    if config.kernels() == "numpy":
        return "FLUIDX_KERNELS=numpy"
    return _load().reason


def enabled() -> bool:
    """Are native kernels used? Yes if they are built and FLUIDX_KERNELS does not forbid it.

    With FLUIDX_KERNELS=native it is an error if they are missing.
    """
    reason = why_not()
    if reason and config.kernels() == "native":
        raise NativeError(f"FLUIDX_KERNELS=native, but {reason}")
    return not reason


def has_products() -> bool:
    """Can matrix product kernels be called? At level base they need a BLAS."""
    return _load().module is not None and (level() != _BASE or bool(_load().blas))


def holds_blas() -> bool:
    """Was NumPy's BLAS found and limited to one thread?"""
    return bool(_load().blas)


def describe() -> str:
    """One line: the level, the BLAS and the threads of native kernels, or the reason why they are off."""
    if reason := why_not():
        return f"native kernels off: {reason}"
    state = _load()
    by = "own products" if level() != _BASE else f"products by {state.blas}" if state.blas else f"products by NumPy ({state.no_blas})"
    tiles = {0: ", no Winograd", 2: "", 4: ", Winograd in tiles of 4x4"}[config.winograd()]
    return f"native kernels on: level {level()}, {by}, {num_threads()} threads{tiles}"


def _module() -> Any:
    state = _load()
    if state.module is None:
        raise NativeError(f"there are no native kernels: {state.reason}")
    return state.module


# -- the BLAS of NumPy --------------------------------------------------------------------------------------------------------------

# prefixes and suffixes of function names in builds of OpenBLAS, MKL and Accelerate
_DECORATIONS = [(pre, post) for pre in ("scipy_", "") for post in ("64_", "", "_64", "$NEWLAPACK$ILP64", "$NEWLAPACK")]


def _libraries() -> Iterator[ctypes.CDLL]:
    """NumPy's extension module, through which the loader finds its libraries; on Windows, the libraries themselves."""
    names = [str(import_module("numpy._core._multiarray_umath").__file__)]
    if os.name == "nt":
        names += sorted(glob.glob(os.path.join(os.path.dirname(np.__file__), os.pardir, "numpy.libs", "*openblas*.dll")))
    for name in names:
        try:
            yield ctypes.CDLL(name)
        except OSError:
            continue


def _find_blas(module: Any) -> tuple[str, str]:
    """Give sgemm and dgemm to the extension. Returns (name, "") if they are right, ("", reason) if there are none."""
    before = module.level()
    module.set_level(_BASE)
    try:
        return _try_blas(module)
    finally:
        module.set_level(before)


def _try_blas(module: Any) -> tuple[str, str]:
    for library in _libraries():
        for pre, post in _DECORATIONS:
            f32, f64 = (getattr(library, f"{pre}cblas_{letter}gemm{post}", None) for letter in "sd")
            if f32 is None or f64 is None:
                continue
            found = [ctypes.cast(f, ctypes.c_void_p).value for f in (f32, f64)]
            module.set_blas(*found, 0)
            if not _products_are_right(module):
                module.set_blas(0, 0, 0)
                return "", f"{pre}cblas_sgemm{post} gives wrong products"
            _one_thread(library)
            module.set_blas(*found, 1)
            if not _pieces_are_even(module):
                module.set_blas(*found, 0)
            return f"{pre}cblas_sgemm{post}", ""
    return "", "NumPy's library exports no cblas_sgemm"


def _products_are_right(module: Any) -> bool:
    """Test one product of odd shape with small integers in each dtype, which is exact in any order of summation.

    It also proves that 64-bit integers work with a library built for 32-bit ones: calling conventions pass both in 64-bit registers or
    slots.
    """
    m, n, k = 5, 7, 3
    for dtype in (np.float32, np.float64):
        sides: list[Any] = [np.arange(r * c).reshape(r, c).astype(dtype) for r, c in ((m, k), (k, n))]
        a, b = sides
        c = np.full((m, n), np.nan, dtype)
        _block(module, [_product(module, a, b, c)])()
        if not (c == (a[:, :, None] * b).sum(1)).all():
            return False
    return True


def _pieces_are_even(module: Any) -> bool:
    """Have products in large pieces the same bits as whole products? Tested on a few odd shapes."""
    rng = np.random.default_rng(0)
    module.use_threads(1)
    for m, n, k in ((131, 270, 310), (301, 140, 260), (150, 700, 190)):
        a, b = rng.random((m, k), "float32"), rng.random((k, n), "float32")
        pieces, whole = np.empty((m, n), "float32"), np.empty((m, n), "float32")
        half = (m // 2 + 15) // 16 * 16, (n // 2 + 15) // 16 * 16
        for rows in (slice(0, half[0]), slice(half[0], m)):
            for columns in (slice(0, half[1]), slice(half[1], n)):
                _block(module, [_product(module, a[rows], b[:, columns], pieces[rows, columns])])()
        _block(module, [_product(module, a, b, whole)])()
        if not np.array_equal(pieces, whole):
            break
    module.use_threads(0)
    return np.array_equal(pieces, whole)


def _one_thread(library: ctypes.CDLL) -> None:
    """Limit the library to one thread: two thread pools that spin on the same cores slow each other by a factor of ten and more."""
    for pre, post in _DECORATIONS:
        for name in ("openblas_set_num_threads", "MKL_Set_Num_Threads"):
            if setter := getattr(library, f"{pre}{name}{post}", None):
                setter(ctypes.c_int(1))
                return


# -- blocks of calls ----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def functions() -> dict[str, int]:
    """The kernels by name, with the number of words that each takes; -1: any number."""
    return dict(_module().functions())


def opcodes() -> list[str]:
    """The instructions of the vector machine by number; `ops.expr.native` writes programs for it."""
    return _module().opcodes()


def compile(calls: Sequence[NativeCall]) -> Callable[[], None]:
    """A function that executes the calls in order, without the GIL.

    The arrays must not move; the function keeps them alive. Several threads may call it at the same time if the calls do not write the same
    memory.
    """
    return _block(_module(), calls)


def then(call: NativeCall, tail: NativeCall) -> NativeCall:
    """`call`, which may have a tail, with one: a call of the vector machine without packed rows, over the contiguous result of `call` in
    its order. The kernel runs it over each part of the result that it has made, while that is in cache."""
    words = np.frombuffer(_words(tail.args), np.int64)
    return NativeCall(call.fn, (*call.args[:-1], address(words)), (*call.keeps, words, *tail.keeps))


def taken_by_threads(calls: Sequence[NativeCall]) -> int:
    """The bytes that each thread keeps for itself in these calls. The arrays of the calls need not exist.

    Only for kernels that declare it: they access their operands only in the loops that threads share.
    """
    return max((_module().ask(_packed(_module(), call)) for call in calls), default=0)


def _block(module: Any, calls: Sequence[NativeCall]) -> Callable[[], None]:
    return module.block(b"".join([_packed(module, call) for call in calls]), tuple([call.keeps for call in calls]))


def packed(calls: Sequence[NativeCall]) -> bytearray:
    """The words of calls in order: for each call, the number of its kernel, the number of its arguments, and the arguments."""
    return bytearray().join([_packed(_module(), call) for call in calls])


def block(words: bytes, keeps: tuple[Any, ...]) -> Callable[[], None]:
    """`compile` for calls that are `packed`. `keeps` are the arrays whose addresses are among the words."""
    return _module().block(words, keeps)


def _packed(module: Any, call: NativeCall) -> bytes:
    names = _numbers(module)
    if call.fn not in names:
        raise NativeError(f"there is no native kernel {call.fn!r}; there are {', '.join(names)}")
    number, words = names[call.fn]
    if words not in (-1, len(call.args)):
        raise NativeError(f"native kernel {call.fn} takes {words} words, got {len(call.args)}")
    return _words((number, len(call.args), *call.args))


@lru_cache(maxsize=1)
def _numbers(module: Any) -> dict[str, tuple[int, int]]:
    """For each kernel: its number, and the number of its words."""
    return {name: (number, words) for number, (name, words) in enumerate(module.functions())}


def _words(args: Sequence[int | float]) -> bytes:
    return _packer(tuple(map(type, args)))(*args)


@lru_cache(maxsize=1024)
def _packer(kinds: tuple[type, ...]) -> Callable[..., bytes]:
    """A packer for words of these types."""
    return struct.Struct(f"={''.join('d' if issubclass(kind, float) else 'q' for kind in kinds)}").pack


# -- threads and levels -------------------------------------------------------------------------------------------------------------


def num_threads() -> int:
    """The number of threads of the pool that all native kernels share, including the calling thread."""
    return _module().num_threads()


def set_num_threads(n: int) -> None:
    """Set the number of threads of C kernels, including the calling thread; the default is one for each core. Results do not depend on it.

    Ranks that are threads of one process share them. Without C kernels it does nothing: everything except the products of NumPy's BLAS then
    runs on one thread. Raises ValueError for a number that is not from 1 to 256.

    >>> import fluidx as fx
    >>> fx.set_num_threads(2)
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 256:
        raise ValueError(f"set_num_threads takes a number of threads from 1 to 256, got {n!r}")
    if (module := _load().module) is not None:
        module.set_num_threads(n)


def use_threads(n: int) -> None:
    """Limit runs of the calling thread to `n` threads; 0: no limit. Ranks that are threads use 1 each."""
    _module().use_threads(n)


def share_cores(ranks: int) -> None:
    """Limit the calling thread, one of `ranks` that run at once, to its share of the threads. It does nothing without native kernels."""
    if not why_not():
        use_threads(max(1, num_threads() // ranks))


def levels() -> list[str]:
    """The levels of instructions of this processor, lowest first: base, v3 (AVX2), v4 (AVX-512), and those with 16-bit products of their
    own, v4_bf16 (AVX512_BF16) and amx (AMX_BF16)."""
    return _module().levels()


def level() -> str:
    """The level that compiled calls use."""
    return _module().level()


def multiplies_pairs() -> bool:
    """Does the level have instructions for products of pairs of bfloat16?"""
    return level() in ("v4_bf16", "amx")


def chosen() -> tuple[int | str, ...]:
    """The settings on which the available kernel calls and their scratch depend, besides the operands."""
    return level(), num_threads(), config.winograd()


@contextmanager
def at_level(name: str) -> Iterator[None]:
    """Compile calls for a lower level; for tests."""
    before = level()
    _module().set_level(name)
    try:
        yield
    finally:
        _module().set_level(before)


# -- products -----------------------------------------------------------------------------------------------------------------------


def gemm(a: np.ndarray, b: np.ndarray, out: np.ndarray, *, alpha: float = 1.0, beta: float = 0.0) -> NativeCall | None:
    """The call for out = alpha * a @ b + beta * out; None if the arrays do not fit.

    The arrays have the same dtype of floats and two axes, after up to two batch axes; products of 16-bit floats are added in float32, and
    `out` may be float32. If `a` or `b` is bfloat16, the other one may be float32: it is rounded to bfloat16 while it is copied.

    `a` or `b` may lack batch axes, or have them with length 1. A matrix may be transposed or part of a larger one, if one of its last two
    axes is contiguous.
    """
    return _product(_module(), a, b, out, alpha, beta) if has_products() else None


_PRODUCTS = {"float32": "gemm_f32", "float64": "gemm_f64", "bfloat16": "gemm_16", "float16": "gemm_16"}
HOLDS = {"float32": 0, "bfloat16": 1, "float16": 2}  # what an array of a kernel for 16-bit floats holds
_ROUNDED = 3  # float32 that counts as rounded to bfloat16


def _product(module: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray, alpha: float = 1.0, beta: float = 0.0) -> Any:
    kinds, ndim = {dtype_name(a.dtype), dtype_name(b.dtype)}, out.ndim
    rounds = kinds == {"bfloat16", "float32"}
    kind = "bfloat16" if rounds else kinds.pop() if len(kinds) == 1 else ""
    fn, made = _PRODUCTS.get(kind), dtype_name(out.dtype)
    if fn is None or made != kind and (fn != "gemm_16" or made != "float32") or not 2 <= ndim <= 4:
        return None
    batch, (m, n), k = out.shape[:-2], out.shape[-2:], a.shape[-1]
    if a.shape[-2:] != (m, k) or b.shape[-2:] != (k, n):
        return None
    lay_a, lay_b, lay_c = _layout(a, batch), _layout(b, batch), _layout(out, batch)
    if lay_a is None or lay_b is None or lay_c is None or lay_c[0]:
        return None
    (ta, lda, oa, ia), (tb, ldb, ob, ib), (_, ldc, oc, ic) = lay_a, lay_b, lay_c
    outer, inner = (batch[0] if ndim == 4 else 1), (batch[-1] if ndim > 2 else 1)
    at_a, at_b, at_out = map(module.address, (a, b, out))
    words = (ta, tb, m, n, k, float(alpha), at_a, lda, at_b, ldb, float(beta), at_out, ldc, outer, oa, ob, oc, inner, ia, ib, ic)
    hold: tuple[int, ...] = ()
    if fn == "gemm_16":
        factors = (_ROUNDED if rounds and x.dtype == np.float32 else HOLDS[dtype_name(x.dtype)] for x in (a, b))
        hold = (*factors, HOLDS[made])
    return NativeCall(fn, (*words, *hold, 0), (a, b, out), tail=True)


def address(a: np.ndarray) -> int:
    """The address of an array's first element."""
    # called for every operand of every call, so it does not go through _module() once the module is loaded
    return (_state.module if _state is not None and _state.module is not None else _module()).address(a)


def _layout(x: np.ndarray, batch: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """(transposed, distance of rows, distances of matrices in an outer and an inner batch), in elements. None if neither of the last axes
    is contiguous, or if the axes before them do not fit the batch (equal, of size 1, or missing)."""
    return _lies(x.itemsize, x.shape, x.strides, batch)


@lru_cache(maxsize=4096)
def _lies(size: int, shape: tuple[int, ...], steps_in_bytes: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    ndim, strides = len(shape), [s // size for s in steps_in_bytes]
    if any(s % size for s in steps_in_bytes) or ndim - 2 > len(batch):
        return None
    (rows, columns), (down, right) = shape[-2:], strides[-2:]
    steps = [0] * (4 - ndim)
    for d, full, s in zip(shape[:-2], batch[len(batch) - ndim + 2 :], strides, strict=False):
        if d not in (1, full):
            return None
        steps.append(s if d == full > 1 else 0)
    outer, inner = steps
    if 0 in shape:  # the strides of an empty array mean nothing
        return 0, max(columns, 1), outer, inner
    if (right == 1 or columns < 2) and (down >= max(columns, 1) or rows < 2):
        return 0, max(columns, 1) if rows < 2 else down, outer, inner
    if (down == 1 or rows < 2) and (right >= max(rows, 1) or columns < 2):
        return 1, max(rows, 1) if columns < 2 else right, outer, inner
    return None
