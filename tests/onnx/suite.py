"""The official backend suite, case by case: `python -m tests.onnx.suite [--only TEXT] [--workers N]` prints what fails, and how many pass.

Ends with 1 where a case fails that is not excluded, and where one is excluded that passes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import pkgutil
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import numpy as np

from .exclusions import excluded

OTHERS = ("simple", "pytorch-converted", "pytorch-operator", "real")


def cases() -> dict[str, Any]:
    """{name: case} of all that the installed onnx has: nodes, real and converted models."""
    parts = [*(node_cases(file) for file in node_files()), *(other_cases(kind) for kind in OTHERS)]
    return {name: case for part in parts for name, case in part.items()}


def node_files() -> list[str]:
    """The modules, by operator, that make the cases of nodes when they are imported; importing all takes some seconds."""
    from onnx.backend.test.case import node

    found = [m.name for m in pkgutil.walk_packages(node.__path__, f"{node.__name__}.") if not m.ispkg]
    found = [name for name in found if not name.rsplit(".", 1)[1].startswith("_")]
    return [name.removeprefix(f"{node.__name__}.") for name in found]


@functools.cache
def node_cases(file: str) -> dict[str, Any]:
    """{name: case} of one of `node_files`."""
    from onnx.backend.test.case import node

    before = len(node._NodeTestCases)
    importlib.import_module(f"{node.__name__}.{file}")
    return {c.name: c for c in node._NodeTestCases[before:]}


def other_cases(kind: str) -> dict[str, Any]:
    """{name: case} of one of `OTHERS`, whose models are files."""
    from onnx.backend.test.loader import load_model_tests

    return {c.name: c for c in load_model_tests(kind=kind)}


def same(got: Any, want: Any, rtol: float, atol: float) -> str:
    """How an output differs from what is expected; "" where it does not."""
    if want is None or got is None:
        return "" if want is None and got is None else f"expected {type(want).__name__}, found {type(got).__name__}"
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            return f"expected a sequence of {len(want)}, found {got!r:.80}"
        return next((d for g, w in zip(got, want) if (d := same(g, w, rtol, atol))), "")
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return f"expected shape {want.shape}, found {got.shape}"
    if want.dtype.kind in "OSU":
        return "" if (got.astype(object) == want.astype(object)).all() else "other strings"
    if got.dtype != want.dtype:
        return f"expected {want.dtype}, found {got.dtype}"
    if want.dtype.kind in "biu":
        return "" if np.array_equal(got, want) else "other numbers"
    if want.dtype.name == "bfloat16":
        rtol = max(rtol, 2**-6)  # two units of its last place, as the official runner allows
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), want.astype(wide)
    return "" if np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True) else f"differs by {np.nanmax(np.abs(a - b)):.3g}"


def model_of(case: Any) -> Any:
    """The ModelProto of a case."""
    import os

    import onnx

    if case.model is not None:
        return case.model
    if case.model_dir is not None:
        return onnx.load(os.path.join(case.model_dir, "model.onnx"))
    return onnx.load(light(case))


def light(case: Any) -> str:
    """The file of a real model, which the wheel holds with weights that nodes make."""
    import os

    import onnx

    return os.path.join(os.path.dirname(onnx.__file__), *case.url.split("/")[1:])


def ramp(info: Any) -> np.ndarray:
    """The input that the outputs beside the real models were computed of."""
    shape = tuple(d.dim_value for d in info.type.tensor_type.shape.dim)
    n = int(np.prod(shape))
    return (np.arange(n).reshape(shape) / n).astype(np.float32)


def data_of(case: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """(inputs, expected outputs) of a case."""
    import glob
    import os

    import onnx
    from onnx import numpy_helper

    if case.data_sets is not None:
        for sides in case.data_sets:
            yield tuple([numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in side] for side in sides)
        return
    if case.model_dir is None:
        expected = onnx.TensorProto()
        with open(light(case)[: -len(".onnx")] + "_output_0.pb", "rb") as f:
            expected.ParseFromString(f.read())
        model = model_of(case)
        given = {t.name for t in model.graph.initializer}
        yield [ramp(i) for i in model.graph.input if i.name not in given], [numpy_helper.to_array(expected)]
        return

    def read(path: str, info: Any) -> Any:
        with open(path, "rb") as f:
            data = f.read()
        kind = info.type.WhichOneof("value")
        proto = {"sequence_type": onnx.SequenceProto, "optional_type": onnx.OptionalProto}.get(kind, onnx.TensorProto)()
        proto.ParseFromString(data)
        if kind == "sequence_type":
            return numpy_helper.to_list(proto)
        return numpy_helper.to_optional(proto) if kind == "optional_type" else numpy_helper.to_array(proto)

    model = model_of(case)
    given = {t.name for t in model.graph.initializer}
    ins = [i for i in model.graph.input if i.name not in given]
    for folder in sorted(glob.glob(os.path.join(case.model_dir, "test_data_set_*"))):
        yield (
            [read(os.path.join(folder, f"input_{k}.pb"), i) for k, i in enumerate(ins)],
            [read(os.path.join(folder, f"output_{k}.pb"), o) for k, o in enumerate(model.graph.output)],
        )


def tried(case: Any) -> str:
    """Why a case fails; "" where it passes."""
    from fluidx.onnx import backend

    try:
        model = model_of(case)
        rep = backend.prepare(model)
        for inputs, outputs in data_of(case):
            with np.errstate(all="ignore"):
                got = rep.run(list(inputs))
            if len(got) != len(outputs):
                return f"expected {len(outputs)} outputs, found {len(got)}"
            for g, w in zip(got, outputs):
                if why := same(g, w, case.rtol, max(case.atol, 1e-7)):
                    return why
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


_CASES: dict[str, Any] = {}
_SECONDS = 60


def _late(*_: Any) -> None:
    raise TimeoutError(f"it took more than {_SECONDS} seconds")


def _named(name: str) -> tuple[str, str]:
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(_SECONDS)
    try:
        return name, tried(_CASES[name])
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--long", action="store_true", help="whole messages")
    args = parser.parse_args()
    _CASES.update(cases())
    names = [n for n in _CASES if re.search(args.only, n)]
    failed: dict[str, str] = {}
    with get_context("fork").Pool(args.workers) as pool:
        for name, why in pool.imap_unordered(_named, names, chunksize=1):
            if why:
                failed[name] = why
    excused = {n: e for n in names if (e := excluded(n))}
    passed = [n for n, e in excused.items() if n not in failed and not e.by_chance]
    unexpected = {n: why for n, why in failed.items() if n not in excused}
    for name, why in sorted(unexpected.items()):
        print(f"{name}: {why if args.long else why[:200]}")
    for name in passed:
        print(f"{name}: passes, and is excluded; delete its line in tests/onnx/exclusions.py")
    reasons = Counter(re.sub(r"'[^']*'", "'…'", w)[:90] for w in unexpected.values())
    print("\n".join(f"{k:5d}  {r}" for r, k in reasons.most_common(40)), file=sys.stderr)
    print(f"{len(names) - len(failed)} of {len(names)} pass, {len(failed) - len(unexpected)} fail that are excluded")
    sys.exit(1 if unexpected or passed else 0)


if __name__ == "__main__":
    main()
