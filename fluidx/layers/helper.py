"""`LayerWriter`, which every layer uses: it names variables, creates parameters, and appends operators, biases and activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._checks import one_of, whole, wrong
from ..fluid_names import answer
from ..initializer import Constant, Initializer, Xavier
from ..ir import (
    Builder,
    Parameter,
    ProgramError,
    Variable,
    as_dtype,
    default_main_program,
    default_startup_program,
    nearest,
    opdef,
    show_placement,
    unique_name,
)
from ..ir.source_location import call_site
from ..param_attr import ParamAttr, WeightNormParamAttr

# values of `act=`: operators with one input and one output that need no attributes
ACTIVATIONS = (
    "abs", "brelu", "ceil", "cos", "elu", "erf", "exp", "floor", "gelu", "hard_shrink", "hard_sigmoid", "hard_swish", "leaky_relu", "log",
    "log_softmax", "logsigmoid", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "sin", "softmax",
    "softplus", "softshrink", "softsign", "sqrt", "square", "stanh", "swish", "tanh", "tanh_shrink", "thresholded_relu",
)  # fmt: skip

Sizes = Sequence[int | Variable] | Variable  # numbers, or sizes that the program computes

_ZERO, _SPREAD = Constant(0.0), Xavier()  # default initializers of biases and of weights


class LayerWriter:
    """Writes one layer into the current block of the default main program.

    Names follow fluid: the first `fc` of a program is `fc_0`, its parameters `fc_0.w_0` and `fc_0.b_0`, its results `fc_0.tmp_0`, ... A
    `name` given by the user takes the place of `fc_0`. `label` is the name of the layer in error messages, by default `layers.fc`.
    """

    def __init__(self, kind: str, name: str | None = None, label: str = ""):
        self.kind = kind
        self.label = label or f"layers.{kind}"
        if name is not None and (not isinstance(name, str) or not name):
            raise wrong(f"{self.label}: name must be a non-empty string or None, got {name!r}")
        self.main = default_main_program()
        self.block = self.main.current_block()
        self.name = name or unique_name.generate(kind)
        self._builder = Builder(self.block)
        self._builder.site = call_site()

    # -- inputs ---------------------------------------------------------------------------------------------------------

    def variable(self, value: Any, what: str) -> Variable:
        """`value`, after a check that it is a Variable of the current program."""
        if not isinstance(value, Variable):
            hint = "; layers.assign makes one of an array" if isinstance(value, (np.ndarray, list, float, int)) else ""
            raise wrong(f"{self.label}: {what} must be a Variable, got {type(value).__name__}: {str(value)[:60]}{hint}")
        if value.block.program is not self.main and self.block.find(value.name) is None:
            raise wrong(
                f"{self.label}: variable {value.name!r} belongs to {value.block.program.label()}, but layers now write into "
                f"{self.main.label()}; call it inside program_guard of the first"
            )
        return value

    def variables(self, value: Any, what: str) -> list[Variable]:
        """A list of Variables; a single one becomes a list."""
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise wrong(f"{self.label}: {what} is an empty list; it needs at least one Variable")
        return [self.variable(v, what if len(items) == 1 else f"{what}[{i}]") for i, v in enumerate(items)]

    def rank(self, x: Variable, what: str, *ndims: int) -> None:
        """Raise ProgramError unless `x` has one of the given numbers of axes."""
        if x.ndim not in ndims:
            wanted = " or ".join(map(str, ndims))
            raise wrong(f"{self.label}: {what} must have {wanted} axes; variable {x.name!r} has shape {list(x.shape)}")

    def known(self, x: Variable, what: str, axis: int) -> int:
        """The size of an axis that must be known while the program is written."""
        size = x.shape[axis]
        if size < 0:
            raise wrong(f"{self.label}: axis {axis} of {what} must be known; variable {x.name!r} has shape {list(x.shape)}")
        return size

    def axis(self, x: Variable, axis: Any, what: str = "axis", extra: int = 0) -> int:
        """A negative `axis` made positive. Raises ProgramError if `x` has no such axis; `extra` counts axes that the layer adds."""
        n = x.ndim + extra
        if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, (int, np.integer)):
            raise wrong(f"{self.label}: {what} must be an integer, got {type(axis).__name__}: {axis!r}")
        if not -n <= axis < n:
            raise wrong(f"{self.label}: {what} is {axis}; variable {x.name!r} with shape {list(x.shape)} allows {-n} to {n - 1}")
        return int(axis) % n if n else 0

    def layout(self, layout: str, what: str = "data_format") -> str:
        """NCHW or NHWC; fluid's AnyLayout means NCHW."""
        return "NCHW" if layout == "AnyLayout" else one_of(self.label, what, layout, ("NCHW", "NHWC"))

    def sizes(self, value: Any, what: str) -> Variable | None:
        """Computed sizes as a vector, from a Variable or a list with a Variable in it; None if all sizes are numbers."""
        if isinstance(value, Variable):
            found = self.variable(value, what)
            self.rank(found, what, 1)
            return found
        items = list(value) if isinstance(value, (list, tuple)) else []
        if not any(isinstance(v, Variable) for v in items):
            return None
        pieces = [
            self.op("reshape", self.op("cast", v, dtype="int64"), shape=(1,))
            if isinstance(v, Variable)
            else self.op("fill_constant", shape=(1,), dtype="int64", value=float(whole(self.label, what, v)))
            for v in items
        ]
        return pieces[0] if len(pieces) == 1 else self.op("concat", pieces, axis=0)

    # -- results ----------------------------------------------------------------------------------------------------------

    def fresh(self, suffix: str = "tmp") -> str:
        """A name that no variable of the program has."""
        return unique_name.generate(f"{self.name}.{suffix}", self.main.declares)

    def op(self, op_type: str, *args: Any, out: Mapping[str, Any] | None = None, n_out: int = 0, **attrs: Any) -> Any:
        """Append one operator on Variables in slot order. Outputs that are not in `out` get fresh names.

        Returns one Variable, or a tuple in slot order, as `ir.Builder` does.
        """
        definition = opdef(op_type)
        for (slot, _, many), arg in zip(definition.in_slots, args):
            if isinstance(arg, Variable) and arg.block.program is self.main:
                continue
            if isinstance(arg, (list, tuple)) and many:
                self.variables(arg, slot)
            elif arg is not None:
                self.variable(arg, slot)
        if out is None and len(definition.out_slots) == 1 and not definition.out_slots[0].many:  # most operators have no output in `out`
            return self._builder.emit(op_type, *args, name=self.fresh(), **attrs)
        directed = dict(out) if out else {}
        for slot, _, many in definition.out_slots:
            target = directed.get(slot)
            if slot not in directed:
                directed[slot] = [self.fresh() for _ in range(n_out)] if many else self.fresh()
            elif target is not None:
                for v in target if isinstance(target, (list, tuple)) else [target]:
                    if not isinstance(v, str):
                        self.variable(v, slot)
        return self._builder.emit(op_type, *args, out=directed, **attrs)

    def activate(self, x: Variable, act: str | None) -> Variable:
        """The activation `act` of `x`, or `x` itself for None."""
        if act is None:
            return x
        if act not in ACTIVATIONS:
            said = getattr(act, "__name__", act)  # perhaps a function of layers, which is meant by its name
            near = answer("layers", str(said)) or nearest(str(said), ACTIVATIONS)
            hint = "" if near.startswith("there are") else f"{near} "
            raise wrong(f"{self.label}: unknown act {act!r:.60}; {hint}There are: {', '.join(ACTIVATIONS)}")
        return self.op(act, x)

    def add_bias(self, x: Variable, attr: Any, size: int, axis: int, dtype: str | None = None) -> Variable:
        """`x` plus a vector parameter along `axis`; `x` itself if attr is False."""
        bias = self.parameter(attr, (size,), dtype or x.dtype, is_bias=True)
        return x if bias is None else self.op("elementwise_add", x, bias, axis=axis)

    # -- parameters -----------------------------------------------------------------------------------------------------------

    def parameter(
        self,
        attr: Any,
        shape: Sequence[int],
        dtype: Any,
        is_bias: bool = False,
        default: Initializer | None = None,
        trainable: bool | None = None,
    ) -> Any:
        """Declare a parameter in main and startup and append its initializer to startup; None if `attr` is False.

        If the main program already declares the name, the parameter is shared, and a parameter that startup initializes is not initialized
        twice. Raises ProgramError if the shared parameter has another shape or dtype.
        """
        attr = ParamAttr.of(attr)
        if attr is None:
            return None
        if isinstance(attr, WeightNormParamAttr):
            return self._weight_norm(attr, shape, dtype, is_bias, default, trainable)
        if not is_bias and not as_dtype(dtype).startswith(("float", "bfloat")) and attr.initializer is None and default is None:
            default = _ZERO  # random values make no sense in an integer parameter
        name = attr.name or self.fresh("b" if is_bias else "w")
        record = attr.record()
        trains = attr.trainable if trainable is None else trainable
        block, startup = self.main.global_block(), default_startup_program().global_block()
        seen = name in startup.descs
        try:
            param = block.create_parameter(shape, dtype, name, trains, **record)
            if attr.placement:
                if any(e.axis not in range(param.ndim) for e in attr.placement):
                    listed = show_placement(attr.placement)
                    raise ProgramError(f"placement {listed} of {name!r} names an axis that its shape {list(shape)} does not have")
                block.declare(param.desc.changed(placement=attr.placement))
            if seen:
                startup.create_parameter(shape, dtype, name, trains, **record)
        except ProgramError as e:
            raise wrong(f"{self.label}: {e}") from None
        if not seen or attr.placement:
            startup.declare(param.desc)
        if not seen or not any(name in op.output_arg_names for op in startup.oplist):
            initializer = attr.initializer or default or (_ZERO if is_bias else _SPREAD)
            initializer(Parameter(startup, name), startup)
        return param

    def _weight_norm(
        self,
        attr: WeightNormParamAttr,
        shape: Sequence[int],
        dtype: Any,
        is_bias: bool,
        default: Initializer | None,
        trainable: bool | None,
    ) -> Variable:
        """A weight-normalized parameter g * v / |v|, from two parameters. g starts as the length of v."""
        name = attr.name or self.fresh("b" if is_bias else "w")
        v = self.parameter(attr.part(f"{name}_v"), shape, dtype, is_bias, default, trainable)
        if attr.dim is not None and not -v.ndim <= attr.dim < v.ndim:
            raise wrong(f"{self.label}: WeightNormParamAttr has dim {attr.dim}, but the parameter {list(shape)} has no such axis")
        kept = None if attr.dim is None else attr.dim % v.ndim
        others = tuple(k for k in range(v.ndim) if k != kept)
        startup, length = default_startup_program().global_block(), f"{name}_g"
        if length not in startup.descs:
            block, sizes = self.main.global_block(), [d if k == kept else 1 for k, d in enumerate(v.shape)]
            startup.declare(block.create_parameter(sizes, v.dtype, length, v.trainable, **attr.record()).desc)
            b = Builder(startup)
            b.assign(_length(b, startup.var(v.name), others), out={"Out": length})
        g = self.parameter(attr.part(length), self.main.global_block().desc(length).type.shape, dtype, trainable=trainable)
        return self.op("elementwise_mul", v, self.op("elementwise_div", g, _length(self._builder, v, others)))


def _length(b: Builder, v: Variable, axes: tuple[int, ...]) -> Variable:
    """The norm of v over some of its axes, which become size 1."""
    squares = b.square(v)
    return b.sqrt(b.reduce_sum(squares, dim=axes, keep_dim=True) if axes else squares)
