"""The CUDA form of every elementwise op and of its derived gradient compiles for a GPU. NVRTC needs none, only its package."""

import ctypes
import importlib.metadata
import math

import pytest

import fluidx.ops  # noqa: F401 - fills OPS
from fluidx.ir import all_ops
from fluidx.ops import expr as ex
from fluidx.ops.elementwise.declare import DTYPES
from fluidx.ops.expr.c import cuda_kernel

ARCH = "sm_90"
PACKAGE = "nvidia-cuda-nvrtc"


def library_path():
    """Where the installed package has libnvrtc, or None."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [f for f in files if f.name.startswith("libnvrtc.so")]
    return str(found[0].locate()) if found else None


class Nvrtc:
    """NVRTC by ctypes: CUDA C++ in, log out."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)

    def call(self, name, *args):
        return getattr(self.lib, name)(*args)

    def text(self, what, program):
        size = ctypes.c_size_t()
        assert self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert self.call(f"nvrtcGet{what}", program, buffer) == 0
        return buffer.raw

    def compile(self, source):
        """(machine code or None, log) of a translation unit."""
        program = ctypes.c_void_p()
        assert self.call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"ops.cu", 0, None, None) == 0
        options = [f"-arch={ARCH}".encode(), b"-std=c++17", b"--ptxas-options=-v"]
        try:
            failed = self.call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
            log = self.text("ProgramLog", program).rstrip(b"\0").decode()
            return (None if failed else self.text("CUBIN", program)), log
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


@pytest.fixture(scope="module")
def nvrtc():
    path = library_path()
    if path is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install -e .[kernels-ci]")
    return Nvrtc(path)


def kernels():
    """(name, CUDA source) of every expression in the registry, once for each setting of attributes in the op's samples."""
    for op in all_ops():
        e = getattr(op, "expr", None)
        if e is None:
            continue
        reads = [s for s in ex.symbols(e) if s not in op.attrs]
        settings = [op.complete_attrs(s.attrs) for s in op.samples()]
        forms = dict.fromkeys(ex.substitute(e, {k: a[k] for k in ex.symbols(e) if k in a}) for a in settings)
        of = {s.args[0].dtype.name for s in op.samples()}
        dtype = "bool" if of <= set(DTYPES["bool"]) else "int32" if of <= set(DTYPES["int"]) else "float32"
        for k, form in enumerate(forms):
            yield f"{op.name}_{k}", cuda_kernel(f"{op.name}_{k}", form, dtype, reads)


def test_every_elementwise_expression_compiles_without_spills(nvrtc):
    sources = dict(kernels())
    assert len(sources) > 100 and {"gelu_0", "gelu_grad_0", "equal_0", "logical_not_0"} <= set(sources)
    code, log = nvrtc.compile("\n".join(sources.values()))
    assert code is not None, log
    assert "warning" not in log, log
    assert log.count("0 bytes spill stores") == len(sources), log
    assert all(f".text.{name}".encode() in code for name in sources)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_infinities_and_nan_need_no_header(nvrtc, dtype):
    x = ex.sym("x")
    e = ex.where(ex.isnan(x), -math.inf, ex.where(x > math.inf, math.nan, math.inf))
    code, log = nvrtc.compile(cuda_kernel("f", e, dtype, ["x"]))
    assert code is not None, log


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_whole_numbers_compile(nvrtc, dtype):
    x, y = ex.sym("x"), ex.sym("y")
    e = ex.where(ex.abs(x) % y > x // y, ex.max(x, 3) - ex.sign(x), ex.min(x, y) * 2)
    code, log = nvrtc.compile(cuda_kernel("f", e, dtype, ["x", "y"]))
    assert code is not None, log


def test_an_error_is_reported_with_its_line(nvrtc):
    code, log = nvrtc.compile('extern "C" __global__ void f(float *x) {\n  *x = tangent(*x);\n}\n')
    assert code is None and "ops.cu(2): error" in log
