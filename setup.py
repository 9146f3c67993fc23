"""The optional extension fluidx._native. What the package is stands in setup.cfg; only what needs Python code is here.

FLUIDX_NATIVE=0 leaves the extension out (a pure wheel), 1 makes a failure to build it an error, and unset tries: without a compiler the
package works on NumPy alone, and its wheel is a pure one.
"""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from glob import glob
from platform import machine
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

# Strict IEEE arithmetic with two exceptions that change no value: nobody reads errno or the exception flags after a loop. Contraction
# would let a compiler fuse a * b + c where it likes, and results would differ between levels of instructions.
GCC = ["-std=c11", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]

# A processor of today's x86-64 uses level v3 or v4, and the file of the baseline is compiled in half the time.
COLD = {"level_base.c": ["-O2", "-ftree-loop-vectorize", "-fvect-cost-model=dynamic"]} if machine() in ("x86_64", "AMD64") else {}


def extensions(environ: Mapping[str, str] = os.environ) -> list[Extension]:
    """The extension modules to build, as FLUIDX_NATIVE says."""
    wanted = environ.get("FLUIDX_NATIVE", "").strip()
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"environment variable FLUIDX_NATIVE: expected 0, 1 or nothing, found {wanted!r}")
    if wanted == "0":
        return []
    windows = sysconfig.get_platform().startswith("win")
    return [
        Extension(
            "fluidx._native",
            sorted(glob("fluidx/native/src/*.c")),
            depends=[*sorted(glob("fluidx/native/src/*.h")), "setup.py"],
            define_macros=[] if free_threaded() else [("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=not free_threaded(),
            extra_compile_args=["/O2", "/std:c11"] if windows else GCC,
            extra_link_args=[] if windows else ["-pthread"],
            optional=wanted != "1",
        )
    ]


class BuildAtOnce(build_ext):
    """Compiles the sources of an extension at the same time, one for each core: each level of instructions is a source of its own.

    Files appear under their names when they are complete, so a build that is interrupted leaves nothing half-made, and a process that runs
    the kernels built before keeps them.
    """

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == "unix":
            one, link = self.compiler.compile, self.compiler.link_shared_object

            def compile_one(source: str, how: dict[str, Any]) -> list[str]:
                return one([source], **{**how, "extra_postargs": [*how["extra_postargs"], *COLD.get(os.path.basename(source), ())]})

            def compile_all(sources: list[str], **how: Any) -> list[str]:
                check_compiler(self.compiler.compiler_so, [*self.compiler.include_dirs, *how.get("include_dirs", ())])
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    # the levels with most instructions take longest, and are begun first
                    tasks = [pool.submit(compile_one, source, how) for source in sorted(sources, reverse=True)]
                    show_progress(tasks)
                    return [o for task in tasks for o in task.result()]

            def link_whole(objects: list[str], path: str, *args: Any, **how: Any) -> None:
                link(objects, f"{path}.part", *args, **how)
                os.replace(f"{path}.part", path)

            self.compiler.compile, self.compiler.link_shared_object = compile_all, link_whole
        try:
            super().build_extension(ext)
        except (CCompilerError, BaseError) as e:
            if not ext.optional:
                raise
            print(f"C kernels are not built, fluidx runs on NumPy: {e}", file=sys.stderr, flush=True)
            self._make_pure()

    def copy_file(self, infile: str, outfile: str, *args: Any, **how: Any) -> Any:
        copied = super().copy_file(infile, f"{outfile}.part", *args, **how)
        os.replace(f"{outfile}.part", outfile)
        return copied

    def _make_pure(self) -> None:
        """Without its extension a wheel is one for every platform."""
        self.distribution.ext_modules, self.extensions = [], []
        if (wheel := self.distribution.get_command_obj("bdist_wheel", create=False)) is not None:
            wheel.root_is_pure = True


def check_compiler(command: list[str], includes: list[str]) -> None:
    """Raise a CompileError of one line where there is no compiler, or it finds no headers of Python."""
    what = [*command, *(f"-I{folder}" for folder in includes), "-fsyntax-only", "-x", "c", "-"]
    try:
        done = subprocess.run(what, input="#include <Python.h>\n", capture_output=True, text=True)
    except OSError:
        raise CompileError(f"there is no C compiler {command[0]}") from None
    if done.returncode:
        why = next((line for line in done.stderr.splitlines() if "error:" in line), f"exit status {done.returncode}")
        hint = "; Debian and Ubuntu: apt install python3-dev" if "Python.h" in why else ""
        raise CompileError(f"{command[0]} says {why.split('error:')[-1].strip()}{hint}")


def show_progress(tasks: list[Future]) -> None:
    """Wait until all are done or one has failed. A terminal shows one line that is kept up to date."""
    start, live, left = time.monotonic(), sys.stderr.isatty(), set(tasks)
    if not live:
        print(f"building the C kernels: {len(tasks)} files", file=sys.stderr, flush=True)
    try:
        while left:
            done, left = wait(left, 1, FIRST_EXCEPTION)
            if live:
                said = f"building the C kernels: {len(tasks) - len(left)} of {len(tasks)} files, {time.monotonic() - start:.0f} s"
                print(f"\r{said}", end="", file=sys.stderr, flush=True)
            if any(task.exception() for task in done):
                return
    finally:
        for task in left:
            task.cancel()
        if live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(f"C kernels built in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def free_threaded() -> bool:
    """Whether this interpreter has no GIL: it has no stable ABI either."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


if __name__ == "__main__":
    # A shell has what it runs in the background ignore Ctrl-C, and compilers inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    native = extensions()
    stable = {"bdist_wheel": {"py_limited_api": "cp311"}} if native and not free_threaded() else {}
    setup(ext_modules=native, cmdclass={"build_ext": BuildAtOnce}, options=stable)
