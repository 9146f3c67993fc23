"""Files of adapters in the form of PEFT: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import float_info
from typing import Any, NamedTuple

import numpy as np

from ..files.atomic import write_atomically
from ..files.safetensors import ArrayFile, save_arrays
from ..files.state import from_first
from ..initializer import NumpyArrayInitializer
from ..ir import Program, ProgramPair
from ..ir.dtypes import np_dtype
from ..ir.errors import nearest
from .adapters import A, AddAdapters, B, adapters_of, product_modules
from .errors import OnnxError
from .export_graph import state_value
from .lora import Lora, module_of
from .program_writer import valid_name
from .quantized_base import QuantizeBase

CONFIG, ARRAYS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNKNOWN = {"use_dora": "DoRA", "use_bone": "Bone", "layer_replication": "replicated layers", "target_parameters": "adapted parameters"}


class Weights(NamedTuple):
    """The arrays of one adapter, A [rank, in] and B [out, rank], and the factor of their product."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def delta(self) -> np.ndarray:
        """What the adapter adds to a weight [in, out], or to a filter [out, in, height, width], in float64."""
        if self.a.ndim > 2:
            b, a = self.b.astype(np.float64)[:, :, 0, 0], self.a.astype(np.float64)
            return self.scale * np.tensordot(b, a, 1)
        return self.scale * (self.a.astype(np.float64).T @ self.b.astype(np.float64).T)


@dataclass(frozen=True)
class AdapterFile:
    """The content of a folder of adapters: adapters by module, and the values of parameters that were trained beside them by name."""

    path: str
    adapters: Mapping[str, Weights]
    others: Mapping[str, np.ndarray] = field(default_factory=dict)
    dropout: float = 0.0

    def lora(self, modules: Mapping[str, str]) -> Lora:
        """The options with which training goes on, for a program whose weights have these modules. Raises OnnxError if adapters have
        several ranks or scales, or if the program lacks a module."""
        kinds = {(len(w.a), w.scale) for w in self.adapters.values()}
        if len(kinds) > 1:
            raise OnnxError(f"{self.path} has adapters of several ranks or scales, which set_training cannot go on with; fx.onnx.merge can")
        ((rank, scale),) = kinds
        targets = tuple(modules[weight] for weight in self.weights(modules).values())
        return Lora(rank, scale * rank, targets, self.dropout, tuple(map(valid_name, self.others)))

    def weights(self, modules: Mapping[str, str]) -> dict[str, str]:
        """Adapters -> the weights that they are for, of a model whose weights have these modules. Raises OnnxError if an adapter is for
        none or for several, or if two are for one."""
        found = {name: self._weight(valid_name(name), modules) for name in self.adapters}
        taken = dict[str, str]()
        for name, weight in found.items():
            if (other := taken.setdefault(weight, name)) != name:
                raise OnnxError(
                    f"{self.path} has adapters {other!r} and {name!r}, and both are for the weight {weight!r} of the model, which has one "
                    f"module {modules[weight]!r}; give the model that the adapters were trained with, or a folder with one of them"
                )
        return found

    def _weight(self, name: str, modules: Mapping[str, str]) -> str:
        """The weight whose module or own name this is, or the only one where a prefix differs."""
        for names in (modules, {w: w for w in modules}, {w: module_of(w) for w in modules}):
            found = [w for w, own in names.items() if valid_name(own) == name]
            if len(found) > 1:
                some = " and ".join(map(repr, found))
                raise OnnxError(f"{self.path} adapts module {name!r}, which has several weights in the model: {some}; "
                                "train the adapters again, so that each has the name of its weight, or rename a weight")  # fmt: skip
            if found:
                return found[0]
        ends = {w: valid_name(m) for w, m in modules.items()}
        like = [w for w, m in ends.items() if m.endswith(f".{name}") or name.endswith(f".{m}")]
        if len(like) == 1:
            return like[0]
        near = nearest(name, modules.values(), "its modules are") if modules else (
            "it multiplies by no float weight, as a quantized model; give the float model, and quantize the merged one"
        )
        raise OnnxError(f"{self.path} adapts module {name!r}, which the model lacks; {near}")


def save_adapters(program: Any, path: Any, executor: Any = None, scope: Any = None, base: str | None = None) -> None:
    """Write the adapters of a program that `set_training(lora=...)` prepared, and the other trained parameters, to a folder, as PEFT does.

    Values are those in `scope` (by default the global one), or on the ranks of `executor`, a ParallelExecutor. `base` is the name of the
    model that the configuration notes. Raises OnnxError if the program has no adapters.

    >>> import fluidx as fx, numpy as np
    >>> main, startup = fx.Program("net"), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     y = fx.layers.fc(fx.data("x", [-1, 4], "float32"), 3)
    >>> fx.onnx.set_training(main, startup=startup, lora=fx.onnx.Lora(rank=2))
    >>> scope = fx.Scope()
    >>> _ = fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
    >>> fx.onnx.save_adapters(main, "adapters", scope=scope)
    >>> from safetensors.numpy import load_file
    >>> {name: a.shape for name, a in load_file("adapters/adapter_model.safetensors").items()}
    {'base_model.model.fc_0.lora_A.weight': (2, 4), 'base_model.model.fc_0.lora_B.weight': (3, 2)}
    """
    if not isinstance(program, Program):
        hint = "; give its .program" if hasattr(program, "program") else ""
        raise OnnxError(f"save_adapters: expected a Program, got {type(program).__name__}{hint}")
    found = adapters_of(program)
    if not found:
        raise OnnxError(f"save_adapters: {program.label()} has no adapters; set_training(model, lora=fx.onnx.Lora(...)) adds them")
    trained = [p.name for p in program.all_parameters() if p.trainable]
    arrays = {_PREFIX + name: state_value(executor, scope, name) for name in trained}
    others = [n for n in trained if not n.endswith((A, B))]
    first = found[0]
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": base, "inference_mode": True, "r": first.rank,
        "lora_alpha": _plain(first.scale * first.rank), "lora_dropout": first.dropout, "target_modules": [a.module for a in found],
        "modules_to_save": others or None, "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False,
        "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip

    def write() -> None:
        folder = os.fspath(path)
        os.makedirs(folder, exist_ok=True)
        save_arrays(os.path.join(folder, ARRAYS), arrays, {"format": "pt"})  # the format that readers of PEFT's files expect
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        write_atomically(os.path.join(folder, CONFIG), lambda stream: stream.write(text.encode()))

    from_first(executor, "write adapters", write)


def adapters_in(program: Program, executor: Any, scope: Any) -> AdapterFile:
    """The adapters that a program has, with their present values."""
    found = adapters_of(program)
    if not found:
        raise OnnxError(f"{program.label()} has no adapters; set_training(model, lora=fx.onnx.Lora(...)) adds them")
    values = [tuple(state_value(executor, scope, a.module + end) for end in (A, B)) for a in found]
    return AdapterFile(program.label(), {a.module: Weights(v[0], v[1], a.scale) for a, v in zip(found, values, strict=True)})


def _plain(number: float) -> float | int:
    rounded = float(f"{number:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


def add_adapters(pair: ProgramPair, lora: Any, modules: Mapping[str, str], new: Sequence[str]) -> None:
    """Add adapters to programs, in place: new ones of a Lora, or those of a folder with their values. `modules` has the modules of
    parameters whose names do not give them, and `new` are parameters of a new head, which are trained as they are."""
    file = None if isinstance(lora, Lora) else read_adapters(lora)
    if file is not None:
        known = product_modules(pair.main, modules, new)
        lora, weights = file.lora(known), file.weights(known)
    lora = replace(lora, also_train=tuple(dict.fromkeys((*lora.also_train, *new))))
    made = AddAdapters(lora, tuple(modules.items())).run(pair)
    if lora.base is not None:
        made = QuantizeBase(lora.base).run(made)
    if file is not None:
        names = {valid_name(known[weights[m]]): w for m, w in file.adapters.items()}
        values = {n + end: a for n, w in names.items() for end, a in ((A, w.a), (B, w.b))}
        values.update(file.others)
        _fill(made.startup, values, file.path)
    pair.main.become(made.main)
    pair.startup.become(made.startup)


def _fill(startup: Program, values: Mapping[str, np.ndarray], path: str) -> None:
    """Startup gives these values to parameters."""
    block = startup.global_block()
    for name, value in values.items():
        var = block.var(valid_name(name))
        if tuple(var.shape) != value.shape:
            raise OnnxError(f"{path}: {name!r} is {list(value.shape)}, and the program's parameter is {list(var.shape)}")
        NumpyArrayInitializer(value.astype(np_dtype(var.dtype)))(var, block)


# -- reading --------------------------------------------------------------------------------------------------------------------------


def read_adapters(path: Any) -> AdapterFile:
    """The adapters in a folder that fluidx or PEFT wrote. Raises OnnxError if a file is missing or has something else than LoRA."""
    if not isinstance(path, (str, os.PathLike)):
        raise OnnxError(f"adapters are a folder with {CONFIG} and {ARRAYS}, given by its path; got {type(path).__name__}: {path!r}")
    folder = Path(path)
    if folder.is_file():
        if folder.name not in (CONFIG, ARRAYS):
            raise OnnxError(f"{path} has no adapters: expected a folder with {CONFIG} and {ARRAYS}, as save_adapters, PEFT and "
                            f"fluidx onnx train --lora write it, found a file {folder.name!r}")  # fmt: skip
        folder = folder.parent
    config = _config(folder)
    with ArrayFile(str(folder / ARRAYS)) as file:
        arrays = {name.removeprefix(_PREFIX): file.array(name) for name in file.names}
    modules = sorted(n.removesuffix(A) for n in arrays if n.endswith(A))
    if alone := next((n for n in arrays if n.endswith(B) and n.removesuffix(B) not in modules), None):
        raise OnnxError(f"{folder / ARRAYS} has {alone} but no {alone.removesuffix(B) + A}")
    _refuse_equal_names(folder / ARRAYS, modules)
    if not modules:
        raise OnnxError(f"{folder / ARRAYS} has no adapter: no array is named {_PREFIX}<module>{A}")
    found = {m: _weights(folder, config, m, arrays) for m in modules}
    others = {n: a for n, a in arrays.items() if not n.endswith((A, B))}
    if odd := next((n for n in others if ".lora_" in n), None):
        raise OnnxError(f"{folder / ARRAYS} has {odd!r}; fluidx knows adapters of products: {A[1:]} and {B[1:]}")
    return AdapterFile(str(folder), found, others, float(config.get("lora_dropout", 0.0)))


def _refuse_equal_names(path: Path, modules: Sequence[str]) -> None:
    """Raise OnnxError for modules that have one name in a program."""
    first = dict[str, str]()
    for module in modules:
        if (other := first.setdefault(valid_name(module), module)) != module:
            raise OnnxError(f"{path} adapts modules {other!r} and {module!r}, whose names differ only in characters that names of programs "
                            "lack; rename one of them, here and in the model")  # fmt: skip


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except OSError as e:
        raise OnnxError(f"cannot read {folder / CONFIG}: {e.strerror}; adapters are a folder with {CONFIG} and {ARRAYS}") from None
    except (ValueError, RecursionError) as e:
        raise OnnxError(f"{folder / CONFIG} is not JSON: {str(e)[:80]}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise OnnxError(f"{folder / CONFIG}: peft_type must be 'LORA', found {kind!r}")
    if odd := next((what for key, what in _UNKNOWN.items() if config.get(key)), None):
        raise OnnxError(f"{folder / CONFIG} describes {odd}, which fluidx does not have; it reads plain LoRA")
    for key in ("r", "lora_alpha", "lora_dropout"):
        if not _is_finite(config.get(key, 0)):
            raise OnnxError(f"{folder / CONFIG}: {key} must be a finite number, found {config[key]!r}")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise OnnxError(f"{folder / CONFIG}: alpha_pattern must be an object of names of modules and numbers, found {patterns!r}")
    if odd := next((name for name, value in patterns.items() if not _is_finite(value)), None):
        raise OnnxError(f"{folder / CONFIG}: alpha_pattern must have a finite number for {odd!r}, found {patterns[odd]!r}")
    return config


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= float_info.max


def _weights(folder: Path, config: Mapping[str, Any], module: str, arrays: Mapping[str, np.ndarray]) -> Weights:
    a, b = arrays[module + A], arrays.get(module + B)
    if b is None:
        raise OnnxError(f"{folder / ARRAYS} has {module + A} but no {module + B}")
    fits = a.ndim == b.ndim and a.ndim in (2, 4) and len(a) == b.shape[1] and b.shape[2:] == (1,) * (a.ndim - 2)
    if not fits or a.dtype.kind not in "fV" or b.dtype.kind not in "fV":
        found, of_filter = f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}", "[rank, in, height, width] and [out, rank, 1, 1]"
        raise OnnxError(f"{folder / ARRAYS}: the adapter of {module!r} must be floats [rank, in] and [out, rank], or of a convolution "
                        f"{of_filter}, found {found}")  # fmt: skip
    if not len(a):
        raise OnnxError(f"{folder / ARRAYS}: the adapter of {module!r} must have a rank of 1 or more, found {A[1:]} {list(a.shape)}")
    alpha, rank = _of_module(config, "alpha_pattern", module, config.get("lora_alpha", 8)), len(a)
    return Weights(a, b, alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _of_module(config: Mapping[str, Any], key: str, module: str, default: float) -> float:
    """The value of a pattern that matches the module's name or its end, as PEFT looks it up."""
    for pattern, value in (config.get(key) or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return float(value)
        except re.error:
            continue
    return default
