"""`StaticRNN`: a recurrent network whose step is written once and copied for each time step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .._checks import number, whole, wrong
from ..ir import Block, Variable
from ..ir.sub_blocks import copy_body
from .helper import LayerWriter


class StaticRNN:
    """A recurrent network over inputs [steps, batch, ...]. The operators written under `step()` are one step.

    The steps are unrolled, so their number must be known. All steps share the parameters of the step.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     x = fx.data("x", [5, None, 3], "float32")
    ...     rnn = fx.layers.StaticRNN()
    ...     with rnn.step():
    ...         now, before = rnn.step_input(x), rnn.memory(shape=[-1, 4], batch_ref=x)
    ...         hidden = fx.layers.fc([now, before], 4, act="tanh")
    ...         rnn.update_memory(before, hidden)
    ...         rnn.step_output(hidden)
    ...     rnn().shape
    (5, -1, 4)
    """

    def __init__(self, name: str | None = None):
        self.helper = LayerWriter("static_rnn", name, label="layers.StaticRNN")
        self._body: Block | None = None
        self._inputs: dict[str, Variable] = {}  # name in a step -> the value of all steps
        self._memories: dict[str, Variable] = {}  # name in a step -> the value before the first step
        self._updates: dict[str, Variable] = {}
        self._outputs: list[Variable] = []
        self._results: list[Variable] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Operators written inside are one step."""
        if self._body is not None:
            raise wrong(f"{self.helper.label}: step() was written before; make another StaticRNN")
        outer = self.helper.main.current_block()
        with self.helper.main.sub_block() as body:
            self._body = body
            yield
        self._unroll(outer, body)

    def step_input(self, x: Variable) -> Variable:
        """x at the step: of [steps, batch, ...] the slice [batch, ...]."""
        body, x = self._inside("step_input"), self.helper.variable(x, "x")
        if x.ndim < 1:
            raise wrong(f"{self.helper.label}: step_input takes [steps, ...]; variable {x.name!r} has no axes")
        steps = self.helper.known(x, "x, the number of steps,", 0)
        if self._inputs and (first := next(iter(self._inputs.values()))).shape[0] != steps:
            raise wrong(f"{self.helper.label}: {first.name!r} has {first.shape[0]} steps, {x.name!r} has {steps}; they must be equal")
        name = self.helper.fresh("step_input")
        self._inputs[name] = x
        return body.create_var(name, x.shape[1:], x.dtype, stop_gradient=x.stop_gradient)

    def memory(
        self,
        init: Variable | None = None,
        shape: Sequence[int] | None = None,
        batch_ref: Variable | None = None,
        init_value: float = 0.0,
        init_batch_dim_idx: int = 0,
        ref_batch_dim_idx: int = 1,
    ) -> Variable:
        """A value carried from the previous step; `init` in the first step.

        Without `init`, it is `shape` filled with `init_value`, and axis `init_batch_dim_idx` has the size of axis `ref_batch_dim_idx` of
        `batch_ref` [steps, batch, ...]. A result of step_input stands for the whole input.
        """
        body = self._inside("memory")
        if init is None:
            if shape is None or batch_ref is None:
                raise wrong(f"{self.helper.label}: memory needs init, or shape and batch_ref")
            init = self._filled(shape, batch_ref, init_value, init_batch_dim_idx, ref_batch_dim_idx)
        init = self.helper.variable(init, "init")
        if init.block is body:
            raise wrong(f"{self.helper.label}: init must come from outside of the step; {init.name!r} is computed in it")
        name = self.helper.fresh("memory")
        self._memories[name] = init
        return body.create_var(name, init.shape, init.dtype, stop_gradient=False)

    def _filled(self, shape: Sequence[int], batch_ref: Variable, value: float, at: int, ref_at: int) -> Variable:
        label, outer = self.helper.label, self._body and self._body.parent
        assert outer is not None
        ref = self._inputs.get(batch_ref.name, batch_ref)
        if ref.block is self._body:
            raise wrong(f"{label}: batch_ref must come from step_input or from outside of the step; {ref.name!r} is computed in it")
        sizes = tuple(whole(label, "a size in shape", d) for d in shape)
        # an outer variable with fewer axes has the batch as its first axis
        ref_at = whole(label, "ref_batch_dim_idx", ref_at, 0)
        outer.append_op(
            "fill_constant_batch_size_like",
            {"Input": ref},
            {"Out": (name := self.helper.fresh("init"))},
            {"shape": sizes, "dtype": "float32" if not ref.desc.type.is_float else ref.dtype, "value": number(label, "init_value", value),
             "input_dim_idx": ref_at, "output_dim_idx": whole(label, "init_batch_dim_idx", at, 0)},
        )  # fmt: skip
        return outer.var(name)

    def update_memory(self, mem: Variable, var: Variable) -> None:
        """Give `var`, computed in the step, to the next step as `mem`."""
        self._inside("update_memory")
        if not isinstance(mem, Variable) or mem.name not in self._memories:
            raise wrong(f"{self.helper.label}: update_memory takes a result of memory(), got {mem!r:.80}")
        var = self.helper.variable(var, "var")
        if not mem.desc.type.accepts(var.desc.type):
            raise wrong(f"{self.helper.label}: memory {mem.name!r} is {mem.desc.type}, its update {var.name!r} is {var.desc.type}")
        self._updates[mem.name] = var

    def step_output(self, o: Variable) -> None:
        """Collect `o` of every step: the network returns it as [steps, ...]."""
        self._inside("step_output")
        self._outputs.append(self.helper.variable(o, "o"))

    def output(self, *outputs: Variable) -> None:
        """`step_output` for several variables."""
        for o in outputs:
            self.step_output(o)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The values collected by step_output, [steps, ...]: a Variable, or a list of them."""
        if self._results is None:
            raise wrong(f"{self.helper.label}: write the step first: `with rnn.step():`")
        if not self._results:
            raise wrong(f"{self.helper.label}: the step has no output; call step_output or output in it")
        return self._results[0] if len(self._results) == 1 else list(self._results)

    def _inside(self, what: str) -> Block:
        if self._body is None or self.helper.main.current_block() is not self._body:
            raise wrong(f"{self.helper.label}: {what} must be called in `with rnn.step():`")
        return self._body

    def _unroll(self, outer: Block, body: Block) -> None:
        if not self._inputs:
            raise wrong(f"{self.helper.label}: the step has no step_input, so the number of steps is unknown; call step_input first")
        if missing := [n for n in self._memories if n not in self._updates]:
            raise wrong(f"{self.helper.label}: memory {missing[0]!r} is never updated; call update_memory in the step")
        steps = next(iter(self._inputs.values())).shape[0]
        slices = {n: self.helper.op("unstack", x, axis=0, n_out=steps) for n, x in self._inputs.items()}
        state = {n: v.name for n, v in self._memories.items()}
        for n in (*slices, *state):
            del body.descs[n]
        kept: list[list[str]] = [[] for _ in self._outputs]
        nested = self.helper.main.num_blocks > body.idx + 1
        for t in range(steps):
            given = {**{n: parts[t].name for n, parts in slices.items()}, **state}
            names = {**given, **copy_body(body, outer, given, f".step{t}")}
            state = {n: names.get(v.name, v.name) for n, v in self._updates.items()}
            for of, o in zip(kept, self._outputs):
                of.append(names.get(o.name, o.name))
        program = self.helper.main
        program._touch()
        if nested:
            program._drop_unrun_blocks()
        else:
            program.drop_blocks(body.idx)
        self._results = [self.helper.op("stack", [outer.var(n) for n in of], axis=0) for of in kept]


__all__ = ["StaticRNN"]
