"""fluidx turns a training program for one device into one program per rank, with the communication written in as operators.

Programs are written with `layers` and `optimizer`, run on one device by `Executor`, rewritten for many by `DistributeTranspiler`, and run
there by `ParallelExecutor`. Names, argument order and meaning are Paddle fluid 1.8's.

>>> import fluidx as fx
>>> main, startup = fx.Program("main"), fx.Program("startup")
>>> with fx.program_guard(main, startup), fx.unique_name.guard():
...     x = fx.data("x", [-1, 4], "float32")
...     loss = fx.layers.mean(fx.layers.fc(x, 2, act="relu"))
>>> main
<Program main: 4 ops, 2 params>

Importing fluidx loads what programs are written with; executor, transpiler, ONNX and the rest are imported when first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import ir, layers, ops
from ._version import __version__
from .ir import (
    Block,
    ExecutionError,
    FeedError,
    FluidxError,
    NotInitializedError,
    Operator,
    Parameter,
    ParseError,
    Program,
    ProgramError,
    ProgramPair,
    RankError,
    TranspileError,
    Variable,
    VerifyError,
    default_main_program,
    default_startup_program,
    device_guard,
    errors,
    name_scope,
    program_guard,
    unique_name,
)
from .layers.declare import fluid_data as data
from .layers.nn import fluid_embedding as embedding
from .layers.nn import fluid_one_hot as one_hot
from .param_attr import ParamAttr

if TYPE_CHECKING:
    from . import backward, clip, initializer, io, lr_scheduler, mixed_precision, nets, onnx, optimizer, regularizer, rewrite
    from .backward import append_backward, gradients
    from .comm.launch_environment import rank, world_size
    from .data_feeder import DataFeeder
    from .executor import CPUPlace, CUDAPlace, Executor, ParallelExecutor, Scope, cpu_places, cuda_places, global_scope, scope_guard
    from .inference import InferenceTranspiler
    from .io import load, save
    from .native import set_num_threads
    from .quantization import quantize
    from .simulator.planner import plan
    from .simulator.simulate import simulate
    from .transpiler import Cluster, DistributeTranspiler, DistributeTranspilerConfig, Mesh, strategies
    from .tuning import tune
    from .tuning_executor import TuningExecutor

# public name -> the module that has it; a module listed in _MODULES is itself the name
_LAZY = {
    "append_backward": "backward", "gradients": "backward",
    "CPUPlace": "executor", "CUDAPlace": "executor", "Executor": "executor", "ParallelExecutor": "compiler", "Scope": "executor",
    "CUDAPinnedPlace": "executor", "cpu_places": "executor", "cuda_pinned_places": "executor", "cuda_places": "executor",
    "global_scope": "executor", "scope_guard": "executor",
    "mpi_places": "executor", "process_places": "executor", "rank": "comm.launch_environment", "world_size": "comm.launch_environment",
    "Cluster": "transpiler", "DistributeTranspiler": "transpiler", "DistributeTranspilerConfig": "transpiler",
    "Mesh": "transpiler", "strategies": "transpiler",
    "InferenceTranspiler": "inference", "plan": "simulator", "quantize": "quantization",
    "simulate": "simulator", "tune": "tuning", "TuningExecutor": "tuning_executor",
    "DataFeeder": "data_feeder", "load": "io", "save": "io", "set_num_threads": "native",
    "BuildStrategy": "compiler", "CompiledProgram": "compiler", "ExecutionStrategy": "compiler",
    "get_flags": "framework", "in_dygraph_mode": "framework", "is_compiled_with_cuda": "framework", "require_version": "framework",
    "set_flags": "framework", "load_program_state": "io", "set_program_state": "io", "WeightNormParamAttr": "param_attr",
    "HashName": "transpiler", "RoundRobin": "transpiler", "memory_optimize": "transpiler", "release_memory": "transpiler",
}  # fmt: skip
_MODULES = (
    "average", "backward", "clip", "comm", "compiler", "config", "contrib", "core", "data_feeder", "executor", "framework", "incubate",
    "initializer", "install_check", "io", "layer_helper", "lr_scheduler", "metrics", "mixed_precision", "nets", "onnx", "optimizer",
    "param_attr", "profiler", "regularizer", "rewrite", "simulator", "testing", "transpiler", "verify", "view",
)  # fmt: skip

__all__ = [
    "Block", "CPUPlace", "CUDAPlace", "Cluster", "DataFeeder", "DistributeTranspiler", "DistributeTranspilerConfig", "ExecutionError",
    "Executor", "FeedError", "FluidxError", "InferenceTranspiler", "Mesh", "NotInitializedError", "Operator", "ParallelExecutor",
    "ParamAttr", "Parameter", "ParseError", "Program", "ProgramError", "ProgramPair", "RankError", "Scope", "TranspileError",
    "TuningExecutor", "Variable", "VerifyError", "__version__",
    "append_backward", "backward", "clip", "cpu_places", "cuda_places", "data", "default_main_program", "default_startup_program",
    "device_guard", "embedding", "errors", "global_scope", "gradients", "initializer", "io", "ir", "layers", "load", "lr_scheduler",
    "mixed_precision", "name_scope", "nets", "one_hot", "onnx", "ops", "optimizer", "plan", "program_guard", "quantize", "rank",
    "regularizer", "rewrite", "save", "scope_guard", "set_num_threads", "simulate", "strategies", "tune", "unique_name", "world_size",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _LAZY:
        value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    from .fluid_names import missing

    raise missing("", name, {*__all__, *_LAZY, *_MODULES})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY, *_MODULES})


def _in_notebook(shown: Any) -> str:
    return import_module(f"{__name__}.view").in_notebook(shown)


# Notebooks ask an output for its HTML. `ir` does not know `view`, so the two are tied here.
Program._repr_html_ = ProgramPair._repr_html_ = _in_notebook  # type: ignore[attr-defined]
