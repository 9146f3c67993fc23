"""What an installed fluidx consists of: setup.cfg names the files that are not Python code by patterns."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("setuptools")

LIST = """
from setuptools import Distribution
d = Distribution({"script_name": "setup.py"})
d.parse_config_files(["setup.cfg"])
build = d.get_command_obj("build_py")
build.ensure_finalized()
for package, folder, _, names in build._get_data_files():
    print(*(f"{folder}/{name}" for name in names), sep="\\n")
for package in build.packages:
    for _, _, path in build.find_package_modules(package, package.replace(".", "/")):
        print(path)
"""


def test_a_wheel_has_every_file_of_the_package_but_the_sources_in_c():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LIST], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packed = set(done.stdout.split())
    built = {".pyc", ".so", ".part"}
    there = {p.relative_to(ROOT) for p in (ROOT / "fluidx").rglob("*") if p.is_file() and p.suffix not in built}
    missing = {str(p) for p in there if p.parts[:3] != ("fluidx", "native", "src")} - packed
    assert not missing, f"[options.package_data] of setup.cfg has no pattern for {sorted(missing)}"


def test_an_sdist_has_the_sources_in_c():
    assert "recursive-include fluidx/native/src *.c *.h" in (ROOT / "MANIFEST.in").read_text().splitlines()
    assert {p.suffix for p in (ROOT / "fluidx" / "native" / "src").iterdir()} == {".c", ".h"}
