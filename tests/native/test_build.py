"""setup.py: FLUIDX_NATIVE decides what is built, and a build that fails or is interrupted leaves nothing half-made."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from fluidx import native

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("setuptools")


@pytest.fixture
def extensions(monkeypatch):
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py", run_name="setup")["extensions"]


def test_unset_tries_and_forgives(extensions):
    (kernels,) = extensions({})
    assert kernels.name == "fluidx._native" and kernels.optional
    levels = {f"level_{name}.c" for name in ("base", "v3", "v4", "v4_vnni", "v4_bf16", "amx", "8_amx")}
    assert {Path(s).name for s in kernels.sources} >= {"module.c", "pool.c", *levels}


def test_1_makes_a_failure_an_error(extensions):
    (kernels,) = extensions({"FLUIDX_NATIVE": "1"})
    assert not kernels.optional


def test_0_builds_a_pure_package(extensions):
    assert extensions({"FLUIDX_NATIVE": "0"}) == []


def test_another_value_is_refused(extensions):
    with pytest.raises(SystemExit, match="FLUIDX_NATIVE: expected 0, 1 or nothing, found 'yes'"):
        extensions({"FLUIDX_NATIVE": "yes"})


def test_a_python_without_a_gil_gets_an_extension_of_its_own(monkeypatch):
    real = sysconfig.get_config_var
    monkeypatch.chdir(ROOT)
    for off in (0, 1):
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name, off=off: off if name == "Py_GIL_DISABLED" else real(name))
        (kernels,) = runpy.run_path("setup.py", run_name="setup")["extensions"]({})
        assert bool(kernels.py_limited_api) == bool(kernels.define_macros) == (not off)


def test_an_extension_of_another_python_is_named(monkeypatch, tmp_path):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(native, "import_module", missing)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native" / "__init__.py"))
    assert native._start().reason == "the extension is not built; install fluidx with a C compiler at hand"
    (tmp_path / "_native.cpython-313t-x86_64-linux-gnu.so").touch()
    (tmp_path / "_native.abi3.so").touch()
    assert native._start().reason == (
        "the extension is not built for this Python (there is _native.abi3.so, _native.cpython-313t-x86_64-linux-gnu.so); "
        "install fluidx with a C compiler at hand"
    )


# -- builds of a small extension by the same setup.py ------------------------------------------------------------------------------

MODULE = """
#include <Python.h>
static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", "", 0, NULL, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
"""


@pytest.fixture
def checkout(tmp_path):
    """A package with one C source and fluidx's setup.py; `build(CC=...)` runs it in place."""
    sources = tmp_path / "fluidx" / "native" / "src"
    sources.mkdir(parents=True)
    (tmp_path / "fluidx" / "__init__.py").touch()
    (sources / "module.c").write_text(MODULE)
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = fluidx\nversion = 0\n[options]\npackages = find:\n")
    shutil.copy(ROOT / "setup.py", tmp_path)
    return tmp_path


def build(checkout: Path, *what: str, **environ: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "setup.py", "-q", *(what or ("build_ext", "--inplace"))]
    clean = {k: v for k, v in os.environ.items() if k not in ("FLUIDX_NATIVE", "CC")}
    return subprocess.run(command, cwd=checkout, env={**clean, **environ}, capture_output=True, text=True)


def built(checkout: Path) -> list[str]:
    return sorted(p.name for p in (checkout / "fluidx").iterdir() if p.is_file() and p.name != "__init__.py")


def compiler(folder: Path, script: str) -> str:
    """A compiler that is a script: `real` is the true one."""
    real = sysconfig.get_config_var("CC")
    if not real or not shutil.which(real.split()[0]):
        pytest.skip("there is no C compiler")
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\nreal() {{ {real} "$@"; }}\n{script}\n')
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_one_line_says_so(checkout):
    done = build(checkout, CC="no-such-compiler")
    assert done.returncode == 0 and built(checkout) == []
    assert done.stderr.strip() == "C kernels are not built, fluidx runs on NumPy: there is no C compiler no-such-compiler"


def test_without_the_headers_of_python_one_line_says_which_package_has_them(checkout):
    cc = compiler(checkout, "echo '<stdin>:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1")
    done = build(checkout, CC=cc)
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert done.stderr.endswith("says Python.h: No such file or directory; Debian and Ubuntu: apt install python3-dev\n")


def test_without_a_compiler_that_must_be_there_the_build_fails(checkout):
    done = build(checkout, CC="no-such-compiler", FLUIDX_NATIVE="1")
    assert done.returncode == 1 and "there is no C compiler no-such-compiler" in done.stderr


def test_a_build_that_ends_while_it_links_leaves_nothing_and_the_next_one_builds(checkout):
    # the linker has written a part of its output when the build is killed
    half = 'for o; do case $p in -o) echo half > "$o";; esac; p=$o; done; kill -9 $PPID'
    dies = compiler(checkout, f'case "$*" in *-shared*) {half};; *) real "$@";; esac')
    assert build(checkout, CC=dies).returncode == -9
    assert built(checkout) == []
    assert build(checkout).returncode == 0
    (name,) = built(checkout)
    code = f"import importlib.util as u; s = u.spec_from_file_location('_native', 'fluidx/{name}'); u.module_from_spec(s)"
    assert subprocess.run([sys.executable, "-c", code], cwd=checkout).returncode == 0


def test_a_process_that_runs_the_kernels_keeps_them_when_they_are_built_again(checkout):
    compiler(checkout, "")  # skips where there is none
    assert build(checkout).returncode == 0
    (name,) = built(checkout)
    with open(checkout / "fluidx" / name, "rb") as before:
        assert build(checkout, "build_ext", "--inplace", "--force").returncode == 0
        assert os.fstat(before.fileno()).st_nlink == 0  # another file has its name now
    assert built(checkout) == [name]


@pytest.mark.parametrize("cc", ["no-such-compiler", ""])
def test_a_wheel_is_for_every_platform_where_it_holds_no_kernels(checkout, cc):
    pytest.importorskip("setuptools.command.bdist_wheel")
    if not cc:
        compiler(checkout, "")  # skips where there is none
    assert build(checkout, "bdist_wheel", **({"CC": cc} if cc else {})).returncode == 0
    (wheel,) = (checkout / "dist").iterdir()
    kernels = [name for name in zipfile.ZipFile(wheel).namelist() if "_native." in name]
    assert wheel.name.endswith("-py3-none-any.whl") == (not kernels) == bool(cc)
