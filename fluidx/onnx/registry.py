"""The list of ONNX operators that fluidx supports, and registration of functions for operators of other domains."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .errors import OnnxError, need_onnx
from .normalize import domain_of
from .read import NEWEST, OPSET_8
from .table import DYNAMIC_IMPORTERS, IMPORTERS, NUMPY_IMPORTERS, ImportFunction, imported, is_own, load_all

OPERATORS, HOST, BODY = "operators", "host", "body"


class OnnxOperator(NamedTuple):
    """An ONNX operator that fluidx supports.

    `versions` are those that the installed onnx knows, none for a domain that it does not know. `how` is "operators" if programs have it,
    "host" if NumPy computes it, and "body" if the function of its schema is expanded.
    """

    domain: str
    name: str
    versions: tuple[int, ...]
    how: str


def known(domain: str | None = None) -> list[OnnxOperator]:
    """All supported operators by domain and name, including registered ones; with `domain`, only those of that domain.

    The standard's own domain is "" or "ai.onnx". Its models are converted to the newest opset first, so all versions of an operator are
    supported. Operators of other domains are imported as they are.

    >>> import fluidx as fx
    >>> fx.onnx.known("ai.onnx")[0]
    OnnxOperator(domain='ai.onnx', name='Abs', versions=(1, 6, 13), how='operators')
    """
    need_onnx()
    load_all()
    versions, bodies = _schemas()
    keys = {key for key in (*imported(), *bodies) if key[0] != OPSET_8}
    found = [OnnxOperator(d or "ai.onnx", name, versions.get((d, name), ()), _how((d, name))) for d, name in keys]
    return sorted(k for k in found if domain is None or k.domain == (domain or "ai.onnx"))


def face(*names: str, domain: str) -> Callable[[ImportFunction], ImportFunction]:
    """Register a function that imports operators of your own domain into programs. It replaces an earlier one.

    The function takes a node: `n.x(k)` is operand k as a variable, `n.attr(name, default)` an attribute, and `n.b` a builder with a method
    for each operator of a program. It returns the output, or a tuple of outputs. Its operators have their gradients. Raises OnnxError for
    an operator that fluidx has itself.

    >>> import fluidx as fx, numpy as np
    >>> from onnx import TensorProto, helper
    >>> @fx.onnx.face("Swash", domain="com.example")
    ... def swash(n):
    ...     return n.b.scale(n.b.tanh(n.x()), scale=n.attr("height", 1.0))
    >>> x, y = (helper.make_tensor_value_info(v, TensorProto.FLOAT, ["n", 2]) for v in "xy")
    >>> node = helper.make_node("Swash", ["x"], ["y"], domain="com.example", height=2.0)
    >>> opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.example", 1)]
    >>> model = fx.onnx.load(helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets))
    >>> [op.type for op in model.program.ops]
    ['tanh', 'scale']
    """
    return _own(IMPORTERS, names, domain)


def host(*names: str, domain: str) -> Callable[[ImportFunction], ImportFunction]:
    """Register a function that computes operators of your own domain with NumPy. It replaces an earlier one.

    The function takes a node, and `n.value(k)` is operand k as an array. `session` runs models with such an operator; a program can contain
    it only if its operands are known. Raises OnnxError for an operator that fluidx has itself.

    >>> import fluidx as fx, numpy as np
    >>> @fx.onnx.host("Count", domain="com.example")
    ... def count(n):
    ...     return np.int64(np.count_nonzero(n.value()))
    >>> fx.onnx.known("com.example")[-1].how in ("host", "operators")
    True
    """
    return _own(NUMPY_IMPORTERS, names, domain)


def _own(table: dict[tuple[str, str], ImportFunction], names: tuple[str, ...], domain: str) -> Callable[[ImportFunction], ImportFunction]:
    load_all()
    if not names or not all(isinstance(n, str) and n for n in names):
        raise OnnxError(f"name the operators that the function implements: @fx.onnx.face('MyOp', domain='com.example'); got {names}")
    keys = [(domain_of(domain), n) for n in names]
    for key in keys:
        if key in table and is_own(table[key]):
            raise OnnxError(f"fluidx has operator {key[1]} of domain {domain or 'ai.onnx'!r}; use another name or a domain of your own")

    def register(f: ImportFunction) -> ImportFunction:
        table.update((key, f) for key in keys)
        return f

    return register


def _how(key: tuple[str, str]) -> str:
    return OPERATORS if key in IMPORTERS or key in DYNAMIC_IMPORTERS else HOST if key in NUMPY_IMPORTERS else BODY


def _schemas() -> tuple[dict[tuple[str, str], tuple[int, ...]], set[tuple[str, str]]]:
    """The versions of all operators, and the operators for which a schema defines a function body."""
    import onnx

    versions: dict[tuple[str, str], set[int]] = {}
    bodies = set()
    for s in onnx.defs.get_all_schemas_with_history():
        if s.domain or s.since_version <= NEWEST:
            versions.setdefault((s.domain, s.name), set()).add(s.since_version)
        if (s.has_function or s.has_context_dependent_function) and not s.deprecated:
            bodies.add((s.domain, s.name))
    return {key: tuple(sorted(v)) for key, v in versions.items()}, bodies
