"""Figures of the structure of fluidx: `python -m tests.structure [ROOT]` prints them. tests/test_layout.py holds those that must be 0."""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ENTRIES = {"At", "Shard", "Partial", "Pieces", "Own", "Local", "Replicate"}  # the classes of entries of placements
LONG = 60  # lines of a function


class Module(NamedTuple):
    """A source file below root/fluidx; its path is relative to root."""

    path: Path
    tree: ast.Module
    lines: int
    nodes: dict[type, list[Any]]  # all nodes of the tree by their class, in the order of ast.walk


@cache
def modules_of(root: Path) -> dict[str, Module]:
    """The modules below root/fluidx by their dotted names; a package has the name of its directory."""
    gc.disable()  # it would look through the trees again and again, which takes twice as long as to make them
    try:
        return dict(_modules_of(root))
    finally:
        gc.enable()


def _modules_of(root: Path) -> Iterator[tuple[str, Module]]:
    for path in sorted((root / "fluidx").rglob("*.py")):
        text, path = path.read_text(encoding="utf-8"), path.relative_to(root)
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(text, str(path))
        nodes: dict[type, list[Any]] = defaultdict(list)
        for node in ast.walk(tree):
            nodes[node.__class__].append(node)
        yield name, Module(path, tree, len(text.splitlines()), nodes)


def lines_by_package(root: Path) -> Counter[str]:
    """Lines of the files of each package; files that are directly in fluidx count as package "."."""
    found: Counter[str] = Counter()
    for module in modules_of(root).values():
        found[module.path.parts[1] if len(module.path.parts) > 2 else "."] += module.lines
    return found


def long_functions(root: Path) -> list[str]:
    """Functions of more than LONG lines, docstrings not counted."""
    found = []
    for name, module in modules_of(root).items():
        for node in (*module.nodes[ast.FunctionDef], *module.nodes[ast.AsyncFunctionDef]):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > LONG:
                found.append(f"{name}.{node.name}: {lines}")
    return found


def calls_of(root: Path, function: str) -> Iterator[tuple[str, ast.Call]]:
    """Calls of a name, or of an attribute of the name, with the module that makes them."""
    for name, module in modules_of(root).items():
        for node in module.nodes[ast.Call]:
            if (getattr(node.func, "id", None) or getattr(node.func, "attr", None)) == function:
                yield name, node


def tests_of_entries(root: Path) -> Counter[str]:
    """How often each module asks for the class of an entry of a placement: by `isinstance`, or by a pattern of a `match`."""
    found: Counter[str] = Counter()
    for name, call in calls_of(root, "isinstance"):
        found[name] += _names_an_entry(call.args[1])
    for name, module in modules_of(root).items():
        found[name] += sum(_names_an_entry(node.cls) for node in module.nodes[ast.MatchClass])
    return +found


def _names_an_entry(classes: ast.expr) -> bool:
    return bool({getattr(n, "id", None) or getattr(n, "attr", None) for n in ast.walk(classes)} & ENTRIES)


def operators_made_outside_ir(root: Path) -> list[str]:
    """Calls of `Operator(...)` outside of the package that declares it."""
    return [f"{name}:{call.lineno}" for name, call in calls_of(root, "Operator") if name.split(".")[1:2] != ["ir"]]


def classes_with_two_meanings(root: Path) -> dict[str, list[str]]:
    """Class names that two modules define, with the modules."""
    found = defaultdict(list)
    for name, module in modules_of(root).items():
        for node in module.nodes[ast.ClassDef]:
            found[node.name].append(name)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def import_cycles(root: Path) -> list[str]:
    """Per package, the groups of its modules and sub-packages that import each other, directly or by way of others.

    A sub-package imports what its modules import. Imports in functions count, imports for type checkers do not.
    """
    modules = modules_of(root)
    arrows: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, module in modules.items():
        for target in _imports(name, module, modules):
            here, there = name.split("."), target.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)))
            if shared < min(len(here), len(there)):
                arrows[".".join(here[:shared])][here[shared]].add(there[shared])
    groups = ((package, group) for package in sorted(arrows) for group in _strongly_connected(arrows[package]) if len(group) > 1)
    return [f"{package}: {', '.join(sorted(group))}" for package, group in groups]


def _imports(name: str, module: Module, modules: dict[str, Module]) -> Iterator[str]:
    package = name if module.path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _run_time_nodes(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names)


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        yield from _run_time_nodes(node)


def _strongly_connected(arrows: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Tarjan, 1972, with a stack of its own in place of recursion."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    for start in list(arrows):
        work = [(start, iter(arrows[start]))] if start not in number else []
        if work:
            number[start] = low[start] = len(number)
            open_.append(start)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in number:
                    number[target] = low[target] = len(number)
                    open_.append(target)
                    work.append((target, iter(arrows.get(target, ()))))
                    break
                if target in open_:
                    low[node] = min(low[node], number[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    at = open_.index(node)
                    yield open_[at:]
                    del open_[at:]


def main(root: Path) -> None:
    lines = lines_by_package(root)
    print(f"lines: {lines.total():,} in {len(modules_of(root))} modules")
    print("  " + ", ".join(f"{package} {count:,}" for package, count in lines.most_common()))
    print(f"functions over {LONG} lines: {len(long_functions(root))}", *long_functions(root), sep="\n  ")
    tests = tests_of_entries(root)
    print(f"tests for the class of an entry of a placement: {tests.total()} in {len(tests)} modules", *tests, sep="\n  ")
    cycles = import_cycles(root)
    print(f"import cycles: {len(cycles)}", *cycles, sep="\n  ")
    print(f"Operator( outside of ir: {len(operators_made_outside_ir(root))}")
    print(f"class names with two meanings: {len(classes_with_two_meanings(root))}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
