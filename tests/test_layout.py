"""The arrows between the packages point down only, and `import fluidx` stays light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import structure

ROOT = Path(__file__).resolve().parents[1]

# Who may import what of fluidx, beside its own parts. CONTRIBUTING.md shows the same table.
ARROWS = {
    "_version": (),
    "config": (),
    "native": ("config", "ir.dtypes"),
    "ir": (),
    "comm": ("config", "native", "ir.errors"),
    "ops": ("config", "native", "ir", "comm.base"),
    "view": ("ir", "ops"),
    "verify": ("_collector", "ir", "ops"),
    "hardware": ("config", "ir.errors"),
    "transpiler": ("_collector", "config", "fluid_names", "hardware", "ir", "ops", "rewrite", "verify", "view"),
    "rewrite": ("ir", "ops", "backward", "recompute_segments"),
    "mixed_precision": ("_checks", "config", "ir", "ops", "lr_scheduler", "optimizer", "rewrite"),
    "contrib": ("fluid_names", "mixed_precision"),
    "executor": ("_collector", "_version", "config", "native", "ir", "ops", "comm", "rewrite"),
    "profiler": ("config", "fluid_names", "native", "ir", "ops", "comm", "executor"),
    "tuning": ("ir", "comm", "executor", "transpiler", "simulator"),
    "tuning_executor": ("ir", "executor", "simulator", "transpiler", "tuning"),
    "quantization": ("ir", "executor"),
    "inference": ("ir", "executor", "rewrite", "_checks"),
    "io": (
        "config",
        "ir",
        "ops",
        "executor",
        "checkpoint",
        "data_loader",
        "fluid_names",
        "readers",
        "_checks",
        "files",
    ),
    "compiler": ("ir", "comm", "executor", "transpiler", "_checks", "files.state"),
    "core": ("ir", "executor", "fluid_names"),
    "framework": ("ir", "executor", "fluid_names", "_checks"),
    "checkpoint": ("ir", "executor", "_checks", "_version", "files"),
    "files": ("ir", "executor", "_checks"),
    "simulator": (
        "_collector", "_version", "config", "native", "hardware", "ir", "ops", "comm", "executor", "profiler", "rewrite", "transpiler",
        "verify", "view", "layers", "optimizer", "testing.one_operator",
    ),  # fmt: skip
    "onnx": (
        "_version", "files", "backward", "native", "ir", "ops", "layers", "executor", "rewrite", "initializer", "io", "mixed_precision",
    ),  # fmt: skip
}
# They tie the parts together, so they see everything.
UNBOUND = {
    "__init__", "__main__", "bench", "cli", "cli_onnx", "cli_options", "cli_predict", "cli_programs", "demo", "doctor", "finetune",
    "incubate", "install_check", "launch", "testing", "training",
}  # fmt: skip
# Everything else is what users write programs with (layers, backward, optimizer, ...): on ir and ops, and the seed of a job.
WRITING = ("config", "ir", "ops", "comm.launch_environment")

HEAVY = {"click", "cupy", "matplotlib", "mpi4py", "networkx", "onnx", "rich", "sklearn"}


def test_every_import_inside_fluidx_follows_the_arrows():
    assert broken_arrows(ROOT) == []


@pytest.mark.parametrize(
    "importer, line",
    [
        ("ir/program.py", "import fluidx.ops"),
        ("ir/program.py", "from fluidx import config"),
        ("ir/program.py", "from .. import ops"),
        ("ir/program.py", "from fluidx import Program"),
        ("comm/threads/communicator.py", "from ...ir.program import Program"),
        ("ops/collective.py", "from fluidx.comm import threads"),
        ("ops/collective.py", "def late():\n    from fluidx.layers import fc"),
        ("layers.py", "from .executor import plan"),
        ("transpiler/passes.py", "from fluidx.comm.base import Communicator"),
        ("ir/program.py", "from ..view import diff"),
        ("verify/verify_ranks.py", "from ..transpiler.cluster import Mesh"),
    ],
)
def test_an_arrow_that_points_up_is_found(tmp_path, importer, line):
    assert len(broken_arrows(small_tree(tmp_path, importer, line))) == 1


@pytest.mark.parametrize(
    "importer, line",
    [
        ("ir/program.py", "from . import errors\nimport numpy"),
        ("comm/threads/communicator.py", "from fluidx.ir.errors import FluidxError\nfrom fluidx import config"),
        ("ops/collective.py", "from ..comm.base import Communicator\nfrom fluidx.comm import base"),
        ("layers.py", "from fluidx.ops import collective\nfrom . import optimizer"),
        ("executor/plan/records.py", "from ...comm.threads.communicator import ThreadComm"),
        ("transpiler/transpiler.py", "from ..verify import verify_ranks\nfrom ..view import diff"),
        ("testing/ranks.py", "import fluidx.executor\nfrom fluidx import Program"),
    ],
)
def test_an_arrow_that_points_down_is_let_through(tmp_path, importer, line):
    assert broken_arrows(small_tree(tmp_path, importer, line)) == []


# Where it is looked up which array module is at work: the table of kernels, and what the modules spell differently.
ASKED_IN = {"ops/kernels.py", "ops/shared/arrays.py"}


def test_no_body_of_an_op_asks_which_array_module_it_was_given():
    forks = module_forks(ROOT)
    assert [found for found in forks if found.partition(":")[0] not in ASKED_IN] == []
    assert {found.partition(":")[0] for found in forks} == ASKED_IN


@pytest.mark.parametrize(
    "source",
    [
        "def kernel(xp, x):\n    return x if xp is np else x + 1",
        "def run(self, x):\n    if self.xp is not np:\n        return None",
        "def kernel(xp, x):\n    return x if xp == numpy else x + 1",
        "def kernel(xp, x):\n    return x if xp.__name__ == 'cupy' else x + 1",
    ],
)
def test_a_question_for_the_array_module_is_found(tmp_path, source):
    assert len(module_forks(small_tree(tmp_path, "ops/collective.py", source))) == 1


@pytest.mark.parametrize("name", ["checkpoint", "io", "launch.rank_main", "executor.ranks.process_worker"])
def test_a_module_can_be_the_first_to_be_imported(name):
    """As a rank's process does, which unpickles a function of the module."""
    done = subprocess.run([sys.executable, "-c", f"import fluidx.{name}"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_modules_of_a_package_import_each_other_in_one_direction():
    assert structure.import_cycles(ROOT) == []


def test_a_class_name_has_one_meaning():
    assert structure.classes_with_two_meanings(ROOT) == {}


def test_a_second_meaning_of_a_class_name_is_found(tmp_path):
    tree = small_tree(tmp_path, "ir/program.py", "class Walk: ...")
    small_tree(tree, "comm/base.py", "class Walk: ...")
    assert structure.classes_with_two_meanings(tree) == {"Walk": ["fluidx.comm.base", "fluidx.ir.program"]}


def test_operators_are_made_in_ir_only():
    assert structure.operators_made_outside_ir(ROOT) == []


def test_an_operator_made_outside_ir_is_found(tmp_path):
    tree = small_tree(tmp_path, "ops/collective.py", "from ..ir import operator\n\nop = operator.Operator('relu', {}, {})")
    assert structure.operators_made_outside_ir(tree) == ["fluidx.ops.collective:3"]


# The modules that may ask which class an entry of a placement has: what a user gave as a placement, and the table of the operators that
# change one entry into another. Others ask the entry itself (fluidx/ir/entries.py).
ENTRY_CLASSES = {"fluidx.param_attr": 1, "fluidx.transpiler.lowering.redistribute": 7}


def test_modules_ask_an_entry_of_a_placement_and_not_for_its_class():
    found = structure.tests_of_entries(ROOT)
    assert {name: n for name, n in found.items() if n > ENTRY_CLASSES.get(name, 0)} == {}


@pytest.mark.parametrize(
    "source",
    [
        "def f(e):\n    return isinstance(e, Shard)",
        "def f(e):\n    return isinstance(e, (types.At, int))",
        "def f(e):\n    match e:\n        case (Shard(axis=0),):\n            return True",
    ],
)
def test_a_test_for_the_class_of_an_entry_is_found(tmp_path, source):
    assert structure.tests_of_entries(small_tree(tmp_path, "ir/program.py", source)) == {"fluidx.ir.program": 1}


def test_an_import_cycle_is_found_in_functions_too(tmp_path):
    tree = small_tree(tmp_path, "ir/program.py", "from .errors import ProgramError")
    small_tree(tree, "ir/errors.py", "def late():\n    from .program import Program")
    assert structure.import_cycles(tree) == ["fluidx.ir: errors, program"]


def test_importing_fluidx_loads_little_more_than_numpy():
    with_numpy = modules_after("import numpy")
    with_fluidx = modules_after("import fluidx")
    assert {name.partition(".")[0] for name in with_fluidx} & HEAVY == set()
    others = {name for name in with_fluidx if name.partition(".")[0] != "fluidx"}
    assert len(others) <= 2 * len(with_numpy), f"import fluidx also loads {sorted(others - with_numpy)}"


def broken_arrows(root):
    """Return one line of text for each import below root/fluidx that the arrows forbid."""
    found = []
    for importer in structure.modules_of(root).values():
        part = importer.path.parts[1].removesuffix(".py")
        if part in UNBOUND:
            continue
        allowed = ARROWS.get(part, WRITING)
        for line, module in fluidx_imports(importer, root):
            target = module.removeprefix("fluidx").lstrip(".")
            # Modules that users write programs with may lean on each other.
            beside = part not in ARROWS and target.partition(".")[0] not in {"", *ARROWS, *UNBOUND}
            if beside or any(target == name or target.startswith(name + ".") for name in (part, *allowed)):
                continue
            may = ", ".join(allowed) or "nothing of fluidx"
            found.append(f"{importer.path}:{line} imports {module}; {part} may import: {may}")
    return found


def module_forks(root):
    """Return file:line of each comparison under fluidx/ops that has an array module on one side."""
    found = []
    for module in structure.modules_of(root).values():
        for node in module.nodes[ast.Compare] if module.path.parts[1] == "ops" else ():
            if any(map(is_array_module, (node.left, *node.comparators))):
                found.append(f"{module.path.relative_to('fluidx').as_posix()}:{node.lineno}")
    return found


def is_array_module(node):
    if isinstance(node, ast.Attribute):
        return node.attr == "xp" or node.attr == "__name__" and is_array_module(node.value)
    return isinstance(node, ast.Name) and node.id in ("xp", "np", "numpy", "cupy")


def fluidx_imports(importer, root):
    """Yield (line, module) for every import of fluidx in a module, inside functions too, relative ones resolved."""
    package = importer.path.parent.parts
    for node in (*importer.nodes[ast.Import], *importer.nodes[ast.ImportFrom]):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules = [f"{base}.{alias.name}" if is_module(root, f"{base}.{alias.name}") else base for alias in node.names]
        yield from ((node.lineno, module) for module in modules if module.partition(".")[0] == "fluidx")


def is_module(root, name):
    path = root.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def small_tree(root, importer, source):
    """Write a fluidx of empty modules, and one that holds `source`."""
    names = (
        "config ir/errors ir/program comm/base comm/threads/communicator ops/collective layers optimizer verify/verify_ranks view/diff "
        "executor/plan/records"
    )
    for name in names.split():
        path = root / "fluidx" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    path = root / "fluidx" / importer
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return root


def modules_after(statement):
    """Return the modules that a statement loads in a fresh interpreter."""
    code = f"import sys, json; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))
