"""The commands as a user types them, with good input and with bad."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx import cli_options, demo, native
from fluidx.cli import main as fluidx
from fluidx.native import shared
from fluidx.testing.models import classifier

ROOT = Path(__file__).resolve().parents[1]


def call(*args, code=0, **env):
    result = CliRunner().invoke(fluidx, [str(a) for a in args], env={"COLUMNS": "100", **env})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def pair(tmp_path):
    model = classifier(width=4)
    path = tmp_path / "pair.txt"
    path.write_text(str(fx.ProgramPair(model.main, model.startup)))
    return path


@pytest.fixture
def single(tmp_path):
    path = tmp_path / "main.txt"
    path.write_text(str(classifier(width=4).main))
    return path


def test_help_lists_the_commands():
    text = call("--help")
    for command in ("clusters", "demo", "diff", "doctor", "env", "ops", "run", "show", "trace", "verify"):
        assert f"\n  {command} " in text
    assert call("--version").startswith("fluidx, version")
    assert list(cli_options.STRATEGIES) == list(fx.strategies.CATALOGUE)  # the usual ones first


# -- demo ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", cli_options.SAME_AS_ONE_DEVICE)
def test_the_demo_shows_every_step_and_the_same_losses(strategy):
    text = call("demo", "-n", 2, "--epochs", 1, "--strategy", strategy)
    headings = (
        "1. a program for one device",
        f"2. what {strategy}(",
        "3. the new operators in the program of rank 1",
        "4. proved",
        "5. one device",
    )
    assert all(heading in text for heading in headings)
    assert "all inserted communication" in text and "4 parameters and" in text
    assert f"\n{native.describe()}\n" in text
    row = next(line for line in text.splitlines() if line.startswith("│     0 │"))
    _, _, one, many, apart, *_ = [cell.strip() for cell in row.split("│")]
    assert one == many and float(apart) < 1e-5
    accuracy = text.splitlines()[-1]
    assert accuracy.count("0.8") >= 2, accuracy
    assert max(map(len, text.splitlines())) <= 100 and len(text.splitlines()) < 100


@pytest.mark.skipif(bool(native.why_not()), reason="ranks as processes need the C kernels")
def test_the_demo_on_processes_has_the_losses_of_one_device():
    text = call("demo", "-n", 4, "--epochs", 1, "--backend", "processes")
    assert "5. one device and 4 ranks as processes, the same batches" in text
    row = next(line for line in text.splitlines() if line.startswith("│     0 │"))
    _, _, one, many, *_ = [cell.strip() for cell in row.split("│")]
    assert one == many


def test_the_demo_of_one_rank_and_its_drawing(tmp_path):
    text = call("demo", "-n", 1, "--epochs", 1, "--svg", tmp_path / "d.svg")
    assert f"drawn before and after: {tmp_path / 'd.svg'}" in text
    assert (tmp_path / "d.svg").read_text().startswith("<svg")


def test_the_demo_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert call("demo", code=1) == (
        "Error: the demo needs the digits of scikit-learn, which is not installed; in a checkout of fluidx: pip install -e '.[demo]'\n"
    )


def test_numbers_that_make_no_sense_are_refused():
    assert "0 is not in the range 1<=x<=64" in call("demo", "-n", 0, code=2)
    assert "0 is not in the range x>=1" in call("demo", "--epochs", 0, code=2)
    known = ", ".join(map(repr, cli_options.SAME_AS_ONE_DEVICE))
    assert f"'ring' is not one of {known}" in call("demo", "--strategy", "ring", code=2)


# -- show, diff, verify ----------------------------------------------------------------------------------------------------------------


def test_show_prints_what_parses_back(pair, single):
    assert call("show", single) == single.read_text()
    assert call("show", pair) == pair.read_text()


def test_show_transpiles(pair):
    everyone = call("show", pair, "--strategy", "ring_optimizer", "-n", 2)
    assert 'algorithm="ring"' in everyone and "rank 1" not in everyone
    text = call("show", pair, "--strategy", "ring_optimizer", "-n", 2, "--rank", 1)
    assert "\n  rank 1\n" in text and "send(" in text and "nccl_init(" in text
    assert fx.ir.parse_pair(text).main.rank == 1
    meshed = call("show", pair, "--strategy", "zero1", "-n", "dp=2,tp=2")
    assert "group tp = [0, 1] [2, 3]" in meshed
    assert "Warning: no value is placed over axis tp of Mesh(dp=2, tp=2)" in meshed
    assert "ncclAllReduce" in call("show", pair, "--strategy", "data_parallel", "--fluid-names")


def test_a_strategy_of_ones_own_is_named_by_module_and_function(pair, tmp_path, monkeypatch):
    (tmp_path / "own_strategies.py").write_text(
        "import fluidx as fx\n\ndef small():\n    return fx.strategies.zero1(bucket_mb=1)\n\nmine = small()\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("small", "mine"):
        assert "proved for zero1(bucket_mb=1) on 4 ranks" in call("verify", pair, "--strategy", f"own_strategies:{name}")
    assert "reduce_scatter" in call("show", pair, "--strategy", "own_strategies:small")
    assert call("verify", pair, "--strategy", "own_strategies:number", code=1) == (
        "Error: strategy 'own_strategies:number' must be a Strategy, or a function that makes one, got int: 3\n"
    )
    said = call("verify", pair, "--strategy", "own_strategies:tiny", code=1)
    assert "own_strategies has no 'tiny'; write package.module:name" in said
    assert "cannot import 'own_strategys'" in call("verify", pair, "--strategy", "own_strategys:small", code=1)


def test_a_text_has_passes_and_strategies_of_ones_own_with_options(pair, tmp_path, monkeypatch):
    (tmp_path / "own_passes.py").write_text("""
from dataclasses import dataclass

import fluidx as fx


@dataclass(frozen=True)
class Scaled(fx.transpiler.Pass):
    by: float = 1.0
    requires = (fx.transpiler.ONE_DEVICE,)

    def rule(self, b, op):
        made = op.type == "mean" and b.mean(op.input("X")[0], suffix="whole")
        return b.scale(made, scale=self.by, name=op.output("Out")[0]) if made else None


def small(bucket_mb=1):
    return fx.strategies.zero1(bucket_mb=bucket_mb)
""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = "own_passes:small{bucket_mb=2},own_passes:Scaled{by=0.5}"
    assert "proved for zero1(bucket_mb=2).with_rewrites(Scaled(by=0.5)) on 4 ranks" in call("verify", pair, "--strategy", text)
    shown = call("show", pair, "--strategy", text, "-n", 2)
    assert "= scale(" in shown and "scale=0.5" in shown and "reduce_scatter" in shown
    assert "own_passes:Scaled has no option 'bi'" in call("verify", pair, "--strategy", "zero1,own_passes:Scaled{bi=2}", code=1)


def test_show_writes_json_that_show_reads(single, tmp_path):
    again = tmp_path / "again.json"
    again.write_text(call("show", single, "--json"))
    assert call("show", again) == call("show", single)


def test_show_draws(single, tmp_path):
    assert call("show", single, "--svg", tmp_path / "p.svg") == f"wrote {tmp_path / 'p.svg'}\n"
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert call("show", single, "--svg", "/nowhere/p.svg", code=1) == "Error: cannot write /nowhere/p.svg: No such file or directory\n"


@pytest.mark.parametrize("kind", ["--svg", "--html"])
def test_show_does_not_write_over_the_program(single, kind):
    before = single.read_text()
    assert f"{single} would overwrite {single}, which is read" in call("show", single, kind, single, code=2)
    assert single.read_text() == before


def test_show_writes_a_page_with_the_program_before_beside_it(pair, tmp_path):
    page = tmp_path / "p.html"
    assert call("show", pair, "--html", page, "--strategy", "data_parallel", "-n", 2) == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert '"title":"before: one device"' in text and '"title":"rank 0 (rank 1 alike)"' in text
    call("show", pair, "--html", page)
    assert '"title":"before: one device"' not in page.read_text(encoding="utf-8")


def test_show_refuses_a_rank_without_a_strategy_or_out_of_range(pair):
    assert "Error: --rank selects one of the programs that --strategy makes; give --strategy too" in call("show", pair, "--rank", 0, code=2)
    assert call("show", pair, "--strategy", "data_parallel", "-n", 2, "--rank", 2, code=1) == (
        "Error: the program was transpiled for 2 ranks: rank must be from 0 to 1, got 2\n"
    )


def test_diff_of_two_files(pair, single, tmp_path):
    assert "are equal: 20 operators" in call("diff", single, single)
    after = tmp_path / "after.txt"
    after.write_text(call("show", pair, "--strategy", "data_parallel"))
    text = call("diff", pair, after)
    assert text.startswith(f"--- {pair}: 29 operators\n+++ {after}: ")
    assert "1 all_reduce" in text
    mixed = call("diff", pair, single, code=1)
    assert mixed == "Error: diff takes two programs or two pairs, not one of each; give the main program of the pair\n"


def test_verify_checks_one_program_or_all_ranks(pair, single):
    assert call("verify", single) == "20 operators: all inputs are defined, types and placements follow the rules of the operators\n"
    assert call("verify", pair) == "29 operators: all inputs are defined, types and placements follow the rules of the operators\n"
    text = call("verify", pair, "--strategy", "reduce_broadcast", "-n", 3)
    assert text.startswith("proved for reduce_broadcast(roots='greedy') on 3 ranks:") and "4 parameters" in text


def test_verify_proves_rank_programs_from_files(pair, single, tmp_path):
    paths = [tmp_path / f"rank{r}.txt" for r in range(2)]
    for r, path in enumerate(paths):
        path.write_text(call("show", pair, "--strategy", "ring_optimizer", "-n", 2, "--rank", r))
    assert "on 2 ranks:" in call("verify", pair, *paths)
    assert "this is the program of rank 1, given as that of rank 0" in call("verify", pair, *reversed(paths), code=1)
    assert "has no startup section; fluidx show FILE --strategy ... --rank 0 prints one" in call("verify", single, *paths, code=1)
    assert "give only one of them" in call("verify", pair, *paths, "--strategy", "zero1", code=2)


def test_constants_are_found_beside_any_of_the_files(tmp_path):
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        attr = fx.ParamAttr("w", initializer=fx.initializer.NumpyArrayInitializer(np.ones((12, 8))))
        fx.optimizer.SGD(0.5).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 12]), 8, param_attr=attr)))
    whole, (digest,) = tmp_path / "whole.txt", startup.constants()
    fx.io.save_text(fx.ProgramPair(main, startup), whole)
    paths = [tmp_path / f"rank{r}.txt" for r in range(2)]
    for r, path in enumerate(paths):
        path.write_text(call("show", whole, "--strategy", "zero1", "-n", 2, "--rank", r))
        assert f'array("{digest}", f32[12,8])' in path.read_text()
    assert "on 2 ranks:" in call("verify", whole, *paths)
    assert digest in call("show", whole) and digest in call("diff", whole, paths[0])
    assert f"Error: {paths[0]} is not a program: line" in (lacking := call("show", paths[0], code=1)) and "pass constants=" in lacking


@pytest.mark.parametrize("ranks", ["0", "-1", "two", "dp=", "dp=2;tp=2", "=2"])
def test_ranks_that_make_no_sense(pair, ranks):
    text = call("verify", pair, "--strategy", "zero1", "-n", ranks, code=2)
    assert "is neither a number of ranks (1 or more) nor the axes of a mesh (dp=2,tp=2)" in " ".join(text.split())


def test_verify_points_into_a_wrong_program(single):
    single.write_text(single.read_text().replace("%fc_0.w_0: f32[12,4]", "%fc_0.w_0: f32[11,4]"))
    text = call("verify", single, code=1)
    assert text.startswith("Error: op mul: X f32[-1,12] has 12 columns when flattened at axis 1, Y f32[11,4] has 11 rows\n")
    assert re.search(r"> +0  %fc_0.tmp_0", text)


def test_transpiling_a_file_without_startup_says_what_to_save(single):
    assert call("verify", single, "--strategy", "data_parallel", code=1) == (
        f"Error: {single} has no startup section; write both with fx.io.save_text(fx.ProgramPair(main, startup), FILE)\n"
    )


@pytest.mark.parametrize("command", ["show", "verify"])
@pytest.mark.parametrize(
    "content, message",
    [
        ("", "is not a program: line 1: expected program NAME {, found the end of the text"),
        ("hello world", 'is not a program: line 1: expected program NAME {, found "hello"'),
        (b"\xff\xfe\x00\x01", "is not a program: byte 0 is not UTF-8 text"),
        ('{"a": ', "is not a program: Expecting value: line 1 column 7 (char 6)"),
        ('{"a": 1}', "is not a program: the top: expected keys from format, version"),
    ],
)
def test_a_foreign_file_is_named(tmp_path, command, content, message):
    path = tmp_path / "foreign"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert call(command, path, code=1).startswith(f"Error: {path} {message}")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_truncated_file_says_where_it_ends(single, part):
    text = single.read_text()
    single.write_text(text[: int(len(text) * part)])
    assert call("show", single, code=1).startswith(f"Error: {single} is not a program: line ")


def test_a_file_that_is_not_there():
    assert "File '/nowhere' does not exist." in call("show", "/nowhere", code=2)


# -- ops, env, run -----------------------------------------------------------------------------------------------------------------------


def test_ops_lists_and_describes():
    listed = call("ops")
    assert "\nall_reduce " in listed and len(listed.splitlines()) == len(fx.ir.OPS)
    assert call("ops", "softmax").startswith("softmax(X) -> Out\n  axis = -1\n")
    assert call("ops", "matmul").splitlines().count("  * i k, * k j -> * i j | k:+ L(0) L(1)") == 1
    assert call("ops", "all_redcue", code=1) == "Error: there is no op 'all_redcue'; did you mean 'all_reduce'?\n"


def test_env_lists_every_variable():
    text = call("env")
    for name in ("FLUIDX_DEBUG", "FLUIDX_DUMP", "FLUIDX_VERIFY", "FLUIDX_TIMEOUT", "FLUIDX_CHECK_NAN", "FLUIDX_KERNELS", "CPU_NUM"):
        assert f"{name} (" in text


SCRIPT = """
import sys
import numpy as np
import fluidx as fx
x = fx.data("x", [-1, 4])
loss = fx.layers.mean(fx.layers.fc(x, 2))
fx.optimizer.SGD(0.1).minimize(loss)
places = fx.cpu_places()
t = fx.DistributeTranspiler().transpile(trainers=len(places))
with fx.ParallelExecutor(t, places=places) as exe:
    exe.run_startup()
    exe.run(feed={"x": np.ones((8, 4), "float32")}, fetch_list=[loss])
print(len(places), "ranks", sys.argv[1:])
"""


def command(*args):
    return subprocess.run([sys.executable, "-m", "fluidx", *map(str, args)], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_run_gives_a_script_its_ranks_and_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = command("run", "-n", 4, script, "--fast", "3")
    assert (done.stdout, done.returncode) == ("4 ranks ['--fast', '3']\n", 0), done.stderr


def test_run_shows_the_scripts_own_traceback(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("import fluidx as fx\nfx.strategies.get('ring')\n")
    done = command("run", "-n", 2, script)
    assert done.returncode == 1
    assert f'File "{script}", line 2' in done.stderr
    assert done.stderr.endswith("TranspileError: unknown strategy 'ring'; did you mean 'ring_optimizer'?\n")


# -- plans, traces, doctor ---------------------------------------------------------------------------------------------------------------


def test_show_prints_a_plan_for_sizes_that_are_given(pair, single):
    text = call("show", pair, "--plan", "--batch", 6)
    assert re.match(r"plan of program classifier_mlp: \d+ steps, arena ", text)
    assert "%x f32[6,12] feed, %fc_0.w_0 f32[12,4] state -> %fc_0.tmp_0 f32[6,4] at " in text
    assert re.fullmatch(r"cost: \d+ operations, \d+ bytes read, \d+ written", text.splitlines()[-1])
    assert call("show", single, "--plan", "--feed", "x=6x12,label=6x1") == text
    assert call("show", single, "--plan", "--feed", "x=6x12", "--batch", 6) == text


def test_show_prints_the_plan_of_a_rank(pair):
    text = call("show", pair, "--strategy", "zero1", "-n", 2, "--rank", 1, "--plan", "--batch", 7)
    assert "%x f32[4,12] feed" in text and " reduce_scatter: " in text
    assert call("show", pair, "--strategy", "zero1", "-n", 2, "--plan", "--batch", 7, code=1) == (
        "Error: this is a program for all ranks, and a plan is for one rank; give --rank\n"
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "variable 'x' is declared f32[-1,12]: give its open sizes, with a batch size or a shape such as x=8x12"),
        (["--feed", "x=6x12,lable=6x1"], "a shape is given for 'lable', which program classifier_mlp is not fed; did you mean 'label'?"),
        (["--feed", "x=6x13", "--batch", 6], "variable 'x' is declared f32[-1,12], the shape given is [6, 13]"),
    ],
)
def test_a_plan_without_its_sizes_says_how_to_give_them(single, options, message):
    hint = "\n  give shapes with --feed NAME=8x12,NAME=8x1, and other batch sizes with --batch 8\n"
    assert call("show", single, "--plan", *options, code=1) == f"Error: {message}{hint}"


def test_options_of_a_plan_that_make_no_sense(single):
    assert "'x=6y12' is not the shape of a feed; write image=60x64" in call("show", single, "--plan", "--feed", "x=6y12", code=2)
    assert "--feed, --batch and --fetch are options of --plan; give --plan too" in call("show", single, "--batch", 6, code=2)
    wrong = call("show", single, "--plan", "--batch", 6, "--fetch", "nope", code=1)
    assert wrong == "Error: variable 'nope' has no value to fetch: no operator defines it\n"


def test_trace_runs_a_script_and_writes_a_timeline(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    done = command("trace", "-n", 2, "-o", out, "--limit", 3, script, "--fast")
    lines = done.stdout.splitlines()
    assert lines[0] == "2 ranks ['--fast']" and done.returncode == 0, done.stderr
    assert lines[1].startswith("1 run of main on 2 ranks: ") and lines[2].startswith("ceilings, ")
    assert [line.split(":")[0] for line in lines[3:5]] == ["rank 0", "rank 1"] and all("ms exposed" in line for line in lines[3:5])
    assert lines[6].split()[:3] == ["operator", "body", "calls"] and lines[-2].startswith("... and ")
    assert lines[-1] == f"wrote {out}; open it at https://ui.perfetto.dev"
    names = {e["args"]["name"] for e in json.loads(out.read_text())["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"rank 0", "rank 1", "rank 0: communication", "rank 1: communication"}


@pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")
def test_trace_starts_ranks_that_are_processes(tmp_path):
    script, out = Path(__file__).with_name("launch_script.py"), tmp_path / "out.json"
    done = command("trace", "-n", 2, "--backend", "processes", "-o", out, script, "zero1", tmp_path, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "rank 0 is done" and lines[1].startswith("3 runs of net on 2 ranks: ") and done.returncode == 0, done.stderr
    assert lines[-1] == f"wrote {out}; open it at https://ui.perfetto.dev"
    names = {e["args"]["name"] for e in json.loads(out.read_text())["traceEvents"] if e["name"] == "thread_name"}
    assert {"rank 0", "rank 1", "rank 0: communication", "rank 1: communication"} <= names
    said = call("trace", "--backend", "processes", script, code=2)
    assert "give the number of ranks with -n: --backend processes starts a process for each" in said


def test_trace_watches_the_first_runs_only_and_passes_exits_on(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(
        "import numpy as np, fluidx as fx\ny = fx.layers.scale(fx.data('x', [-1, 4]), scale=2.0)\nexe = fx.Executor()\n"
        "for _ in range(5):\n    exe.run(feed={'x': np.ones((2, 4), 'float32')}, fetch_list=[y])\nraise SystemExit(3)\n"
    )
    done = command("trace", "--steps", 2, "-o", out, script)
    assert done.returncode == 3 and done.stdout.startswith("2 runs of main on one device: ") and out.exists()


def test_trace_of_a_script_that_runs_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('hello')\n")
    done = command("trace", "-o", tmp_path / "out.json", script)
    assert (done.returncode, done.stdout) == (1, "hello\n")
    watched = "the profiler measures Executor.run and ParallelExecutor.run"
    assert done.stderr == f"Error: {script} ran no program, so there is nothing to show: {watched}\n"
    assert not (tmp_path / "out.json").exists()


def test_trace_asks_for_a_folder_before_it_runs_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('hello')\n")
    text = call("trace", "-o", "/nowhere/out.json", script, code=2)
    assert "cannot write /nowhere/out.json: the folder /nowhere does not exist" in text and "hello" not in text


def test_doctor_says_what_is_found_a_line_each():
    lines = dict(line.split(": ", 1) for line in call("doctor", FLUIDX_DEBUG="1", FLUIDX_DEBGU="1", OPENBLAS_NUM_THREADS="1").splitlines())
    assert lines["fluidx"] == fx.__version__ and lines["numpy"].startswith(np.__version__)
    assert lines["kernels"].startswith(("native kernels on: level ", "native kernels off: "))
    assert lines["variables"].startswith("FLUIDX_DEBUG=1, ")
    assert "FLUIDX_DEBGU=1 (fluidx has no such variable; did you mean FLUIDX_DEBUG?)" in lines["variables"]
    assert "OPENBLAS_NUM_THREADS=1" in lines["blas threads"] and {"python", "cupy", "mpi"} < set(lines)


def test_doctor_says_why_kernels_are_off_and_what_is_wrong_with_a_variable():
    assert "kernels: native kernels off: FLUIDX_KERNELS=numpy\n" in call("doctor", FLUIDX_KERNELS="numpy")
    wrong = call("doctor", FLUIDX_KERNELS="fast")
    assert "kernels: unknown: environment variable FLUIDX_KERNELS: expected auto, numpy or native, found 'fast'\n" in wrong


def test_the_shortened_texts_of_the_demo():
    main = demo.build()[0]
    lines = demo._without_declarations(str(main))
    assert "  ... 9 operators" in lines and not any(line.startswith("  var ") for line in lines)
    assert demo._at_most(["a", "b", "c"], 2) == ["a", "b", "  ... and 1 more"]


def test_what_a_pass_in_a_text_refuses_points_at_no_line_of_the_command(pair):
    for option in ("dtype=int8", "dtype=float16"):
        said = call("verify", pair, "--strategy", f"zero1,amp{{{option}}}", code=1)
        assert said.startswith("Error: amp: ") and "written at" not in said.partition("\n  in program")[0]


# -- clusters -----------------------------------------------------------------------------------------------------------------------


def test_clusters_lists_machines_and_all_figures_of_one():
    lines = call("clusters").splitlines()
    assert lines[0].split()[:4] == ["name", "devices", "of", "a"] and len(lines) == 9
    assert lines[1] == "dgx-a100   8 x A100 SXM4 80 GB    80 GB     2.039 TB/s     229 GB/s  8 x 22.75 GB/s"
    text = call("clusters", "dgx-v100")
    assert text.startswith("dgx-v100: NVIDIA DGX-1: 8 V100 in a hybrid cube mesh of NVLink 2, 4 InfiniBand cards of 100 Gb/s\n")
    assert "hosts: as many as the ranks need, devices of a host: 8\n" in text
    assert "inside.by_group.2               22.5 GB/s +- 2%  VIA-Research/vTrain, data: all_reduce of 1 GiB by 2 V100\n" in text
    assert text.endswith("not calibrated: every number is published or derived\n")


def test_clusters_writes_the_form_of_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(call("clusters", "p5", "--json"))
    assert call("clusters", path) == call("clusters", "p5")
    names = [line.split()[0] for line in call("clusters").splitlines()[1:]]
    assert [one["name"] for one in json.loads(call("clusters", "--json"))] == names


def test_clusters_refuses_what_is_not_there(tmp_path):
    assert call("clusters", "p6", code=1).startswith("Error: unknown cluster 'p6'; there are: dgx-a100, dgx-b200, ")
    missing = tmp_path / "no.json"
    said = call("clusters", missing, code=1)
    assert said.startswith(f"Error: cluster file {missing} does not exist; names that need no file: dgx-a100, ")
