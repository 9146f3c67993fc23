"""The optional extension fluidx._native. What the package is stands in setup.cfg; only what needs Python code is here.

FLUIDX_NATIVE=0 leaves the extension out (a pure wheel), 1 makes a failure to build it an error, and unset tries: without a compiler the
package works on NumPy alone.
"""

import os
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Strict IEEE arithmetic with two exceptions that change no value: nobody reads errno or the exception flags after a loop. Contraction
# would let a compiler fuse a * b + c where it likes, and results would differ between levels of instructions.
GCC = ["-std=c11", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]


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
            sorted(glob("fluidx/native/src/*.c"), reverse=True),  # the level that takes longest is begun first
            depends=sorted(glob("fluidx/native/src/*.h")),
            define_macros=[] if free_threaded() else [("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=not free_threaded(),
            extra_compile_args=["/O2", "/std:c11"] if windows else GCC,
            extra_link_args=[] if windows else ["-pthread"],
            optional=wanted != "1",
        )
    ]


class BuildAtOnce(build_ext):
    """Compiles the sources of an extension at the same time, one for each core: each level of instructions is a source of its own."""

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == "unix":
            one = self.compiler.compile

            def compile_all(sources: list[str], **how: Any) -> list[str]:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    return [o for objects in pool.map(lambda source: one([source], **how), sources) for o in objects]

            self.compiler.compile = compile_all
        super().build_extension(ext)


def free_threaded() -> bool:
    """Whether this interpreter has no GIL: it has no stable ABI either."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


if __name__ == "__main__":
    native = extensions()
    stable = {"bdist_wheel": {"py_limited_api": "cp311"}} if native and not free_threaded() else {}
    setup(ext_modules=native, cmdclass={"build_ext": BuildAtOnce}, options=stable)
