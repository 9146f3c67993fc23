"""Every Python example in the documentation runs: the blocks of README.md and docs/, and the doctests of the modules.

The blocks of one page run in order and share their names. A block opened with ```python no-run is shown but not run. A block of
```text that stands next behind a Python block is what that block prints; `[...]` in it stands for anything, alone in a line for any
number of lines. A page that says `<!-- needs NAME ... -->` is skipped where one of these modules is not installed.
"""

import doctest
import importlib
import io
import re
import textwrap
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.each import each

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.exists()]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "fluidx").rglob("*.py"))
    if path.name != "__main__.py"
}
OPTIONAL = {"cupy", "cupyx", "mpi4py", "onnx", "sklearn"}
EXTRAS = {"fluidx.onnx": "onnx"}  # packages whose examples need a module that importing them does not
NEEDS = re.compile(r"<!-- needs ([\w. ]+) -->")

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def algorithms_stay():
    """A page may register algorithms of its own; the next one does not know them."""
    from fluidx.transpiler.algorithms import ALGORITHMS

    before = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


@pytest.mark.usefixtures("algorithms_stay")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for needed in NEEDS.findall(page.read_text(encoding="utf-8")):
        for module in needed.split():
            pytest.importorskip(module)
    run_page(page)


def _imported(name):
    """The module, or the name of an optional one that it needs and that is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        return error.name


@each("name", [*MODULES])
def test_every_module_can_be_imported(name):
    _imported(name)


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if ">>>" in path.read_text(encoding="utf-8")])
def test_the_doctests_of_a_module_pass(name, tmp_path, monkeypatch):
    for package, module in EXTRAS.items():
        if name == package or name.startswith(f"{package}."):
            pytest.importorskip(module)
    if isinstance(module := _imported(name), str):
        pytest.skip(f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for examples in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(examples, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize(
    "printed, shown, same",
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\nb\nc\nd\n", "a\n[...]\nd\n", True),
        ("a\nd\n", "a\n[...]\nd\n", True),
        ("took 3.2 ms\n", "took [...] ms\n", True),
        ("took 3.2 ms\nmore\n", "took [...]\n", False),
        ("a  \n", "a\n", True),
    ],
)
def test_what_is_shown_is_compared_with_what_is_printed(tmp_path, printed, shown, same):
    page = tmp_path / "page.md"
    page.write_text(f"```python\nprint({printed!r}, end='')\n```\n\n```text\n{shown}```\n")
    if same:
        run_page(page)
        return
    with pytest.raises(AssertionError, match=f"{page}:2: it prints"):
        run_page(page)


def test_blocks_share_names_and_only_python_runs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nseen = [1]\n```\n"
        "```python no-run\nseen.append(2)\n```\n"
        "```console\n$ fluidx demo\n```\n"
        "```\nplain text\n```\n"
        "- in a list:\n\n  ```python title='later'\n  if seen:\n      seen.append(3)\n  ```\n"
    )
    assert run_page(page)["seen"] == [1, 3]


@pytest.mark.parametrize(
    "block, line, message",
    [
        ("value = 1\n\nvalue.missing", 7, "AttributeError: 'int' object has no attribute 'missing'"),
        ("def half(x):\n    return x / 0\n\nhalf(1)", 6, "ZeroDivisionError: division by zero"),
        ("value = 1\nvalue +", 6, "SyntaxError: invalid syntax"),
    ],
)
def test_a_failing_block_is_reported_with_file_and_line(tmp_path, block, line, message):
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\nWords.\n```python\n{block}\n```\n")
    with pytest.raises(AssertionError) as failure:
        run_page(page)
    assert str(failure.value) == f"{page}:{line}: {message}"


def run_page(page):
    """Run the Python blocks of a page in order and return the names they defined."""
    names = {"__name__": "__main__"}
    for first_line, code, shown in python_blocks(page.read_text(encoding="utf-8")):
        printed = io.StringIO()
        try:
            # Leading empty lines put the block where it stands in the page, for tracebacks and for the messages of fluidx.
            with redirect_stdout(printed):
                exec(compile("\n" * (first_line - 1) + code, str(page), "exec"), names)
        except Exception as error:
            raise AssertionError(f"{page}:{failing_line(error, page)}: {type(error).__name__}: {getattr(error, 'msg', error)}") from error
        if shown is not None and not re.fullmatch(as_pattern(shown), clean(printed.getvalue())):
            raise AssertionError(f"{page}:{first_line}: it prints\n{printed.getvalue()}\nand the page shows\n{shown}")
    return names


def python_blocks(text):
    """Yield (line of its first statement, code, what it prints or None) for each block to run."""
    blocks = list(FENCE.finditer(text))
    for block, behind in zip(blocks, [*blocks[1:], None], strict=False):
        words = block["info"].split()
        if words[:1] != ["python"] or "no-run" in words:
            continue
        next_is_text = behind is not None and behind["info"].split()[:1] == ["text"] and not text[block.end() : behind.start()].strip()
        shown = textwrap.dedent(behind["code"]) if next_is_text else None
        yield text.count("\n", 0, block.start("code")) + 1, textwrap.dedent(block["code"]), shown


def clean(text):
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def as_pattern(shown):
    """What is shown as a regular expression."""
    anything = re.escape("[...]")
    lines = (re.escape(line) for line in clean(shown).splitlines())
    return "".join(r"(?:.*\n)*?" if line.strip() == anything else line.replace(anything, ".*") + r"\n" for line in lines)


def failing_line(error, page):
    if isinstance(error, SyntaxError) and error.filename == str(page):
        return error.lineno
    return [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(page)][-1]
