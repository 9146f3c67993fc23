"""Save and load: variables as safetensors files, programs as text. Nothing is pickled, and a file is replaced whole or not at all.

`save` and `load` keep a whole program in one file, `save_text` and `load_text` what it says, `save_vars` and its kin keep variables one
per file (or in one file), `save_inference_model` keeps what is needed to compute some targets. Values come from the global scope, or, when
the executor is a ParallelExecutor, from its ranks: a file does not depend on how many there were.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from ._checks import wrong
from ._safetensors import ArrayFile, CheckpointError, save_arrays
from ._texts import constants_beside, constants_in, load_constants, load_text, path_of, read_text, save_text, write_text
from .ir import (
    FeedError,
    NotInitializedError,
    Parameter,
    ParseError,
    Program,
    TensorType,
    Var,
    Variable,
    as_dtype,
    default_main_program,
    flow,
)
from .ir.bodies import copy_op
from .ir.constants import Array, is_digest

__all__ = [
    "CheckpointError", "load", "load_constants", "load_inference_model", "load_params", "load_persistables", "load_program",
    "load_program_state", "load_text", "load_vars", "prune", "save", "save_inference_model", "save_params", "save_persistables",
    "save_text", "save_vars", "set_program_state",
]  # fmt: skip

_SUFFIX = ".safetensors"
_MODEL, _PARAMS = "__model__", "__params__" + _SUFFIX


# -- where values live ------------------------------------------------------------------------------------------------------


def _get(executor: Any, var: Var) -> np.ndarray:
    """The value of a persistable variable, checked against its declaration."""
    if hasattr(executor, "state"):
        try:
            value = np.asarray(executor.state(var.name))
        except FeedError as e:
            raise CheckpointError(f"cannot save: {e}") from None
    else:
        from .executor import global_scope

        held = global_scope().find_var(var.name)
        if held is None:
            raise NotInitializedError(f"cannot save variable {var.name!r}: it has no value; run the startup program first")
        value = np.asarray(held.get_tensor())
    found = TensorType(as_dtype(value.dtype), value.shape)
    if not var.type.accepts(found):
        raise CheckpointError(f"cannot save variable {var.name!r}: it is declared {var.type}, its value is {found}")
    return value


def _set(executor: Any, name: str, value: np.ndarray) -> None:
    if hasattr(executor, "set_state"):
        executor.set_state(name, value)
        return
    from .executor import global_scope

    global_scope().set(name, value)


def _check(path: str, var: Var, dtype: str, shape: tuple[int, ...]) -> None:
    found = TensorType(dtype, shape)
    if not var.type.accepts(found):
        raise CheckpointError(f"{path}: variable {var.name!r} should be {var.type}, the file holds {found}")


def _inside(dirname: Any, filename: Any) -> str:
    """dirname/filename, where filename may not lead out of dirname."""
    if not isinstance(filename, str) or os.path.basename(filename) != filename or filename in ("", ".", "..") or "\0" in filename:
        raise CheckpointError(f"{filename!r} is no file name; it must stand without a directory, which is {dirname!r}")
    return os.path.join(path_of(dirname), filename)


def _file_of(name: str) -> str:
    """The file that holds the variable of that name, when each has its own. Slashes and the like are escaped.

    >>> _file_of("fc_0.w_0"), _file_of("../w")
    ('fc_0.w_0.safetensors', '..%2Fw.safetensors')
    """
    encoded = quote(name, safe="@+,=")
    if len(encoded) > 200:
        encoded = f"{encoded[:180]}~{zlib.crc32(name.encode()):08x}"
    return encoded + _SUFFIX


# -- a whole program ----------------------------------------------------------------------------------------------------------


def save(program: Program, model_path: Any, executor: Any = None) -> None:
    """Write the program, its large constants and all its persistable variables into one file, `model_path` plus ".safetensors".

    Raises NotInitializedError when a variable has no value yet, CheckpointError when the file cannot be written; an older file is then
    still there, whole.
    """
    program = _program(program)
    values = {d.name: _get(executor, d) for d in _persistables(program)}
    if taken := [n for n in values if is_digest(n)]:
        raise CheckpointError(f"variable {taken[0]!r} cannot be saved under its name, which is that of a constant; rename it")
    values.update((digest, a.values) for digest, a in program.constants().items())
    save_arrays(_with_suffix(model_path), values, {"format": "fluidx", "program": program.to_string()})


def load(program: Program, model_path: Any, executor: Any = None, var_list: Sequence[Variable] | None = None) -> None:
    """Read the values of the program's persistable variables (or of `var_list`) from a file that `save` wrote.

    All of them are checked before the first is set. Raises CheckpointError, naming file and variable, when one is missing or has
    another shape or dtype.
    """
    program = _program(program)
    wanted = _persistables(program) if var_list is None else [_record(program, v) for v in var_list]
    _load_all(_with_suffix(model_path), wanted, executor)


def load_program(model_path: Any) -> Program:
    """The program in a file that `save` wrote."""
    path = _with_suffix(model_path)
    with ArrayFile(path) as file:
        if "program" not in file.metadata:
            raise CheckpointError(f"{path} holds variables but no program; it was not written by fluidx.io.save")
        return _parse(path, file.metadata["program"], constants_in(file))


def load_program_state(model_path: Any, var_list: Sequence[Variable] | None = None) -> dict[str, np.ndarray]:
    """The arrays of a file that `save` wrote, by name; those of `var_list` only, if given."""
    with ArrayFile(_with_suffix(model_path)) as file:
        names = [n for n in file.names if not is_digest(n)] if var_list is None else [v.name for v in var_list]
        return {n: file.array(n) for n in names}


def set_program_state(program: Program, state_dict: Mapping[str, Any], executor: Any = None) -> None:
    """Give the program's persistable variables the values in `state_dict`; names the program does not have are refused."""
    program = _program(program)
    pairs = []
    for name, value in state_dict.items():
        var, array = program.global_block().desc(name), np.asarray(value)
        _check("state_dict", var, as_dtype(array.dtype), array.shape)
        pairs.append((name, array))
    for name, array in pairs:
        _set(executor, name, array)


def _with_suffix(path: Any) -> str:
    path = path_of(path)
    if os.path.basename(path) in ("", ".", ".."):
        raise CheckpointError(f"{path!r} is no file name")
    return path if path.endswith(_SUFFIX) else path + _SUFFIX


def _program(program: Any) -> Program:
    if program is None:
        return default_main_program()
    if not isinstance(program, Program):
        raise wrong(f"expected a Program, got {type(program).__name__}: {program!r}")
    return program


def _persistables(program: Program) -> list[Var]:
    return [d for d in program.global_block().descs.values() if d.persistable]


def _record(program: Program, var: Any) -> Var:
    if not isinstance(var, (str, Variable)):
        raise wrong(f"expected a Variable or a name, got {type(var).__name__}: {var!r}")
    return program.global_block().desc(var if isinstance(var, str) else var.name)


def _load_all(path: str, wanted: Sequence[Var], executor: Any) -> None:
    with ArrayFile(path) as file:
        for var in wanted:
            _check(path, var, *file.type_of(var.name))
        arrays = [(var.name, file.array(var.name)) for var in wanted]
    for name, array in arrays:
        _set(executor, name, array)


def _parse(path: str, text: str, constants: Mapping[str, Array]) -> Program:
    try:
        return Program.parse_from_string(text, constants)
    except ParseError as e:
        raise CheckpointError(f"{path}: the program in it cannot be read: {e}") from e


# -- variables ------------------------------------------------------------------------------------------------------------------


def _chosen(main_program: Any, vars: Any, predicate: Callable[[Variable], bool] | None) -> list[Var]:
    program = _program(main_program)
    if vars is not None:
        return [_record(program, v) for v in vars]
    keep = predicate or (lambda v: v.persistable)
    return [v.desc for v in program.global_block().vars.values() if keep(v)]


def save_vars(
    executor: Any,
    dirname: Any,
    main_program: Program | None = None,
    vars: Iterable[Variable] | None = None,
    predicate: Callable[[Variable], bool] | None = None,
    filename: str | None = None,
) -> None:
    """Write variables into `dirname`: those in `vars`, else those that `predicate` picks, else all persistable ones.

    Each has a file of its own, named after it; with `filename` all are in that one.
    """
    chosen = _chosen(main_program, vars, predicate)
    values = {var.name: _get(executor, var) for var in chosen}
    if filename is not None:
        save_arrays(_inside(dirname, filename), values, {"format": "fluidx"})
        return
    for name, value in values.items():
        save_arrays(_inside(dirname, _file_of(name)), {name: value}, {"format": "fluidx"})


def load_vars(
    executor: Any,
    dirname: Any,
    main_program: Program | None = None,
    vars: Iterable[Variable] | None = None,
    predicate: Callable[[Variable], bool] | None = None,
    filename: str | None = None,
) -> None:
    """Read back what save_vars wrote with the same arguments.

    Raises CheckpointError, naming file and variable, when one is missing or has another shape or dtype; then none is set.
    """
    chosen = _chosen(main_program, vars, predicate)
    if filename is not None:
        _load_all(_inside(dirname, filename), chosen, executor)
        return
    arrays = []
    for var in chosen:
        path = _inside(dirname, _file_of(var.name))
        with ArrayFile(path) as file:
            _check(path, var, *file.type_of(var.name))
            arrays.append((var.name, file.array(var.name)))
    for name, array in arrays:
        _set(executor, name, array)


def _is_parameter(var: Variable) -> bool:
    return isinstance(var, Parameter)


def save_params(executor: Any, dirname: Any, main_program: Program | None = None, filename: str | None = None) -> None:
    """save_vars of the parameters."""
    save_vars(executor, dirname, main_program, None, _is_parameter, filename)


def save_persistables(executor: Any, dirname: Any, main_program: Program | None = None, filename: str | None = None) -> None:
    """save_vars of everything that outlives a run: parameters, optimizer state, counters."""
    save_vars(executor, dirname, main_program, None, None, filename)


def load_params(executor: Any, dirname: Any, main_program: Program | None = None, filename: str | None = None) -> None:
    """load_vars of the parameters."""
    load_vars(executor, dirname, main_program, None, _is_parameter, filename)


def load_persistables(executor: Any, dirname: Any, main_program: Program | None = None, filename: str | None = None) -> None:
    """load_vars of everything that outlives a run."""
    load_vars(executor, dirname, main_program, None, None, filename)


# -- inference --------------------------------------------------------------------------------------------------------------------


def prune(program: Program, feeds: Sequence[str], targets: Sequence[str]) -> Program:
    """The part of a program, in its inference form, that computes `targets` from `feeds` and persistable variables.

    Raises ProgramError when a target does not exist, or needs an input that is not in `feeds`.
    """
    source = program.clone(for_test=True)
    block = source.global_block()
    for name in (*feeds, *targets):
        block.desc(name)
    given = {n for n in feeds if not block.desc(n).is_data}
    kept = flow.live_ops(source, targets, given=given)
    written = flow.definitions(source, kept)
    needed = {*flow.needs(source, kept), *(t for t in targets if t not in written)}
    missing = sorted(n for n in needed.difference(feeds) if block.desc(n).is_data)
    if missing:
        listed = ", ".join(map(repr, targets))
        raise wrong(f"to compute {listed}, data variable {missing[0]!r} is needed, which is not among the feeds {list(feeds)}")
    result = Program(program.name)
    result.random_seed = program.random_seed
    result.global_block().oplist += [copy_op(op, source, result.global_block(), {}) for op in kept]
    used = {*flow.uses(source, kept), *written, *feeds, *targets}
    descs = result.global_block().descs
    for name, var in block.descs.items():
        if name in used:
            descs[name] = var.changed(is_data=True, stop_gradient=True) if name in feeds else var
    return result


def save_inference_model(
    dirname: Any,
    feeded_var_names: Sequence[str],
    target_vars: Sequence[Variable],
    executor: Any,
    main_program: Program | None = None,
    model_filename: str | None = None,
    params_filename: str | None = None,
    export_for_deployment: bool = True,
    program_only: bool = False,
) -> list[str]:
    """Write the part of the program that computes `target_vars` from the feeds, and the variables it reads; return the targets' names.

    The program is text in `model_filename` ("__model__"), with its large constants beside it as of `save_text`; the variables are in
    `params_filename` ("__params__.safetensors"). `program_only` leaves the variables away; `export_for_deployment` has no effect.
    """
    feeds = [feeded_var_names] if isinstance(feeded_var_names, str) else list(feeded_var_names)
    targets = [target_vars] if isinstance(target_vars, Variable) else list(target_vars)
    for t in targets:
        if not isinstance(t, Variable):
            raise wrong(f"save_inference_model: target_vars must be Variables, got {type(t).__name__}: {t!r}")
    if not targets or not all(isinstance(f, str) for f in feeds):
        raise wrong("save_inference_model: give feeded_var_names as a list of names and at least one target Variable")
    model_path, params_path = _inside(dirname, model_filename or _MODEL), _inside(dirname, params_filename or _PARAMS)
    names = [t.name for t in targets]
    program = prune(_program(main_program), feeds, names)
    values = {} if program_only else {d.name: _get(executor, d) for d in _persistables(program)}
    text = f"# fluidx inference model\n# feeds: {json.dumps(feeds)}\n# fetches: {json.dumps(names)}\n{program}\n"
    if not program_only:
        # the model is written last: its checksum in the other file shows when the two do not belong together
        save_arrays(params_path, values, {"format": "fluidx", "model_crc32": str(zlib.crc32(text.encode()))})
    write_text(model_path, text, program.constants())
    return names


def load_inference_model(
    dirname: Any,
    executor: Any,
    model_filename: str | None = None,
    params_filename: str | None = None,
    pserver_endpoints: Any = None,
) -> list[Any]:
    """`[program, feed names, fetch Variables]` of what save_inference_model wrote; the variables' values go into the scope.

    Raises CheckpointError when a file is missing or damaged, or when the two files come from different saves.
    """
    model_path, params_path = _inside(dirname, model_filename or _MODEL), _inside(dirname, params_filename or _PARAMS)
    text = read_text(model_path)
    feeds, fetches = _names_in(model_path, text)
    program = _parse(model_path, text, constants_beside(model_path))
    wanted = _persistables(program)
    if wanted or os.path.exists(params_path):
        with ArrayFile(params_path) as file:
            if file.metadata.get("model_crc32", "") != str(zlib.crc32(text.encode())):
                raise CheckpointError(f"{params_path} and {model_path} come from different saves; save the model again")
        _load_all(params_path, wanted, executor)
    block = program.global_block()
    for name in (*feeds, *fetches):
        if block.find(name) is None:
            raise CheckpointError(f"{model_path}: its program has no variable {name!r}, which it lists as feed or fetch")
    return [program, feeds, [block.var(n) for n in fetches]]


def _names_in(path: str, text: str) -> tuple[list[str], list[str]]:
    """The feeds and fetches in the first lines of a model file."""
    found = []
    lines = text.split("\n", 3)
    for i, key in enumerate(("feeds", "fetches"), 1):
        line = lines[i] if len(lines) > 3 and lines[0] == "# fluidx inference model" else ""
        try:
            names = json.loads(line.removeprefix(f"# {key}: "))
        except (ValueError, RecursionError):
            names = None
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise CheckpointError(f"{path} is no model that save_inference_model wrote: line {i + 1} should list its {key}")
        found.append(names)
    return found[0], found[1]
