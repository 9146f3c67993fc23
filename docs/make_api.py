"""The reference pages of the Python names, made from signatures and docstrings while the documentation is built (see hooks.py).

A docstring is Markdown: paragraphs, lists, `code`. An indented paragraph or one of `>>>` lines is a block of text, and a paragraph that
opens with one of WORDS has that word in bold. A new name needs no line here: pages follow `__all__` of the modules in PAGES.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import fluidx as fx
from fluidx.ir.opdef import OPS

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 92  # of a signature on one line
FOUND_FIRST = "---\nsearch:\n  boost: 3\n---\n\n"  # a layer before the operator of its name
WORDS = ("Shapes:", "Types:", "Raises")


@dataclass(frozen=True)
class Page:
    """One page. `parts` is heading -> (the module as it is written in front of a name, the names)."""

    title: str
    says: str
    parts: dict[str, tuple[str, tuple[str, ...]]]
    guide: str = ""


def _all(module: str) -> tuple[str, tuple[str, ...]]:
    return module, tuple(import_module(module.replace("fx", "fluidx", 1)).__all__)


def _layers() -> dict[str, tuple[str, tuple[str, ...]]]:
    titles = {
        "nn": "Products, embedding, attention", "conv": "Convolution and pooling", "norm": "Normalization",
        "math": "Arithmetic, reductions, activations", "loss": "Losses", "metric": "Metrics", "tensor": "Tensors",
        "parts": "Parts of tensors", "selection": "Selection by values", "compare": "Comparison and logic", "image": "Images",
        "recurrent": "Recurrent networks", "experts": "Mixtures of experts", "control_flow": "Control flow", "if_else": "Rows by condition",
        "static_rnn": "Static recurrence", "arrays": "Arrays of variables", "io": "Readers", "python": "Python functions",
        "mesh": "Placement among ranks",
    }  # fmt: skip
    modules = {m.__name__.rpartition(".")[2]: m for m in fx.layers._MODULES}
    parts = {titles.get(name, name): ("fx.layers", tuple(modules[name].__all__)) for name in dict.fromkeys([*titles, *modules])}
    return parts | {"Layers of your own": ("fx.layers", ("LayerHelper",)), "Learning rates": ("fx.lr_scheduler", fx.layers._SCHEDULES)}


PAGES = {
    "programs": Page("Programs", "Programs, their variables, and gradients.", {
        "Programs": ("fx", ("Program", "ProgramPair", "Block", "Operator", "program_guard", "default_main_program",
                            "default_startup_program", "name_scope", "device_guard", "unique_name.guard")),
        "Variables": ("fx", ("data", "Variable", "Parameter", "ParamAttr", "WeightNormParamAttr", "embedding", "one_hot")),
        "Gradients": ("fx", ("append_backward", "gradients")),
    }, "[Tutorial](../tutorial.md)"),
    "layers": Page("Layers", "Functions that append operators to the default main program and give back their results.", _layers()),
    "nets": Page("Networks", "Several layers at once.", {"Networks": _all("fx.nets")}),
    "optimizer": Page("Optimizers", "`minimize(loss)` appends the backward pass and one update for each parameter.", {
        "Optimizers": _all("fx.optimizer"),
        "Mixed precision": _all("fx.mixed_precision"),
        "Gradient clipping": ("fx.clip", ("GradientClipByValue", "GradientClipByNorm", "GradientClipByGlobalNorm", "ErrorClipByValue",
                                          "set_gradient_clip")),
    }),
    "initializer": Page("Initializers", "The first values of parameters.", {"Initializers": _all("fx.initializer")}),
    "regularizer": Page("Regularizers", "Weight decay as a term of gradients.", {
        "Regularizers": ("fx.regularizer", ("L1Decay", "L2Decay", "L1DecayRegularizer", "L2DecayRegularizer")),
    }),
    "lr_scheduler": Page("Learning rates", "Learning rates that change with the step, as operators of the program.", {
        "Schedules": ("fx.lr_scheduler", fx.layers._SCHEDULES),
    }),
    "metrics": Page("Metrics", "Metrics over the batches of an epoch, kept in Python.", {"Metrics": _all("fx.metrics")}),
    "strategies": Page("Strategies", "Where parameters are updated, and what communication does it.", {
        "Strategies": _all("fx.transpiler.strategies"),
    }, "[Strategies](../strategies.md), [Strategies in detail](../strategies_reference.md)"),
    "transpiler": Page("Transpiler", "From a program for one device to one program for each rank.", {
        "Transpiler": _all("fx.transpiler"),
        "Prediction": ("fx", ("simulate", "plan")),
        "Tuning": ("fx", ("tune", "TuningExecutor")),
        "Inference": ("fx", ("InferenceTranspiler", "quantize")),
    }, "[Tutorial](../tutorial.md)"),
    "verify": Page("Verifier", "The proof that rank programs compute what the program for one device computes.", {
        "Verifier": _all("fx.verify"),
    }, "[Verifier](../verifier.md)"),
    "executor": Page("Executors", "Programs are run here, on one device or on many ranks.", {
        "Executors": _all("fx.executor"),
        "As in fluid 1.8": ("fx", ("CompiledProgram", "BuildStrategy", "ExecutionStrategy")),
        "Ranks": ("fx", ("rank", "world_size", "set_num_threads")),
    }, "[Executor](../executor.md)"),
    "io": Page("Input and output", "Save and load programs and variables; read batches.", {
        "Input and output": _all("fx.io"),
        "Feeding": ("fx", ("DataFeeder",)),
    }, "[Checkpoints](../checkpoints.md)"),
    "checkpoint": Page("Checkpoints", "Checkpoints of ranks: a folder with a file for each rank.", {
        "Checkpoints": _all("fx.checkpoint"),
    }, "[Checkpoints](../checkpoints.md)"),
    "onnx": Page("ONNX", "ONNX models: read, run, trained and written.", {"ONNX": _all("fx.onnx")}, "[ONNX](../onnx.md)"),
    "rewrite": Page("Rewrites", "Rewrites of a program for one device or one rank.", {
        "Rewrites": _all("fx.rewrite"),
    }, "[Rewrites](../rewrites.md)"),
    "profiler": Page("Profiler", "Where the time of runs goes.", {"Profiler": _all("fx.profiler")}, "[Profiler](../profiler.md)"),
    "view": Page("View", "Differences of programs, counts of communication, drawings, and pages.", {
        "View": _all("fx.view"),
    }, "[Pictures](../pictures.md)"),
    "testing": Page("Testing", "Tools for tests of operators, passes and programs of ranks.", {"Testing": _all("fx.testing")}),
    "errors": Page("Errors", "The exceptions that fluidx raises.", {
        "Errors": ("fx.errors", tuple(n for n, v in vars(fx.errors).items() if isinstance(v, type) and issubclass(v, Exception))),
    }),
}  # fmt: skip


def pages() -> dict[str, str]:
    """File name -> text in Markdown."""
    return {"api/index.md": _index(), **{f"api/{name}.md": _page(page) for name, page in PAGES.items()}}


def names(page: Page) -> Iterator[tuple[str, str, Any]]:
    """(heading, full name, function or class) of all that a page describes."""
    for heading, (prefix, wanted) in page.parts.items():
        for name in wanted:
            if callable(value := _find(f"{prefix}.{name}")):
                yield heading, f"{prefix}.{name}", value


def _find(full: str) -> Any:
    """What a full name stands for; a package's module may have to be imported first."""
    value: Any = fx
    for word in full.split(".")[1:]:
        value = getattr(value, word) if hasattr(value, word) else import_module(f"{value.__name__}.{word}")
    return value


def _index() -> str:
    rows = [f"| [{page.title}]({name}.md) | {page.says} | {len({id(v) for _, _, v in names(page)})} |\n" for name, page in PAGES.items()]
    return (
        "# Python names\n\nWhat `import fluidx as fx` gives, by family; the search finds each name.\n\n"
        "| family | what it is for | names |\n|---|---|---|\n" + "".join(rows)
    )


def _page(page: Page) -> str:
    out = [f"{FOUND_FIRST}# {page.title}\n\n{page.says}{f' Guide: {page.guide}.' if page.guide else ''}\n\n"]
    beside = [value for _, _, value in names(page)]
    groups: dict[str, dict[int, tuple[Any, list[str]]]] = {}
    for heading, full, value in names(page):
        groups.setdefault(heading, {}).setdefault(id(value), (value, []))[1].append(full)
    for heading, found in groups.items():
        if len(groups) > 1:
            out.append(f"## {heading}\n\n")
        entries = [(value, _own_first(value, fulls)) for value, fulls in found.values()]
        elsewhere = page is PAGES["layers"] and heading == "Learning rates"  # the schedules have a page
        file = "lr_scheduler.md" if elsewhere else ""
        rows = [(_last(fulls[0]), _text(_first(_doc(value)), table=True)) for value, fulls in entries]
        out += ["| name | what it is |\n|---|---|\n", *(f"| [`{n}`]({file}#{n}) | {says} |\n" for n, says in rows), "\n"]
        if not elsewhere:
            out += [_entry(value, fulls, beside) for value, fulls in entries]
    return "".join(out).rstrip() + "\n"


def _own_first(value: Any, fulls: list[str]) -> list[str]:
    """The names of one thing, that of its definition before the others."""
    return sorted(fulls, key=lambda full: (full.rpartition(".")[2] != getattr(value, "__name__", ""), len(full)))


def _last(full: str) -> str:
    return full.removeprefix("fx.") if full.startswith("fx.unique_name") else full.rpartition(".")[2]


def _doc(value: Any) -> str:
    """The docstring of a function or of a class itself, which inherits none; dataclasses make theirs, which is the signature again."""
    own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    return inspect.cleandoc(own) if own and not own.startswith(f"{getattr(value, '__name__', '')}(") else ""


def _first(doc: str) -> str:
    """The first sentence, without its full stop (an ellipsis stays)."""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return re.sub(r"(?<!\.)[.:]$", "", re.split(r"(?<=[.:]) (?=[A-Z`\[])", paragraph)[0])


def _entry(value: Any, fulls: list[str], beside: list[Any]) -> str:
    name = _last(fulls[0])
    out = [f"### {_escaped(name)} {{ #{name} }}\n\n", _signature(value, fulls[0])]
    out.append(_body(_doc(value)))
    out.append(_notes(value, fulls, beside))
    if isinstance(value, type):
        out += [_method(value, name, key, method) for key, method in _methods(value, beside)]
    return "".join(out)


def _methods(cls: type, beside: list[Any]) -> Iterable[tuple[str, Any]]:
    """What a class defines for its users, itself or in bases of fluidx that have no entry on the page."""
    found: dict[str, Any] = {}
    for c in (cls, *(b for b in cls.__mro__[1:] if b not in beside and b.__module__.startswith("fluidx."))):
        for name, member in vars(c).items():
            if not name.startswith("_") and name not in found and (plain := _plain(member)) is not None and plain.__doc__:
                found[name] = member
    return found.items()


def _plain(member: Any) -> Any:
    """The function of a method or a property, or None."""
    if isinstance(member, property):
        return member.fget
    member = getattr(member, "__func__", member)
    return member if inspect.isfunction(member) else None


def _method(cls: type, name: str, key: str, member: Any) -> str:
    shown = f"`{name}.{key}`" if isinstance(member, property) else ""
    bound = not isinstance(member, staticmethod | classmethod)
    signature = f"{shown}\n\n" if shown else _signature(getattr(cls, key), f"{name}.{key}", bound)
    return f"#### {_escaped(key)} {{ #{name}.{key} }}\n\n{signature}{_body(inspect.cleandoc(_plain(member).__doc__))}"


def _signature(value: Any, full: str, bound: bool = False) -> str:
    """The call as a block of code, one argument a line where it is long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"```python\n{full}\n```\n\n"
    parameters = list(signature.parameters.values())[bound:]
    returns = signature.empty if isinstance(value, type) else signature.return_annotation
    made = signature.replace(parameters=parameters, return_annotation=returns)
    line = f"{full}{_unquoted(str(made))}"
    if len(line) > WIDTH and parameters:
        end = "" if returns is signature.empty else _unquoted(f" -> {str(made).rpartition(' -> ')[2]}")
        line = f"{full}(\n" + "".join(f"    {p},\n" for p in _listed(parameters)) + f"){end}"
    return f"```python\n{line}\n```\n\n"


def _listed(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Arguments one by one, with the signs between their kinds."""
    star = False
    for before, p in zip([None, *parameters], parameters):
        if before is not None and before.kind is p.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            yield "/"
        star = star or p.kind is p.VAR_POSITIONAL
        if p.kind is p.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        yield _unquoted(str(p))


def _unquoted(text: str) -> str:
    """Annotations as they are written, not as strings; defaults that are functions by their names."""
    text = re.sub(r"((?:: |-> ))'([^']*)'", r"\1\2", text)
    text = re.sub(r"<(?:function|class) '?([\w.]+)'?(?: at 0x[0-9a-f]+)?>", r"\1", text)
    return re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1()", text)


def _notes(value: Any, fulls: list[str], beside: list[Any]) -> str:
    """Further names, those of fluid, the operator of this name, the base class if it is on the page `beside`, and the file."""
    said = []
    if len(fulls) > 1:
        said.append("Also " + ", ".join(f"`{f}`" for f in fulls[1:]))
    said += [f"Fluid: `{name}`" for f in fulls[:1] if (name := _in_fluid(f))]
    if fulls[0].startswith("fx.layers.") and (op := OPS.get(_last(fulls[0]))):
        said.append(f"Operator: [{_escaped(op.name)}](../ops.md#{op.name})")
    if bases := [f"[`{b.__name__}`](#{b.__name__})" for b in getattr(value, "__bases__", ()) if b in beside]:
        said.append("Base: " + ", ".join(bases))
    try:
        said.append(f"File: `{Path(inspect.getsourcefile(value) or '').resolve().relative_to(ROOT)}`")
    except (TypeError, ValueError):
        pass
    return f"{' · '.join(said)}\n{{ .source }}\n\n" if said else ""


def _fluid() -> set[str]:
    """The names that fluid 1.8 exports, written with their modules."""
    found, module = set(), ""
    for line in (ROOT / "tests" / "fluid_names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            module = line.strip("[]")
        elif not line.startswith("#"):
            found |= {f"fluid.{name}" if module == "fluid" else f"fluid.{module}.{name}" for name in line.split()}
    return found


_FLUID = _fluid()


def _in_fluid(full: str) -> str:
    """The name as fluid has it, or nothing."""
    name = full.replace("fx.", "fluid.", 1)
    return name if name in _FLUID else ""


def _body(doc: str) -> str:
    """A docstring as Markdown."""
    return "".join(f"{part}\n\n" for part in map(_paragraph, doc.split("\n\n")) if part)


def _paragraph(text: str) -> str:
    if text.lstrip().startswith(">>>"):
        return f"```pycon\n{inspect.cleandoc(text)}\n```"
    if text.startswith("    "):
        return f"```text\n{inspect.cleandoc(text)}\n```"
    word = next((w for w in WORDS if text.startswith(f"{w} ")), None)
    if word is None:
        return _text(text)
    said = text.removeprefix(word)
    if word == "Raises":
        said = re.sub(r"(?<!`)\b([A-Z]\w+Error)\b", r"`\1`", said)
    return f"**{word}**{_text(said)}"


def _text(text: str, table: bool = False) -> str:
    """Prose whose stars and brackets mean themselves, outside of `code`; in a table bars, too."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else _escaped(p).replace("|", "\\|" if table else "|") for p in parts)


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"(?<!\w)_|_(?!\w)|(?<!\s)\*|\*(?!\s)|[{}]|\](?=\()", lambda m: "\\" + m[0], text)
