"""Every Python example in the documentation runs: the blocks of README.md and docs/, and the doctests of the modules.

The blocks of one page run in order and share their names. A block opened with ```python no-run is shown but not run.
"""

import doctest
import importlib
import re
import textwrap
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.exists()]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "fluidx").rglob("*.py"))
    if path.name != "__main__.py"
]
OPTIONAL = {"cupy", "cupyx", "mpi4py", "onnx", "sklearn"}

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page)


@pytest.mark.parametrize("name", MODULES)
def test_the_doctests_of_a_module_pass(name, tmp_path, monkeypatch):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    monkeypatch.chdir(tmp_path)
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for examples in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(examples, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


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
    for first_line, code in python_blocks(page.read_text(encoding="utf-8")):
        try:
            # Leading empty lines put the block where it stands in the page, for tracebacks and for the messages of fluidx.
            exec(compile("\n" * (first_line - 1) + code, str(page), "exec"), names)
        except Exception as error:
            raise AssertionError(f"{page}:{failing_line(error, page)}: {type(error).__name__}: {getattr(error, 'msg', error)}") from error
    return names


def python_blocks(text):
    """Yield (line of its first statement, code) for each block to run."""
    for block in FENCE.finditer(text):
        words = block["info"].split()
        if words[:1] == ["python"] and "no-run" not in words:
            yield text.count("\n", 0, block.start("code")) + 1, textwrap.dedent(block["code"])


def failing_line(error, page):
    if isinstance(error, SyntaxError) and error.filename == str(page):
        return error.lineno
    return [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(page)][-1]
