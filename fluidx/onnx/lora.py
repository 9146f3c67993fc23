"""`Lora`, the options of low-rank adapters, and the names of the modules of a model that they adapt."""

from __future__ import annotations

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

from ..ir.errors import nearest
from .errors import OnnxError
from .program_writer import valid_name
from .roles import Roles

ALL_LINEAR = "all-linear"
# layer.weight, dense/kernel:0, fc_0.w_0, and those that tools quantized: layer.weight_Q4, layer.MatMul.qweight
_WEIGHT = re.compile(r"(.+?)(?:[./]MatMul)?[./](?:q?weight|kernel|w|W|w_\d+)(?::0)?(?:_Q\d\w*)?")
_SCOPES = "pkg.torch.onnx.name_scopes"  # the metadata in which torch's exporter writes the modules around a node, as a Python list


@dataclass(frozen=True)
class Lora:
    """Options of low-rank adapters (Hu et al. 2021): a product `y = x W` becomes `y + (alpha / rank) * dropout(x) A B`, and only A and B
    are trained. A starts uniform and B at 0, as in PEFT.

    `targets` chooses the products by their module: the last part of its name (`"q"` for `h.0.attn.q`), several parts (`"attn.q"`), or a
    pattern (`"h.[01].*"`), or a list of these. "all-linear" means all products with a weight except the last one, the output layer;
    convolutions are adapted where a target names them. The
    module is what precedes `.weight` in the weight's name; if an exporter left that name out, it is taken from the names of nodes.

    `also_train` names parameters, or patterns, that are trained too, as they are: a new output layer, norms, biases. With `base="int8"` or
    "int4" the frozen weights of products are stored as integers of 8 or 4 bits while adapters are trained.

    >>> import fluidx as fx
    >>> fx.onnx.Lora(rank=4, targets=["q", "v"]).scale
    4.0
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str | Sequence[str] = ALL_LINEAR
    dropout: float = 0.0
    also_train: str | Sequence[str] = ()
    base: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise OnnxError(f"Lora: rank must be an integer of 1 or more, got {self.rank!r}")
        if not _is_number(self.alpha) or not 0 < self.alpha < float("inf"):
            raise OnnxError(f"Lora: alpha must be a number above 0, got {self.alpha!r}")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise OnnxError(f"Lora: dropout must be a rate of at least 0 and below 1, got {self.dropout!r}")
        for option in ("targets", "also_train"):
            given = getattr(self, option)
            names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else (given,)
            if wrong := [n for n in names if not isinstance(n, str) or not n]:
                raise OnnxError(f"Lora: {option} must be a name or a list of names, got {wrong[0]!r}")
            object.__setattr__(self, option, names)
        if self.base not in (None, "int8", "int4"):
            raise OnnxError(f"Lora: base must be None, as the weights are, 'int8' or 'int4', got {self.base!r}")
        if not self.targets:
            raise OnnxError('Lora: targets is empty; name modules, such as ["q", "v"], or leave it at "all-linear"')

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank

    def chosen(self, products: Sequence[tuple[str, str]], scopes: Mapping[str, str], linear: Collection[str]) -> set[str]:
        """The weights to adapt, of (weight, module) pairs in execution order. `scopes` has the modules that several weights share, which
        targets may name too, and `linear` the weights of matrix products. Raises OnnxError for a target without a match."""
        if not products or self.targets == (ALL_LINEAR,) and not linear:
            raise OnnxError("Lora: the program multiplies no computed value by a float weight of two axes, so nothing can be adapted; "
                            "convolutions are adapted where targets names them")
        found = set[str]()
        for target in self.targets:
            if target == ALL_LINEAR:
                dense = [weight for weight, _ in products if weight in linear]
                some = set(dense[:-1] or dense)
            else:
                some = {w for w, m in products if _matches(target, m) or _matches(target, scopes.get(w, m)) or fnmatchcase(w, target)}
            if not some:
                modules = [module for _, module in products]
                lasts = list(dict.fromkeys(m.rpartition(".")[2] for m in modules))
                near = nearest(target, lasts, "the last parts of their names are")
                raise OnnxError(
                    f"Lora: targets names {target!r}, but no product has a module of that name; {near}; modules: {listed(modules)}"
                )
            found |= some
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def listed(modules: Sequence[str]) -> str:
    """The names of modules in a message; the first ones of many."""
    return ", ".join(modules[:8]) + f" and {len(modules) - 8} more" * (len(modules) > 8)


def _matches(target: str, module: str) -> bool:
    """Does a target name a module, as in PEFT by its last parts, or by a pattern?"""
    return module == target or module.endswith(f".{target}") or fnmatchcase(module, target)


# -- modules ------------------------------------------------------------------------------------------------------------------------


def module_of(weight: str) -> str:
    """The module of a weight by its name alone; "" if the name has none.

    >>> module_of("h.0.attn.q.weight"), module_of("dense/kernel:0"), module_of("onnx::MatMul_12")
    ('h.0.attn.q', 'dense', '')
    """
    found = _WEIGHT.fullmatch(weight)
    return found[1].strip("/").replace("/", ".") if found else ""


def weight_modules(graph: Any) -> dict[str, str]:
    """Initializers and constants of nodes -> the modules that they belong to: by their names, or by the first node that reads them."""
    roles = Roles(graph)
    return {name: module_of(name) or next((s for r in reads if (s := _scope(r.node))), "") or name for name, reads in roles.reads.items()}


def unique_modules(modules: Mapping[str, str]) -> dict[str, str]:
    """The same with a weight's own name where several weights would share the name of a module, and so an adapter.

    >>> unique_modules({"fc_0.w_0": "fc_0", "fc_0.w_1": "fc_0", "fc_1.w_0": "fc_1"})
    {'fc_0.w_0': 'fc_0.w_0', 'fc_0.w_1': 'fc_0.w_1', 'fc_1.w_0': 'fc_1'}
    """
    found = dict(modules)
    while True:
        times = Counter(valid_name(m) for m in found.values())
        shared = [w for w, m in found.items() if times[valid_name(m)] > 1 and m != w]
        if not shared:
            return found
        found.update({w: w for w in shared})  # which may be the name of another module, so look again


def _scope(node: Any) -> str:
    """The module around a node: from the metadata of torch's exporter, or from a name such as /h.0/attn/q/MatMul; "" if not known."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            try:
                scopes = literal_eval(entry.value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return ""
            inner = [s for s in scopes[:-1] if isinstance(s, str) and s] if isinstance(scopes, list) else []
            return inner[-1] if inner else ""
    return ".".join(node.name.strip("/").split("/")[:-1])
