"""Control flow layers (loops and branches whose bodies are blocks of the same program), and printing of values at run time.

The body is written by running its Python code once: `While.block()` and the functions given to `cond`, `while_loop`, `case` and
`switch_case` append their operators to a new block. Assignments to variables of the enclosing block (`assign(..., output=v)`, `increment`,
comparisons with `cond=`) stay after the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .._checks import one_of, whole, wrong
from ..ir import OPS, Block, BlockRef, Operator, Program, Role, TensorType, Variable
from ..ir.flow import sub_reads, sub_writes
from ..ir.sizes import StandInShapes
from ..ir.types import ANY, common_size
from ..ir.valuetypes import common_type
from .compare import equal, logical_and, logical_not
from .creation import fill_constant
from .helper import LayerWriter
from .tensor import assign

# -- loops ---------------------------------------------------------------------------------------------------------------


def _condition(helper: LayerWriter, value: Any, what: str) -> Variable:
    """`value`, after a check that it is one bool."""
    v = helper.variable(value, what)
    if v.dtype != "bool" or v.desc.type.numel != 1:
        raise wrong(f"{helper.label}: {what} must be a bool variable of one element; variable {v.name!r} is {v.desc.type}")
    return v


class While:
    """A loop that runs its block while `cond`, a bool variable of one element, is true.

    The block must update `cond` (`layers.less_than(i, n, cond=cond)`). `is_test` has no effect. `max_rounds` limits the number of rounds,
    and so the memory of the gradient; 0 means no limit.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
    ...     i, n = fx.layers.fill_constant([1], "int64", 0), fx.layers.fill_constant([1], "int64", 10)
    ...     loop = fx.layers.While(fx.layers.less_than(i, n))
    ...     with loop.block():
    ...         i = fx.layers.increment(i)
    ...         more = fx.layers.less_than(i, n, cond=loop.cond_var)
    >>> main.num_blocks, main.ops[-1].type, main.ops[-1].output("Out")
    (2, 'while', ('fill_constant_0.tmp_0', 'less_than_0.tmp_0'))
    """

    def __init__(self, cond: Variable, is_test: bool = False, name: str | None = None, max_rounds: int = 0):
        self.helper = LayerWriter("While", name)
        self.max_rounds = whole(self.helper.label, "max_rounds", max_rounds, 0)
        self.cond_var = _condition(self.helper, cond, "cond")

    @contextmanager
    def block(self) -> Iterator[Block]:
        """Operators written inside are the body. Raises ProgramError if they never write the condition."""
        outer = self.helper.main.current_block()
        with self.helper.main.sub_block() as body:
            yield body
        reads, writes = sub_reads(self.helper.main, body), sub_writes(self.helper.main, body)
        if self.cond_var.name not in writes:
            raise wrong(
                f"{self.helper.label}: the body never writes the condition {self.cond_var.name!r}, so the loop would not end; "
                "give it as cond= to a comparison in the body"
            )
        # a loop may run zero times, so variables that it writes are also inputs
        xs = list(dict.fromkeys([*writes, *reads]))
        attrs = {"sub_block": BlockRef(body.idx), "max_rounds": self.max_rounds}
        outer.append_op("while", {"Condition": self.cond_var, "X": xs}, {"Out": writes}, attrs)
        _note_sizes(outer, body, writes)
        _carry_gradients(self.helper.main, outer, body, writes)


def _note_sizes(outer: Block, body: Block, writes: Sequence[str]) -> None:
    """Mark variables whose open sizes a round changes, so that these sizes equal no others."""
    open_ones = [n for n in writes if isinstance(t := outer.desc(n).type, TensorType) and ANY in t.shape]
    for n in StandInShapes(outer).changed(open_ones, body) if open_ones else ():
        outer.var(n).is_resized = True


def _carry_gradients(program: Program, outer: Block, body: Block, writes: Sequence[str]) -> None:
    """A variable that starts as a constant but is updated with a gradient in the loop is no longer a constant, and neither are values that
    the body computed from it before this was known.

    If stop_gradient is set although an input has a gradient, the user set it, and it stays. Parameters that are not trained, such as
    running statistics, also keep it.
    """
    ops, cut = list(_all_ops(program, body)), set[str]()

    def follows(block: Block, op: Operator) -> bool:
        return not OPS[op.type].rewrite.constant and any(not block.desc(n).stop_gradient for n in op.input_arg_names)

    inside = {n for block, _ in ops for n in block.descs}
    for block, op in [*((outer, op) for op in outer.oplist[:-1]), *ops]:
        if follows(block, op):
            cut.update(n for n in op.output_arg_names if block.desc(n).stop_gradient and (block is outer or n in inside))
    again = True
    while again:
        again = False
        for block, op in ops:
            for n in op.output_arg_names if follows(block, op) else ():
                desc = block.desc(n)
                carried = desc.type.is_float and not desc.is_parameter and (n in inside or n in writes)
                if desc.stop_gradient and carried and n not in cut:
                    block.var(n).stop_gradient, again = False, True


def _all_ops(program: Program, block: Block) -> Iterator[tuple[Block, Operator]]:
    """The operators of a block and of its sub-blocks, each with its block."""
    for op in block.oplist:
        for idx in op.sub_blocks():
            yield from _all_ops(program, program.blocks[idx])
        yield block, op


def while_loop(
    cond: Callable[..., Variable],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    is_test: bool = False,
    name: str | None = None,
    max_rounds: int = 0,
) -> list[Any]:
    """Run `loop_vars = body(*loop_vars)` while `cond(*loop_vars)` holds, and return the last values.

    `loop_vars` is a list of Variables, or of lists of them. `body` returns the same structure with the same shapes and dtypes; an open size
    may change from round to round, and such a variable has no gradient. The given variables are copied first and keep their values.
    `is_test` has no effect. `max_rounds` limits the number of rounds; 0 means no limit. The gradient stores values of each round: with a
    limit the memory is allocated at the start, without one it grows with the rounds of a run.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     i, total = (fx.layers.fill_constant([1], "float32", v) for v in (0, 0))
    ...     i, total = fx.layers.while_loop(lambda i, t: i < 10.0, lambda i, t: [i + 1.0, t + i], [i, total])
    >>> total
    <Variable assign_1.tmp_0: f32[1]>
    """
    helper = LayerWriter("while_loop", name)
    for what, fn in (("cond", cond), ("body", body)):
        if not callable(fn):
            raise wrong(f"{helper.label}: {what} must be a function, got {type(fn).__name__}")
    if not isinstance(loop_vars, (list, tuple)) or not loop_vars:
        raise wrong(f"{helper.label}: loop_vars must be a list of at least one Variable, got {loop_vars!r}")
    state = _map(lambda v: assign(helper.variable(v, "loop_vars")), list(loop_vars))
    flat = _flatten(state)
    go = _condition(helper, cond(*state), "the result of cond")
    if any(go.name == v.name for v in flat):
        go = assign(go)
    with While(go, max_rounds=max_rounds).block():
        new = body(*state)
        # the body may return a single loop variable without a list
        if _shape_of(state) not in (_shape_of(new), _shape_of([new])):
            raise wrong(f"{helper.label}: body must return {_show(state)} like loop_vars, it returned {_show(new)}")
        values = [helper.variable(v, "a result of body") for v in _flatten(new)]
        names = {v.name for v in flat}
        # a result that is a loop variable is copied before any of them is overwritten
        values = [assign(v) if v.name in names and v.name != target.name else v for v, target in zip(values, flat)]
        for v, target in zip(values, flat):
            if v.name != target.name:
                _same_type(helper, v, target)
                assign(v, output=target)
        assign(_condition(helper, cond(*state), "the result of cond"), output=go)
    return state


def _same_type(helper: LayerWriter, v: Variable, target: Variable) -> None:
    if not target.desc.type.accepts(v.desc.type):
        raise wrong(f"{helper.label}: body returned {v.desc.type} for a loop variable that is {target.desc.type}; its type must not change")


# -- nested lists of variables ------------------------------------------------------------------------------------------------


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flatten(item)]
    return [value]


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_map(fn, item) for item in value]
    return fn(value)


def _shape_of(value: Any) -> Any:
    return [_shape_of(item) for item in value] if isinstance(value, (list, tuple)) else None


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    n = len(_flatten(value))
    return f"{n} variable{'s' if n != 1 else ''}{' in a nested list' if isinstance(value, (list, tuple)) and len(value) != n else ''}"


# -- branches -----------------------------------------------------------------------------------------------------------------


def cond(
    pred: Variable, true_fn: Callable[[], Any] | None = None, false_fn: Callable[[], Any] | None = None, name: str | None = None
) -> Any:
    """The result of `true_fn()` if `pred`, a bool variable of one element, is true when the program runs, else of `false_fn()`.

    Both functions return the same structure: a Variable, a list of them (may be nested), or None. Corresponding variables have equal
    dtypes, and equal shapes except for open axes. Only the chosen branch runs.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     x = fx.data("x", [1], "float32")
    ...     fx.layers.cond(x > 0.0, lambda: x * 2.0, lambda: -x)
    <Variable cond_0.tmp_0: f32[1]>
    """
    helper = LayerWriter("cond", name)
    pred = _condition(helper, pred, "pred")
    results, blocks = [], []
    for what, fn in (("true_fn", true_fn), ("false_fn", false_fn)):
        if fn is not None and not callable(fn):
            raise wrong(f"{helper.label}: {what} must be a function, got {type(fn).__name__}")
        with helper.main.sub_block() as block:
            result = None if fn is None else fn()
            flat = [] if result is None else [helper.variable(v, f"a result of {what}") for v in _flatten(result)]
        results.append((result, flat))
        blocks.append(block)
    (yes, yes_flat), (no, no_flat) = results
    if (yes is None) != (no is None) or _shape_of(yes) != _shape_of(no):
        raise wrong(f"{helper.label}: both functions must return the same structure; true_fn gives {_show(yes)}, false_fn {_show(no)}")
    # a branch may write variables of the enclosing block: these are outputs too, and the other branch leaves them unchanged
    written = list(dict.fromkeys(n for b in blocks for n in sub_writes(helper.main, b)))
    outs = [_branch_output(helper, a, b, i) for i, (a, b) in enumerate(zip(yes_flat, no_flat))]
    reads = [n for b in blocks for n in sub_reads(helper.main, b)]
    passed = [v.name for block, flat in zip(blocks, (yes_flat, no_flat)) for v in flat if v.name not in block.descs]
    helper.block.append_op(
        "cond",
        {"Cond": pred, "X": list(dict.fromkeys([*reads, *passed, *written]))},
        {"Out": [*(v.name for v in outs), *written]},
        {
            "true_block": BlockRef(blocks[0].idx),
            "false_block": BlockRef(blocks[1].idx),
            "true_out": [*(v.name for v in yes_flat), *written],
            "false_out": [*(v.name for v in no_flat), *written],
        },
    )
    if yes is None:
        return None
    handles = iter(outs)
    return _map(lambda _: next(handles), yes)


def _branch_output(helper: LayerWriter, yes: Variable, no: Variable, i: int) -> Variable:
    a, b = yes.desc.type, no.desc.type
    if not a.accepts(b):
        raise wrong(f"{helper.label}: result {i} is {a} in true_fn and {b} in false_fn; give both one type")
    ranked = isinstance(a, TensorType) and isinstance(b, TensorType)
    merged = TensorType(a.dtype, tuple(map(common_size, a.shape, b.shape))) if ranked else common_type(a, b)
    return helper.block.create_var(helper.fresh(), type=merged, stop_gradient=yes.stop_gradient and no.stop_gradient)


def case(
    pred_fn_pairs: Sequence[tuple[Variable, Callable[[], Any]]], default: Callable[[], Any] | None = None, name: str | None = None
) -> Any:
    """The result of the function of the first pair whose predicate is true, else of `default` (by default the last pair's function)."""
    helper = LayerWriter("case", name)
    if not isinstance(pred_fn_pairs, (list, tuple)) or not pred_fn_pairs:
        raise wrong(f"{helper.label}: pred_fn_pairs must be a list of (predicate, function) pairs, got {pred_fn_pairs!r}")
    for i, pair in enumerate(pred_fn_pairs):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not callable(pair[1]):
            raise wrong(f"{helper.label}: pred_fn_pairs[{i}] must be a (predicate, function) pair, got {pair!r}")
        _condition(helper, pair[0], f"the predicate of pred_fn_pairs[{i}]")
    if default is not None and not callable(default):
        raise wrong(f"{helper.label}: default must be a function, got {type(default).__name__}")
    pairs = list(pred_fn_pairs)
    if default is None:
        default = pairs.pop()[1]
    return _chain(pairs, default)


def _chain(pairs: list[tuple[Variable, Callable[[], Any]]], default: Callable[[], Any]) -> Any:
    if not pairs:
        return default()
    (pred, fn), *rest = pairs
    return cond(pred, fn, default if not rest else lambda: _chain(rest, default))


def switch_case(
    branch_index: Variable,
    branch_fns: Mapping[int, Callable[[], Any]] | Sequence[Any],
    default: Callable[[], Any] | None = None,
    name: str | None = None,
) -> Any:
    """The result of the function with index `branch_index`, an integer variable of one element.

    `branch_fns` is a dict from index to function, a list of (index, function) pairs, or a list of functions. Another index selects
    `default`, which is by default the function with the largest index.
    """
    helper = LayerWriter("switch_case", name)
    index = helper.variable(branch_index, "branch_index")
    if index.dtype not in ("int32", "int64", "uint8") or index.desc.type.numel != 1:
        raise wrong(f"{helper.label}: branch_index must be an integer of one element; variable {index.name!r} is {index.desc.type}")
    items = list(branch_fns.items()) if isinstance(branch_fns, Mapping) else list(branch_fns or ())
    items = [(i, item) if callable(item) else item for i, item in enumerate(items)]
    if not items:
        raise wrong(f"{helper.label}: branch_fns is empty")
    fns: dict[int, Callable[[], Any]] = {}
    for item in items:
        if not isinstance(item, (list, tuple)) or len(item) != 2 or not callable(item[1]):
            raise wrong(f"{helper.label}: branch_fns must hold functions or (index, function) pairs, got {item!r}")
        key = whole(helper.label, "an index in branch_fns", item[0])
        if key in fns:
            raise wrong(f"{helper.label}: index {key} has two functions")
        fns[key] = item[1]
    ordered = sorted(fns.items())
    if default is None:
        default = ordered.pop()[1]
    elif not callable(default):
        raise wrong(f"{helper.label}: default must be a function, got {type(default).__name__}")
    pairs = [(equal(index, fill_constant([1], index.dtype, key)), fn) for key, fn in ordered]
    return _chain(pairs, default)


@contextmanager
def when(chosen: Variable, outer: Block, role: Role | None = None) -> Iterator[Block]:
    """Operators written inside run if `chosen`, a bool of the block `outer`, is true. Their writes to outer variables stay."""
    program = outer.program
    with program.sub_block(outer.idx) as block:
        yield block
    with program.sub_block(outer.idx) as nothing:
        pass
    reads, writes = sub_reads(program, block), sub_writes(program, block)
    outer.append_op(
        "cond",
        {"Cond": chosen, "X": list(dict.fromkeys([*reads, *writes]))},
        {"Out": writes},
        {"true_block": BlockRef(block.idx), "false_block": BlockRef(nothing.idx), "true_out": writes, "false_out": writes},
        role=role,
    )


class Switch:
    """fluid's statement form of `case`, for branches that write existing variables.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     step, rate = fx.data("step", [1], "float32"), fx.layers.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
    ...     with fx.layers.Switch() as switch:
    ...         with switch.case(step < 100.0):
    ...             rate = fx.layers.assign(fx.layers.fill_constant([1], "float32", 0.1), output=rate)
    ...         with switch.default():
    ...             rate = fx.layers.assign(fx.layers.fill_constant([1], "float32", 0.01), output=rate)
    >>> [op.type for op in main.ops][-3:]
    ['logical_not', 'cond', 'cond']
    """

    def __init__(self, name: str | None = None):
        self.helper = LayerWriter("switch", name)
        self._open: Variable | None = None  # true if no earlier case was chosen
        self._inside = self._closed = False

    def __enter__(self) -> Switch:
        self._inside = True
        return self

    def __exit__(self, *exc: Any) -> None:
        self._inside = False

    @contextmanager
    def case(self, condition: Variable) -> Iterator[Block]:
        """Operators written inside run when `condition` holds and no earlier case did."""
        self._check()
        condition = _condition(self.helper, condition, "condition")
        chosen = condition if self._open is None else logical_and(self._open, condition)
        # computed before the branch, which may write inputs of the condition
        others = logical_not(chosen) if self._open is None else logical_and(self._open, logical_not(condition))
        with when(chosen, self.helper.main.current_block()) as block:
            yield block
        self._open = others

    @contextmanager
    def default(self) -> Iterator[Block]:
        """Operators written inside run when no case held."""
        self._check()
        if self._open is None:
            raise wrong(f"{self.helper.label}: default() needs a case() before it")
        with when(self._open, self.helper.main.current_block()) as block:
            yield block
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise wrong(f"{self.helper.label}: nothing may follow default()")
        if not self._inside:
            raise wrong(f"{self.helper.label}: use it as `with Switch() as switch:`")


# -- printing ---------------------------------------------------------------------------------------------------------------------


def Print(
    input: Variable,
    first_n: int = -1,
    message: str | None = None,
    summarize: int = 20,
    print_tensor_name: bool = True,
    print_tensor_type: bool = True,
    print_tensor_shape: bool = True,
    print_tensor_lod: bool = True,
    print_phase: str = "both",
) -> Variable:
    """input itself. `summarize` of its values are printed when the program runs, at most `first_n` times (-1: always).

    Gradients cannot be printed: print_phase="backward" raises ProgramError. `print_tensor_lod` has no effect.
    """
    helper = LayerWriter("print")
    x = helper.variable(input, "input")
    if one_of(helper.label, "print_phase", str(print_phase).lower(), ("forward", "backward", "both")) == "backward":
        raise wrong(f"{helper.label}: gradients are not printed; fetch {x.name}@GRAD instead")
    return helper.op(
        "print",
        x,
        first_n=whole(helper.label, "first_n", first_n),
        message=message or "",
        tensor_name=x.name,
        summarize=whole(helper.label, "summarize", summarize),
        print_tensor_name=bool(print_tensor_name),
        print_tensor_type=bool(print_tensor_type),
        print_tensor_shape=bool(print_tensor_shape),
    )


__all__ = ["Print", "Switch", "While", "case", "cond", "switch_case", "while_loop"]
