"""`Optimizer`, the base of all optimizers: the backward pass, clipping and decay, then one update for each parameter.

Optimizer state is in persistable variables named after the parameter (`fc_0.w_0_velocity_0`) and marked by `attrs["state_of"]`. The startup
program initializes it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .._checks import number, wrong
from .._collector import collections_paused
from ..backward import append_backward
from ..clip import GradientClip, append_gradient_clip_ops
from ..initializer import derive_seed
from ..ir import (
    Block,
    Builder,
    Operator,
    Parameter,
    Program,
    ProgramError,
    Role,
    Variable,
    default_startup_program,
    unique_name,
)
from ..ir.errors import explains_arguments
from ..ir.source_location import call_site
from ..lr_scheduler import Fills, persistable, unused_name
from ..regularizer import Regularizer, append_regularization_ops

ParamsGrads = list[tuple[Parameter, Variable]]
Checkpoints = Sequence[Variable | str] | str | None


class GradientOptions(NamedTuple):
    """The arguments of `backward`."""

    loss: Variable
    startup_program: Program | None
    parameter_list: Sequence[Parameter | str] | None
    no_grad_set: Iterable[Variable | str] | None
    callbacks: Sequence[Callable[..., None]] | None
    checkpoints: Checkpoints


class Minimizer:
    """The methods of all optimizers, including those that wrap another one. A subclass defines `_backward` and `_apply`."""

    label = ""
    rescales = False  # does `backward` return gradients of a loss times a scale that changes from step to step?
    communicates = False  # do updates communicate between ranks that train separately?

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Iterable[Variable | str] | None = None,
        checkpoints: Checkpoints = None,
    ) -> tuple[list[Operator], ParamsGrads]:
        """Append the gradients of `loss` and the updates of its parameters; `checkpoints` as in `append_backward`.

        Returns the optimizer's operators, and the (parameter, gradient) pairs of `append_backward`.

        Raises ProgramError as `append_backward` does, if there is nothing to train, and if this optimizer already trains a parameter.
        """
        with collections_paused():
            params_grads = self.backward(loss, startup_program, parameter_list, no_grad_set, checkpoints=checkpoints)
            return self.apply_optimize(loss, startup_program, params_grads), params_grads

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Iterable[Variable | str] | None = None,
        callbacks: Sequence[Callable[..., None]] | None = None,
        checkpoints: Checkpoints = None,
    ) -> ParamsGrads:
        """Append only the gradients of `loss`."""
        if not isinstance(loss, Variable):
            raise wrong(f"{self.label}: loss must be a Variable, got {type(loss).__name__}: {loss!r}")
        return self._backward(GradientOptions(loss, startup_program, parameter_list, no_grad_set, callbacks, checkpoints))

    def apply_gradients(self, params_grads: Sequence[tuple[Parameter, Variable]]) -> list[Operator]:
        """Append clipping, decay and updates for existing gradients. Returns the appended operators.

        Their state is initialized in the default startup program.
        """
        return self._apply(params_grads, default_startup_program())

    def apply_optimize(
        self, loss: Variable, startup_program: Program | None, params_grads: Sequence[tuple[Parameter, Variable]]
    ) -> list[Operator]:
        """`apply_gradients`, with the state initialized in `startup_program`."""
        return self._apply(params_grads, startup_program or default_startup_program())

    def _backward(self, options: GradientOptions) -> ParamsGrads:
        raise NotImplementedError(f"{type(self).__name__} does not define how it gets gradients")

    def _apply(self, params_grads: Sequence[tuple[Parameter, Variable]], startup: Program) -> list[Operator]:
        raise NotImplementedError(f"{type(self).__name__} does not define what it does with gradients")


class Optimizer(Minimizer):
    """Base of the optimizers. A subclass defines `update`, which appends the operators of one parameter's step.

    `learning_rate` is a number or a [1] variable; `parameter_list` selects the trained parameters; `regularization` is the decay of
    parameters without their own; `grad_clip` is a class of `fluidx.clip`. Gradients are clipped, then decayed, then applied.
    `state_dtype="bfloat16"` halves the memory of the state: updates compute in float32, and what they keep is rounded stochastically.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("net"), fx.Program("net_startup")
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     h = fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2, bias_attr=False)
    ...     _ = fx.optimizer.Momentum(0.1, 0.9, state_dtype="bfloat16").minimize(fx.layers.mean(h))
    >>> main.global_block().var("fc_0.w_0_velocity_0").dtype, [op.type for op in main.ops][-2:]
    ('bfloat16', ['momentum', 'stochastic_round'])
    """

    kind = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = explains_arguments(cls.__init__)  # type: ignore[method-assign]

    @explains_arguments
    def __init__(
        self,
        learning_rate: float | Variable,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        state_dtype: str = "float32",
    ):
        self.label = f"optimizer.{type(self).__name__}"
        if isinstance(learning_rate, Variable):
            if learning_rate.desc.type.numel != 1 or not learning_rate.desc.type.is_float:
                raise wrong(f"{self.label}: learning_rate must be one float; variable {learning_rate.name!r} is {learning_rate.desc.type}")
            self.learning_rate: float | Variable = learning_rate
        else:
            self.learning_rate = number(self.label, "learning_rate", learning_rate)
            if not 0 <= self.learning_rate < math.inf:
                raise wrong(f"{self.label}: learning_rate must be a finite number, 0 or more, got {learning_rate!r}; "
                            "to maximize a value, minimize it times -1.0")  # fmt: skip
        if regularization is not None and not isinstance(regularization, Regularizer):
            raise wrong(f"{self.label}: regularization must be L1Decay, L2Decay or None, got {regularization!r}")
        if grad_clip is not None and not isinstance(grad_clip, GradientClip):
            raise wrong(f"{self.label}: grad_clip must be a GradientClipBy... or None, got {grad_clip!r}")
        self.parameter_list = parameter_list
        self.regularization = regularization
        self.grad_clip = grad_clip
        self.name = name
        if state_dtype not in ("float32", "bfloat16"):
            raise wrong(f"{self.label}: state_dtype must be 'float32' or 'bfloat16', got {state_dtype!r}")
        self.state_dtype = state_dtype
        self._rates: WeakKeyDictionary[Program, dict[float, Variable]] = WeakKeyDictionary()
        self._states: WeakKeyDictionary[Program, dict[tuple[str, str], Variable]] = WeakKeyDictionary()

    # -- defined by a subclass ----------------------------------------------------------------------------------------------------

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        """Append one parameter's update with `step.b`; `step.state` and `step.power` give its state."""
        raise NotImplementedError(f"{type(self).__name__} does not define how it updates a parameter")

    # -- implementation -----------------------------------------------------------------------------------------------------------

    def _backward(self, options: GradientOptions) -> ParamsGrads:
        loss, _, parameter_list, no_grad_set, callbacks, checkpoints = options
        trained = self.parameter_list if parameter_list is None else parameter_list
        params_grads = append_backward(loss, trained, no_grad_set, callbacks, checkpoints)
        if not params_grads:
            raise wrong(f"{self.label}: the loss {loss.name!r} depends on no trainable parameter, so there is nothing to minimize")
        return params_grads

    def _apply(self, params_grads: Sequence[tuple[Parameter, Variable]], startup: Program) -> list[Operator]:
        pairs = [(p, g) for p, g in params_grads if g is not None]
        if not pairs:
            raise wrong(f"{self.label}: there are no gradients to apply")
        main = pairs[0][0].block.program
        if startup is main:
            raise wrong(f"{self.label}: the startup program must differ from the main program")
        block = pairs[0][1].block  # updates are in the block of the gradients, which may be a branch
        taken = self._states.setdefault(main, {})
        for p, g in pairs:
            if p.block.program is not main or g.block.program is not main:
                raise wrong(f"{self.label}: {p.name!r} and its gradient {g.name!r} must belong to {main.label()}")
            if g.block.idx != block.idx:
                raise wrong(f"{self.label}: the gradients {pairs[0][1].name!r} and {g.name!r} are in two blocks of {main.label()}")
            if not p.desc.type.accepts(g.desc.type):
                raise wrong(f"{self.label}: the gradient of {p.name!r} must be {p.desc.type}, {g.name!r} is {g.desc.type}")
            if (p.name, "") in taken:
                raise wrong(f"{self.label}: this optimizer already updates parameter {p.name!r} in {main.label()};"
                            " make another optimizer for a second loss, or add the losses up and minimize once")  # fmt: skip
        updated = {n for op in block.oplist if op.role is Role.OPTIMIZE for n in op.output_arg_names}
        if twice := [p.name for p, _ in pairs if p.name in updated]:
            warnings.warn(
                f"{self.label}: {main.label()} already updates {', '.join(twice[:3])}{', ...' if len(twice) > 3 else ''}; each run updates "
                "it twice. Add the losses and minimize once, or give each optimizer its parameter_list",
                stacklevel=4,
            )
        start = len(block.oplist)
        step = UpdateStep(self, block, startup)
        pairs = self.grad_clip(pairs) if self.grad_clip is not None else append_gradient_clip_ops(pairs)
        pairs = append_regularization_ops(pairs, self.regularization)
        devices = {p: op.device for op in block.oplist if op.device for p in op.role_var[::2]}
        with collections_paused():
            for p, g in pairs:
                taken[p.name, ""] = p
                rate = self._rate(step, p)
                step.b.device = devices.get(p.name)
                self.update(step, p, g, rate)
                step.round()
            step.b.device = None
            step.finish()
        return block.oplist[start:]

    def _rate(self, step: UpdateStep, p: Parameter) -> Variable:
        """The learning rate of one parameter: the optimizer's times the parameter's factor. Equal factors share one operator."""
        factor = float(p.optimize_attr["learning_rate"])
        rates = self._rates.setdefault(step.main, {})
        if 1.0 not in rates:
            rates[1.0] = self._base_rate(step, "float64" if p.dtype == "float64" else "float32")
        if factor != 1.0 and (factor not in rates or step.b.block.find(rates[factor].name) is None):
            rates[factor] = step.b.scale(rates[1.0], scale=factor)
        return rates[factor]

    def _base_rate(self, step: UpdateStep, dtype: str) -> Variable:
        if isinstance(self.learning_rate, Variable):
            if step.block.find(self.learning_rate.name) is None:
                raise wrong(f"{self.label}: the learning rate {self.learning_rate.name!r} belongs to"
                            f" {self.learning_rate.block.program.label()}, not to {step.main.label()}")  # fmt: skip
            return step.block.var(self.learning_rate.name)
        name = unused_name(step.block, step.startup, "learning_rate")
        return persistable(step.block, step.startup, name, (1,), dtype, self.learning_rate)

    def __repr__(self) -> str:
        rate = self.learning_rate.name if isinstance(self.learning_rate, Variable) else self.learning_rate
        return f"{type(self).__name__}(learning_rate={rate})"


class UpdateStep:
    """The argument of `update`: a builder, and the state of the parameters."""

    def __init__(self, optimizer: Optimizer, block: Block, startup: Program):
        self.optimizer = optimizer
        self.main = block.program
        self.startup = startup
        self.block = self.main.global_block()
        self.b = Builder(block, role=Role.OPTIMIZE)
        self.b.site = call_site()
        self._powers: list[tuple[Variable, float]] = []
        self._fills: Fills = {}
        self._next: list[tuple[Variable, Variable]] = []

    def state(self, p: Parameter, key: str, fill: float = 0.0, shape: tuple[int, ...] | None = None) -> Variable:
        """The state variable `<p>_<key>_0` with the shape of the parameter, which the startup program fills with `fill`.

        Its dtype is that of the parameter, or float32 for a 16-bit parameter; bfloat16 if the optimizer's `state_dtype` is.
        """
        own = f"{self.optimizer.name}_{key}" if self.optimizer.name else key
        name = unique_name.generate(f"{p.name}_{own}")
        if self.block.has_var(name):
            raise ProgramError(
                f"{self.optimizer.label}: {name!r}, the {key} of parameter {p.name!r}, is already declared in {self.main.label()}; "
                "the program was minimized before under another unique_name.guard. Give this optimizer a name of its own"
            )
        of = p.desc.type
        dtype = "float64" if of.dtype == "float64" else "float32"
        narrow = shape is None and self.optimizer.state_dtype == "bfloat16"
        if narrow:
            if dtype == "float64":
                raise wrong(f"{self.optimizer.label}: the state of a float64 parameter is float64, and {p.name!r} is one; "
                            "leave state_dtype out, or give the parameter another optimizer")  # fmt: skip
            dtype = "bfloat16"
        var = persistable(self.block, self.startup, name, of.shape if shape is None else shape, dtype, fill, self._fills, state_of=p.name)
        self.optimizer._states[self.main][p.name, key] = var
        return var

    def next(self, state: Variable) -> Variable:
        """The variable that an update writes a state to: itself, or a float32 one, which `round` stores."""
        if state.dtype != "bfloat16":
            return state
        wide = self.b.block.create_var(f"{state.name}.float32", state.shape, "float32", stop_gradient=True)
        self._next.append((wide, state))
        return wide

    def round(self) -> None:
        """Store the states that the last update computed in float32, rounded stochastically to bfloat16."""
        for wide, state in self._next:
            self.b.stochastic_round(wide, seed=derive_seed(self.main, f"{state.name}@ROUND"), out={"Out": state})
        self._next.clear()

    def power(self, p: Parameter, key: str, base: float) -> Variable:
        """A [1] variable with `base` to the power of the step number, which starts at 1. `finish` updates it after all updates."""
        var = self.state(p, key, base, (1,))
        self._powers.append((var, base))
        return var

    def finish(self) -> None:
        """Update the powers for the next step."""
        made: dict[tuple[str, float], Operator] = {}
        for var, base in self._powers:
            kind = var.dtype, base
            if kind in made:
                self.b.block.repeat(made[kind], {"X": (var.name,)}, {"Out": (var.name,)})
            else:
                self.b.scale(var, scale=base, out={"Out": var})
                made[kind] = self.b.block.oplist[-1]


def fraction(owner: str, name: str, value: float) -> float:
    value = number(owner, name, value)
    if not 0.0 <= value < 1.0:
        raise wrong(f"{owner}: {name} must be at least 0 and below 1; got {value}")
    return value
