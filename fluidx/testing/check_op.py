"""`check_op`: checks that every op must pass, run on the samples in its declaration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import native
from ..ir import ANY, Builder, Effect, OpDef, Program, ProgramError, Role, Sample, TensorType, opdef
from ..ir.dtypes import HALVES, np_dtype
from ..ops import kernels
from .numeric_grad import numeric_grad
from .reference import interpret, run_op, type_of
from .rows import check_rows

_FAR = 200.0  # exp(200) overflows in float32, not in float64


def check_op(op: str | type[OpDef]) -> None:
    """Check an op on each of its samples; AssertionError names the op, the sample, what was expected and what was found.

    For every sample:

    - the inferred types equal the types of the result, also with an open first axis;
    - the kernel does not change its inputs;
    - every body in the table of kernels gives the kernel's values, also when a result is written into an input as `inplace` allows;
    - for 16-bit floats, each body gives its float32 result, rounded;
    - the gradient that `fluidx.backward` writes agrees with central differences, through every output that does not raise "op NAME has a
      gradient through ... only";
    - where an input is 200 or -200, the gradient is finite if the central difference is;
    - the program text parses back to an equal program;
    - attributes that are not declared are refused.

    Every row of the access pattern is executed too (`fluidx.testing.rows`). Ops that need ranks or run sub-blocks get only the checks that
    one rank without sub-blocks allows.
    """
    definition = opdef(op) if isinstance(op, str) else op
    if not (definition.__doc__ or "").strip():
        raise AssertionError(f"op {definition.name} has no docstring")
    try:
        definition.complete_attrs({"no_such_attribute": 1})
    except ProgramError:
        pass
    else:
        raise AssertionError(f"op {definition.name} takes an attribute that it does not declare")
    samples = list(definition.samples())
    if not samples and not (definition.control.run_reference or definition.control.beyond_tensors):  # samples can only be arrays
        raise AssertionError(f"op {definition.name} has no samples")
    for k, sample in enumerate(samples):
        _Check(definition, k, sample).run()
    check_rows(definition)


class _Check:
    def __init__(self, definition: type[OpDef], number: int, sample: Sample):
        self.definition, self.number, self.sample = definition, number, sample
        self.attrs = definition.complete_attrs(sample.attrs)
        missing = len(definition.in_slots) - len(sample.args)
        self.args = [*sample.args, *[None] * missing]

    def fail(self, what: str, expected: Any, found: Any) -> None:
        types = ", ".join(repr(type_of(a)) for a in self.args)
        where = f"op {self.definition.name}, sample {self.number} ({types}, {dict(self.sample.attrs)})"
        raise AssertionError(f"{where}: {what}: expected {expected}, found {found}")

    def run(self) -> None:
        program, _, _ = self.build(self.args)
        self.check_text(program)
        if self.definition.effect in (Effect.COLLECTIVE, Effect.P2P):
            return
        before = _copy(self.args)
        result = run_op(self.definition, self.args, self.attrs)
        for slot, a, b in zip(self.definition.inputs, _flat(before), _flat(self.args), strict=False):
            if not _same(a, b):
                self.fail(f"the kernel changes its inputs ({slot})", a, b)
        self.check_types(result)
        self.check_bodies(result)
        self.check_inplace(result)
        self.check_halves()
        if self.definition.grad is not None and self.sample.grad != ():
            self.check_grad(result)
            self.check_far()

    # -- types --------------------------------------------------------------------------------------------------------------

    def infer(self, types: list[Any]) -> list[Any]:
        out = self.definition.infer(*types, **self.attrs)
        return [out] if len(self.definition.out_slots) == 1 else list(out)

    def check_types(self, result: list[Any]) -> None:
        types = [type_of(a) for a in self.args]
        for slot, want, got in zip(self.definition.outputs, self.infer(types), result, strict=True):
            for w, g in zip(_flat([want]), _flat([got]), strict=True):
                if w != type_of(g) and not (self.definition.control.sized_by_values and w.accepts(type_of(g))):
                    self.fail(f"the type of output {slot}", w, type_of(g))
        first = next((t for t in _flat(types) if t.ndim), None)
        if first is None or first.shape[0] == 1:  # size 1 is a scalar such as a learning rate, and cannot be open
            return
        open_ = [_opened(t, first.shape[0]) for t in types]
        try:
            inferred = self.infer(open_)
        except ProgramError as e:
            if "open" not in str(e):  # an op may need the size; its message then names the open axis
                self.fail(f"infer with an open first axis ({open_})", "a type, or an error that names the open axis", f"ProgramError: {e}")
            return
        for slot, want, got in zip(self.definition.outputs, inferred, result, strict=True):
            for w, g in zip(_flat([want]), _flat([got]), strict=True):
                if not w.accepts(type_of(g)):
                    self.fail(f"the type of output {slot} with an open first axis ({open_})", f"one that accepts {type_of(g)}", w)

    # -- the other ways to run ------------------------------------------------------------------------------------------------

    def check_bodies(self, result: list[Any]) -> None:
        for body in self.bodies():
            if body == "any":
                continue
            found = run_op(self.definition, self.args, self.attrs, body=body)
            for slot, a, b in zip(self.definition.outputs, result, found, strict=True):
                for x, y in zip(_flat([a]), _flat([b]), strict=True):
                    if not _close(x, y):
                        self.fail(f"output {slot} of the body {body!r} (against the kernel)", x, y)

    def bodies(self) -> list[str]:
        """The names of the op's bodies that can run on this machine."""
        return [b.name for b in kernels.bodies(self.definition, natively=not native.why_not())]

    def check_inplace(self, result: list[Any]) -> None:
        d = self.definition
        slots = [s.name for s in d.in_slots]
        outs = [s.name for s in d.out_slots]
        for source, target in d.storage.inplace:
            for body in self.bodies():
                args = _copy(self.args)
                given, k = args[slots.index(source)], outs.index(target)
                given = given[0] if isinstance(given, list) and given else given
                if not isinstance(given, np.ndarray) or isinstance(result[k], list) or type_of(given) != type_of(result[k]):
                    continue
                memory = [given if j == k else _like(r) for j, r in enumerate(result)]
                if not d.takes_out and body == "any":
                    continue
                got = run_op(d, args, self.attrs, body=body, outs=memory)
                for slot, a, b in zip(outs, _flat(result), _flat(got), strict=False):
                    if not _close(a, b):
                        self.fail(f"output {slot} with {target} in the memory of {source} (body {body!r})", a, b)

    def check_halves(self) -> None:
        for dtype in HALVES:
            narrow = _cast(self.args, "float32", dtype)
            try:
                self.infer([type_of(a) for a in narrow])
            except ProgramError:  # the op does not take them
                continue
            for body in self.bodies() if any(a is not b for a, b in zip(_flat(narrow), _flat(self.args), strict=True)) else ():
                found, wide = (run_op(self.definition, args, self.attrs, body=body) for args in (narrow, _cast(narrow, dtype, "float32")))
                for slot, a, b in zip(self.definition.outputs, found, wide, strict=True):
                    for x, y in zip(_flat([a]), _flat([b]), strict=True):
                        want = y.astype(x.dtype) if x.dtype == np_dtype(dtype) else y
                        if not np.array_equal(x, want, equal_nan=type_of(want).is_float):
                            self.fail(f"output {slot} of {dtype} (body {body!r})", want, x)

    # -- gradient -------------------------------------------------------------------------------------------------------------

    def build(self, args: list[Any]) -> tuple[Program, list[Any], list[Any]]:
        """Build a program of this operator: (program, input variables, output variables), both by slot."""
        program = Program("sample")
        block = program.global_block()
        variables: list[Any] = []
        for slot, a in zip(self.definition.in_slots, args, strict=True):
            made = [block.create_var(f"{slot.name.lower()}{k}", v.shape, v.dtype.name, is_data=True) for k, v in enumerate(_flat([a]))]
            variables.append(made if slot.many else made[0] if made else None)
        types = self.infer([type_of(a) for a in args])
        n_out = next((len(t) for s, t in zip(self.definition.out_slots, types, strict=True) if s.many), 0)
        outs = Builder(block).emit(self.definition.name, *variables, n_out=n_out, **self.sample.attrs)
        return program, variables, [outs] if len(self.definition.out_slots) == 1 else list(outs)

    def grad_inputs(self) -> Iterator[tuple[int, int, str]]:
        """(slot number, position in the slot's list, name) of each float input to differentiate by."""
        for i, (slot, a) in enumerate(zip(self.definition.in_slots, self.args, strict=True)):
            if self.sample.grad is None or slot.name in self.sample.grad:
                for k, v in enumerate(_flat([a])):
                    if type_of(v).is_float:
                        yield i, k, f"{slot.name}[{k}]" if slot.many else slot.name

    def check_grad(self, result: list[Any]) -> None:
        sources = list(self.grad_inputs())
        if not sources:
            return
        checked = 0
        for which, member, y in _floats(result):
            weights = np.random.default_rng(which + 10 * member).uniform(0.5, 1.5, y.shape).astype(y.dtype)
            found = self.gradients(self.args, sources, which, member, weights)
            if found is None:
                continue
            checked += 1
            for (i, k, name), g in zip(sources, found, strict=True):
                self.compare(i, k, f"{name} through {self.definition.outputs[which]}", g, which, member, weights)
        if not checked:
            self.fail("the gradient", "one through at least one output", "none")

    def gradients(self, args: list[Any], sources: list[tuple[int, int, str]], which: int, member: int, weights: np.ndarray) -> Any:
        """The gradient of sum(output * weights) by each input in `sources`; None for an input that the output does not depend on.

        Returns None if the op has no gradient through that output.
        """
        from ..backward import gradients

        program, ins, outs = self.build(args)
        w = program.global_block().create_var("weights", weights.shape, weights.dtype.name, is_data=True)
        variables = [_flat([ins[i]])[k] for i, k, _ in sources]
        with program.role_guard(Role.BACKWARD):
            try:
                grads = gradients([_flat([outs[which]])[member]], variables, [w])
            except ProgramError as e:
                if not str(e).startswith(f"op {self.definition.name} has a gradient through"):
                    self.fail(f"the gradient through {self.definition.outputs[which]}", "one", f"ProgramError: {e}")
                return None
        feed = {v.name: a for v, a in zip(_flat(ins), _flat(args), strict=True)}
        env = interpret(program, {"weights": weights, **feed})
        return [None if g is None else env[g.name] for g in grads]

    def check_far(self) -> None:
        """The gradient must be finite where an input is 200 or -200: exp overflows there, and infinity times 0 is NaN."""
        for i, k, name in self.grad_inputs():
            for far in ([_FAR], [-_FAR], [_FAR, -_FAR]):
                args = _copy(self.args)
                x = args[i][k] if isinstance(args[i], list) else args[i]
                x[...] = np.resize(far, x.shape)
                for which, member, y in _floats(run_op(self.definition, args, self.attrs)):
                    ones = np.ones(y.shape, y.dtype)
                    found = self.gradients(args, [(i, k, name)], which, member, ones)
                    if found is None or found[0] is None:
                        continue
                    for index in np.argwhere(~np.isfinite(found[0].astype("float64")))[:8]:
                        want = self.slope(args, i, k, which, member, tuple(index)).astype(x.dtype)
                        if np.isfinite(want):
                            at = f"the gradient of {name} through {self.definition.outputs[which]} where {name} is {far}"
                            self.fail(f"{at} (choose with where, do not multiply by 0)", want, found[0][tuple(index)])

    def slope(self, given: list[Any], i: int, k: int, which: int, member: int, index: tuple[int, ...]) -> np.float64:
        """The derivative of sum(output) by one element, by central difference.

        Elements are subtracted before they are summed, because some may be huge.
        """
        args, eps = self.widened(given)
        x = args[i][k] if isinstance(args[i], list) else args[i]
        made, middle, step = [], x[index], eps * abs(x[index])
        for x[index] in (middle + step, middle - step):
            made.append(np.asarray(_flat([run_op(self.definition, args, self.attrs)[which]])[member], np.float64))
        with np.errstate(all="ignore"):
            return (made[0] - made[1]).sum() / (2 * step)

    def compare(self, i: int, k: int, name: str, grad: Any, which: int, member: int, weights: np.ndarray) -> None:
        want = self.differences(self.args, i, k, which, member, weights)
        found = np.zeros(want.shape) if grad is None else np.asarray(grad, np.float64)
        if found.shape != want.shape:
            self.fail(f"the shape of the gradient of {name}", want.shape, found.shape)
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        error = np.abs(want - found).max(initial=0)
        if not error <= self.sample.tolerance * scale:
            self.fail(f"the gradient of {name} (by central differences, off by {error:.3g})", want, found)

    def differences(self, given: list[Any], i: int, k: int, which: int, member: int, weights: np.ndarray) -> np.ndarray:
        """The gradient by central differences."""
        args, eps = self.widened(given)
        x = args[i][k] if isinstance(args[i], list) else args[i]

        def value(_: np.ndarray) -> float:
            y = _flat([run_op(self.definition, args, self.attrs)[which]])[member]
            return float((np.asarray(y, np.float64) * weights).sum())

        return numeric_grad(value, x, eps)

    def widened(self, given: list[Any]) -> tuple[list[Any], float]:
        """(arguments with floats as float64, a small step); (the arguments, a coarse step) if the op takes no float64."""

        def widen(a: Any) -> Any:
            return a.astype("float64") if type_of(a).is_float else a.copy()

        args = [[widen(v) for v in a] if isinstance(a, list) else None if a is None else widen(a) for a in given]
        try:
            run_op(self.definition, args, self.attrs)
            return args, 1e-5
        except ProgramError:
            return _copy(given), 1e-2

    # -- text -----------------------------------------------------------------------------------------------------------------

    def check_text(self, program: Program) -> None:
        text = str(program)
        again = Program.parse_from_string(text, program.constants())
        if again != program:
            self.fail("the program text read back", text, str(again))


def _floats(result: list[Any]) -> Iterator[tuple[int, int, np.ndarray]]:
    """(number of the output slot, position in the slot's list, array) of each float result."""
    for which, value in enumerate(result):
        for member, y in enumerate(_flat([value])):
            if type_of(y).is_float:
                yield which, member, y


def _flat(items: list[Any]) -> list[Any]:
    return [v for a in items if a is not None for v in (a if isinstance(a, list | tuple) else [a]) if v is not None]


def _copy(args: list[Any]) -> list[Any]:
    return [[v.copy() for v in a] if isinstance(a, list) else None if a is None else a.copy() for a in args]


def _cast(args: list[Any], source: str, to: str) -> list[Any]:
    """The arguments, with arrays of dtype `source` converted to dtype `to`."""
    return [
        _cast(a, source, to) if isinstance(a, list) else a if a is None or a.dtype != np_dtype(source) else a.astype(np_dtype(to))
        for a in args
    ]


def _like(value: Any) -> Any:
    return None if value is None else [np.empty_like(v) for v in value] if isinstance(value, list) else np.empty_like(value)


def _opened(t: Any, size: int) -> Any:
    if isinstance(t, list):
        return [_opened(v, size) for v in t]
    return t if t is None or not t.ndim or t.shape[0] != size else TensorType(t.dtype, (ANY, *t.shape[1:]))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not type_of(a).is_float:
        return bool((a == b).all())
    # sums may be computed in another order
    rough = 1e-2 if a.dtype.itemsize == 2 else 1e-5
    return bool(np.allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rough, rough, equal_nan=True))
