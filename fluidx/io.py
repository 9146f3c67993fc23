"""Save and load: variables as safetensors files, programs as text. Nothing is pickled, and files are replaced atomically.

`save` and `load` use one file for a whole program, or a folder for the ranks' local values; `CheckpointManager` keeps the newest of these.
`save_text` and `load_text` are for the text of a program, `save_vars` and similar functions for variables (one file for each, or one file),
and `save_inference_model` for the part of a program that computes given targets. Values come from the global scope, or from the ranks of a
ParallelExecutor.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from ._checks import wrong
from .checkpoint import PARAMETERS_ONLY, CheckpointManager, consolidate, is_checkpoint, load_shards, save_shards
from .data_loader import DataLoader, PyReader
from .files.atomic import MANIFEST, Write, place_of, reading, write_together
from .files.program_text import (
    CONSTANTS,
    SUFFIX,
    constants_in,
    load_constants,
    load_text,
    parsed,
    path_of,
    read_text,
    save_program,
    save_text,
    with_suffix,
)  # fmt: skip
from .files.safetensors import ArrayFile, CheckpointError, arrays_in, save_arrays
from .files.state import check_state, from_first, get, made_by_all, persistables, program_or_default, put_all, state_of
from .fluid_names import module_getattr
from .ir import Parameter, Program, TensorType, Var, Variable, as_dtype, flow
from .ir.constants import is_digest
from .ir.sub_blocks import copy_op
from .readers import (
    ComposeNotAligned,
    batch,
    buffered,
    cache,
    chain,
    compose,
    firstn,
    map_readers,
    multiprocess_reader,
    shuffle,
    xmap_readers,
)

__all__ = [
    "CheckpointError", "CheckpointManager", "ComposeNotAligned", "DataLoader", "PyReader", "batch", "buffered", "cache", "chain", "compose",
    "consolidate", "firstn", "get_program_parameter", "get_program_persistable_vars", "is_parameter", "is_persistable", "load",
    "load_constants", "load_inference_model", "load_params", "load_persistables", "load_program", "load_program_state", "load_text",
    "load_vars", "map_readers", "multiprocess_reader", "prune", "save", "save_inference_model", "save_params", "save_persistables",
    "save_text", "save_vars", "set_program_state", "shuffle", "xmap_readers",
]  # fmt: skip
__getattr__ = module_getattr("io", __all__)

_READS, _WRITES = "read files", "write files"
_LOAD_PARAMS = "fx.io.load_params(executor, dirname, program)"
_MODEL, _PARAMS = "__model__", "__params__" + SUFFIX


def _check(path: str, var: Var, dtype: str, shape: tuple[int, ...]) -> None:
    found = TensorType(dtype, shape)
    if not var.type.accepts(found):
        raise CheckpointError(f"{path}: variable {var.name!r} should be {var.type}, the file holds {found}")


def _inside(dirname: Any, filename: Any) -> str:
    """dirname/filename, where filename may not lead out of dirname."""
    if not isinstance(filename, str) or os.path.basename(filename) != filename or filename in ("", ".", "..") or "\0" in filename:
        raise CheckpointError(f"{filename!r} is not a file name; give it without a directory, and the directory as dirname: {dirname!r}")
    return os.path.join(path_of(dirname), filename)


def _file_of(name: str) -> str:
    """The file name for a variable, if each has its own file: its name, with slashes and similar characters escaped.

    >>> _file_of("fc_0.w_0"), _file_of("../w")
    ('fc_0.w_0', '%2E.%2Fw')
    """
    encoded = quote(name, safe="@+,=")
    if encoded.startswith(".") or encoded == MANIFEST:
        encoded = f"%{ord(encoded[0]):02X}{encoded[1:]}"
    return encoded if len(encoded) <= 200 else f"{encoded[:180]}~{zlib.crc32(name.encode()):08x}"


# -- a whole program ----------------------------------------------------------------------------------------------------------


def save(
    program: Program | None, model_path: Any, executor: Any = None, sharded: bool = False, extra: Mapping[str, Any] | None = None
) -> None:
    """Write the program, its large constants, all its persistable variables and its number of runs.

    The default is one file, `model_path` plus ".safetensors", with global values. With `sharded` it is the folder `model_path`, with a file
    of local values for each rank of a ParallelExecutor and a manifest; the same ranks continue from it bit for bit, with the strategy's own
    state. Ranks that are processes of one script must all call it, like all functions that save: each writes its own file of a folder, and
    rank 0 writes everything else. `extra` is JSON data, such as the position in the data set; `load` returns it. Raises NotInitializedError
    if a variable has no value yet, CheckpointError if nothing can be written; older files are then unchanged.
    """
    program = program_or_default(program)
    if sharded:
        save_shards(program, model_path, executor, extra)
        return
    values = {d.name: get(executor, d) for d in persistables(program)}
    if taken := [n for n in values if is_digest(n)]:
        raise CheckpointError(f"variable {taken[0]!r} cannot be saved under its name, which is that of a constant; rename it")
    from_first(executor, _WRITES, lambda: save_program(model_path, program, values, state_of(executor, program).step, extra))


def load(program: Program | None, model_path: Any, executor: Any = None, var_list: Sequence[Variable] | None = None) -> dict[str, Any]:
    """Read the values of the program's persistable variables (or of `var_list`) that `save` wrote; returns its `extra`.

    The number of runs, on which random numbers depend, continues from the saved one. Any number of ranks, or one device, may continue, with
    any strategy. Everything is checked before anything is set. Raises CheckpointError, which names the file and the variable, if one is
    missing, damaged, or has another shape or dtype.
    """
    program = program_or_default(program)
    if from_first(executor, _READS, lambda: _is_folder(path_of(model_path))):
        return load_shards(program, model_path, executor, None if var_list is None else [_record(program, v) for v in var_list])
    path = with_suffix(model_path)
    wanted = persistables(program) if var_list is None else [_record(program, v) for v in var_list]
    arrays, said = made_by_all(executor, _READS, lambda: _read_all(path, wanted, PARAMETERS_ONLY))
    put_all(executor, arrays)
    if said.get("format") != "fluidx":  # of another tool, whose metadata are its own
        return {}
    if var_list is None and "step" in said:
        state_of(executor, program).step = int(said["step"])
    return json.loads(said.get("extra", "{}"))


def _is_folder(path: str) -> bool:
    """Does a path mean the folder of a sharded checkpoint, not a file?"""
    if not os.path.isdir(path) or os.path.basename(path) in ("", ".", ".."):
        return os.path.isdir(path)
    if not os.path.isfile(file := with_suffix(path)):
        return True
    if is_checkpoint(path):
        raise CheckpointError(f"{file} is a checkpoint, and so is the folder {path}; load {file!r} or {os.path.join(path, '')!r}")
    return False


def load_program(model_path: Any) -> Program:
    """The program in a file that `save` wrote."""
    path = with_suffix(model_path)
    with ArrayFile(path) as file:
        if "program" not in file.metadata:
            raise CheckpointError(f"{path} holds variables but no program; it was not written by fluidx.io.save")
        return parsed(path, file.metadata["program"], constants_in(file))


def load_program_state(model_path: Any, var_list: Sequence[Variable] | None = None) -> dict[str, np.ndarray]:
    """The arrays of a file that `save` wrote, by name; those of `var_list` only, if given."""
    with ArrayFile(with_suffix(model_path)) as file:
        names = [n for n in file.names if not is_digest(n)] if var_list is None else [v.name for v in var_list]
        return {n: file.array(n) for n in names}


def set_program_state(program: Program, state_dict: Mapping[str, Any], executor: Any = None) -> None:
    """Set the program's persistable variables to the values in `state_dict`. Names that the program does not have are refused."""
    program = program_or_default(program)
    pairs = []
    for name, value in state_dict.items():
        var, array = program.global_block().desc(name), np.asarray(value)
        _check("state_dict", var, as_dtype(array.dtype), array.shape)
        pairs.append((name, array))
    put_all(executor, pairs)


def _record(program: Program, var: Any) -> Var:
    if not isinstance(var, (str, Variable)):
        raise wrong(f"expected a Variable or a name, got {type(var).__name__}: {var!r}")
    return program.global_block().desc(var if isinstance(var, str) else var.name)


_Arrays = list[tuple[str, np.ndarray]]


def _read_all(path: str, wanted: Sequence[Var], instead: str = "") -> tuple[_Arrays, dict[str, str]]:
    """The values of variables in a file, and its metadata. `instead` is the call that loads parameters only, if there is one."""
    with ArrayFile(path) as file:
        if instead:
            check_state(path, wanted, file.names, instead)
        for var in wanted:
            _check(path, var, *file.type_of(var.name))
        return [(var.name, file.array(var.name)) for var in wanted], file.metadata


# -- variables ------------------------------------------------------------------------------------------------------------------


def _chosen(main_program: Any, vars: Any, predicate: Callable[[Variable], bool] | None) -> list[Var]:
    program = program_or_default(main_program)
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

    Each variable has its own safetensors file, named after it, and a manifest lists the files that belong together. With `filename` all are
    in this one file. After a crash there are all old values or all new ones.
    """
    chosen = _chosen(main_program, vars, predicate)
    values = {var.name: get(executor, var) for var in chosen}

    def write() -> None:
        if filename is not None:
            save_arrays(_inside(dirname, filename), values)
        else:
            files = {_file_of(n): arrays_in(_file_of(n), {n: value}) for n, value in values.items()}
            write_together(path_of(dirname), files)

    from_first(executor, _WRITES, write)


def load_vars(
    executor: Any,
    dirname: Any,
    main_program: Program | None = None,
    vars: Iterable[Variable] | None = None,
    predicate: Callable[[Variable], bool] | None = None,
    filename: str | None = None,
) -> None:
    """Read back what save_vars wrote with the same arguments.

    A predicate may test for existing files, `lambda v: os.path.exists(os.path.join(dirname, v.name))`; UserWarning if it selects nothing.
    Raises CheckpointError, which names the file and the variable, if one is missing, damaged, or has another shape or dtype; then none is
    set.
    """
    chosen = _chosen(main_program, vars, predicate)
    if not chosen and predicate is not None and vars is None:
        warnings.warn(f"load_vars: the predicate picks no variable of {program_or_default(main_program).label()}", stacklevel=2)

    def read() -> _Arrays:
        if filename is not None:
            return _read_all(_inside(dirname, filename), chosen, _LOAD_PARAMS)[0]
        folder = path_of(dirname)
        with reading(folder) as manifest:
            if manifest is not None:
                files = {_file_of(var.name): var.name for var in chosen}
                check_state(folder, chosen, [files.get(name, unquote(name)) for name in manifest.files], _LOAD_PARAMS)
            return [a for var in chosen for a in _read_all(place_of(folder, _file_of(var.name), manifest), [var])[0]]

    put_all(executor, made_by_all(executor, _READS, read))


def is_parameter(var: Variable) -> bool:
    """Is a variable a parameter? A predicate for `save_vars` and `load_vars`."""
    return isinstance(var, Parameter)


def is_persistable(var: Variable) -> bool:
    """Does a variable keep its value between runs? A predicate for `save_vars` and `load_vars`."""
    return bool(var.persistable)


def get_program_parameter(program: Program) -> list[Variable]:
    """The parameters of a program.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
    ...     _ = fx.layers.fc(fx.data("x", [None, 2], "float32"), 3)
    >>> [p.name for p in get_program_parameter(main)]
    ['fc_0.w_0', 'fc_0.b_0']
    """
    return [v for v in program_or_default(program).list_vars() if is_parameter(v)]


def get_program_persistable_vars(program: Program) -> list[Variable]:
    """The persistable variables of a program: parameters, optimizer state, counters."""
    return [v for v in program_or_default(program).list_vars() if is_persistable(v)]


def save_params(executor: Any, dirname: Any, main_program: Program | None = None, filename: str | None = None) -> None:
    """save_vars of the parameters."""
    save_vars(executor, dirname, main_program, None, is_parameter, filename)


def save_persistables(executor: Any, dirname: Any, main_program: Program | None = None, filename: str | None = None) -> None:
    """save_vars of the persistable variables: parameters, optimizer state, counters."""
    save_vars(executor, dirname, main_program, None, None, filename)


def load_params(executor: Any, dirname: Any, main_program: Program | None = None, filename: str | None = None) -> None:
    """load_vars of the parameters."""
    load_vars(executor, dirname, main_program, None, is_parameter, filename)


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
        known = program.global_block().desc(name)
        if known.persistable and block.find(name) is None:  # no operator has to do with it
            block.declare(known)
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

    The program is text in `model_filename` ("__model__"), with a second file for its large constants, as for `save_text`; the variables are
    in `params_filename` ("__params__.safetensors"). `program_only` omits the variables; `export_for_deployment` has no effect.
    """
    feeds = [feeded_var_names] if isinstance(feeded_var_names, str) else list(feeded_var_names)
    targets = [target_vars] if isinstance(target_vars, Variable) else list(target_vars)
    for t in targets:
        if not isinstance(t, Variable):
            raise wrong(f"save_inference_model: target_vars must be Variables, got {type(t).__name__}: {t!r}")
    if not targets or not all(isinstance(f, str) for f in feeds):
        raise wrong("save_inference_model: give feeded_var_names as a list of names and at least one target Variable")
    model, params = _model_files(dirname, model_filename, params_filename)
    names = [t.name for t in targets]
    program = prune(program_or_default(main_program), feeds, names)
    values = {} if program_only else {d.name: get(executor, d) for d in persistables(program)}
    text = f"# fluidx inference model\n# feeds: {json.dumps(feeds)}\n# fetches: {json.dumps(names)}\n{program}\n"
    files: dict[str, Write] = {model: lambda stream: stream.write(text.encode())}
    if constants := {digest: a.values for digest, a in program.constants().items()}:
        files[model + CONSTANTS] = arrays_in(model, constants)
    if not program_only:
        files[params] = arrays_in(params, values)
    from_first(executor, _WRITES, lambda: write_together(path_of(dirname), files))
    return names


def load_inference_model(
    dirname: Any,
    executor: Any,
    model_filename: str | None = None,
    params_filename: str | None = None,
    pserver_endpoints: Any = None,
) -> list[Any]:
    """Load a model of save_inference_model: `[program, feed names, fetch Variables]`. The variables' values go into the scope.

    Raises CheckpointError if a file is missing or damaged, or was not saved together with the others.
    """
    files = _model_files(dirname, model_filename, params_filename)
    program, feeds, fetches, arrays = made_by_all(executor, _READS, lambda: _read_model(path_of(dirname), *files))
    put_all(executor, arrays)
    return [program, feeds, [program.global_block().var(n) for n in fetches]]


def _read_model(folder: str, model: str, params: str) -> tuple[Program, list[str], list[str], _Arrays]:
    with reading(folder) as manifest:
        model_path, params_path = place_of(folder, model, manifest), place_of(folder, params, manifest)
        constants = place_of(folder, model + CONSTANTS, manifest)
        text = read_text(model_path)
        feeds, fetches = _names_in(model_path, text)
        program = parsed(model_path, text, load_constants(constants) if os.path.exists(constants) else {})
        wanted = persistables(program)
        arrays = _read_all(params_path, wanted)[0] if wanted or os.path.exists(params_path) else []
    for name in (*feeds, *fetches):
        if program.global_block().find(name) is None:
            raise CheckpointError(f"{model_path}: its program has no variable {name!r}, which it lists as feed or fetch")
    return program, feeds, fetches, arrays


def _model_files(dirname: Any, model: str | None, params: str | None) -> tuple[str, str]:
    """The names of the files of a model and its variables. They must be inside the directory."""
    names = model or _MODEL, params or _PARAMS
    for name in names:
        _inside(dirname, name)
    return names


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
