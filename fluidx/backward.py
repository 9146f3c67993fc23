"""Reverse-mode differentiation of programs: `append_backward` for training, `gradients` for derivatives of anything.

One pass walks the operators backwards and takes the gradient operators from each op's declaration (`backward_pass.py`). Gradients are named
as in fluid: `w@GRAD`, and `w@GRAD@RENAME@block0@0`, ... which one `sum` adds if a variable is used several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ._checks import wrong
from .backward_pass import BackwardPass
from .ir import Block, Parameter, Role, Variable


def append_backward(
    loss: Variable,
    parameter_list: Sequence[Variable | str] | None = None,
    no_grad_set: Iterable[Variable | str] | None = None,
    callbacks: Sequence[Callable[..., None]] | None = None,
    checkpoints: Sequence[Variable | str] | str | None = None,
) -> list[tuple[Parameter, Variable]]:
    """Append the operators that compute the gradient of `loss`, and return (parameter, gradient) pairs in program order.

    `loss` is one number: shape [1] or []. Without `parameter_list` there is a pair for every trainable parameter on which the loss depends.
    A gradient has its parameter's type and the name `<name>@GRAD`; the operator that finishes it has the attribute
    `role_var=(parameter, gradient)`. Variables in `no_grad_set` count as constants. `callbacks` are called as
    `callback(block=block, context={"op": operator, "grads": {variable: gradient}})` after each operator that was differentiated.

    `checkpoints` trades time for memory: values between two of these variables are computed again before they are differentiated, so that
    they need not be kept (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016). "auto" cuts the forward pass where few bytes
    are live (the rule is in `recompute_segments.automatic`). Results are equal, bit by bit: a recomputed random operator draws the same
    numbers.

    Raises ProgramError if the loss is not one number or is not computed in its program, if no trainable parameter influences it, if a
    parameter in `parameter_list` does not, and if an operator on the path has no gradient.
    """
    _check_variable("append_backward", "loss", loss)
    block = loss.block
    if loss.name not in block.descs or not any(loss.name in op.output_arg_names for op in block.oplist):
        raise wrong(f"append_backward: no operator of {block.program.label()} computes the loss {loss.name!r}")
    if loss.shape not in ((), (1,)):
        raise wrong(f"append_backward: the loss must be one number, of shape [1] or []; {loss.name!r} has shape {list(loss.shape)}"
                    "; layers.mean or layers.reduce_sum makes one")  # fmt: skip
    if not loss.desc.type.is_float:
        raise wrong(f"append_backward: the loss must be a float, {loss.name!r} is {loss.dtype}")
    no_grad = _name_set(block, "no_grad_set", no_grad_set)
    asked = None if parameter_list is None else [_parameter(block, p) for p in parameter_list]
    parameters = [p for p in block.program.all_parameters() if not p.stop_gradient] if asked is None else asked
    given = {d.name for d in block.descs.values() if d.is_data and not d.stop_gradient and d.type.is_float}
    kept = "auto" if checkpoints == "auto" else _name_set(block, "checkpoints", checkpoints)
    leaves = {p.name for p in parameters}
    walk = BackwardPass(block, leaves | given, no_grad, gradients, callbacks, kept, leaves)
    at = walk.last_write[loss.name]
    if block.oplist[at].role == Role.FORWARD:
        block.oplist[at] = block.oplist[at].replace(role=Role.LOSS)
    walk.seed(loss)
    walk.reach()
    unreached = [p.name for p in asked or () if p.name not in walk.reached]
    if unreached:
        walk.undo()
        reason = "; it is in no_grad_set" if set(unreached) <= no_grad else ""
        raise wrong(f"append_backward: the loss {loss.name!r} does not depend on {', '.join(map(repr, unreached))}{reason}")
    if not walk.reached:
        walk.undo()
        raise wrong(f"append_backward: no trainable parameter influences the loss {loss.name!r}: {walk.why_not(parameters)}")
    walk.run()
    return [(p, walk.final[p.name]) for p in parameters if p.name in walk.final]


def gradients(
    targets: Variable | Sequence[Variable],
    inputs: Variable | Sequence[Variable],
    target_gradients: Variable | Sequence[Variable | None] | None = None,
    no_grad_set: Iterable[Variable | str] | None = None,
) -> list[Variable | None]:
    """Append the gradient of the sum of `targets`, and return one gradient for each input; None if no target depends on it.

    `target_gradients` weights the elements of each target; None means ones. Gradients have the inputs' types. Inputs are differentiated
    even if their `stop_gradient` is set. Applied to its own results it gives second derivatives.
    Raises ProgramError as `append_backward` does.
    """
    ys, xs = _as_list(targets), _as_list(inputs)
    seeds = [None] * len(ys) if target_gradients is None else _as_list(target_gradients)
    for name, items in (("targets", ys), ("inputs", xs)):
        if not items:
            raise wrong(f"gradients: {name} is empty")
        for v in items:
            _check_variable("gradients", name, v)
            if v.block.program is not ys[0].block.program:
                raise wrong(f"gradients: {v.name!r} belongs to another program than {ys[0].name!r}")
    if len(seeds) != len(ys):
        raise wrong(f"gradients: {len(ys)} targets need {len(ys)} target_gradients, got {len(seeds)}")
    block = ys[0].block
    walk = BackwardPass(block, {x.name for x in xs}, _name_set(block, "no_grad_set", no_grad_set), gradients)
    for y, seed in zip(ys, seeds, strict=True):
        if not y.desc.type.is_float:
            raise wrong(f"gradients: the target {y.name!r} is {y.dtype}; only floats have gradients")
        if seed is not None:
            _check_variable("gradients", "target_gradients", seed)
            if not y.desc.type.accepts(seed.desc.type):
                raise wrong(f"gradients: the gradient given for {y.name!r} must be {y.desc.type}, {seed.name!r} is {seed.desc.type}")
            walk.weigh(y, seed)
        else:
            walk.seed(y)
    walk.reach()
    walk.run()
    return [walk.final.get(x.name) for x in xs]


calc_gradient = gradients


def _check_variable(owner: str, argument: str, value: Any) -> None:
    if not isinstance(value, Variable):
        raise wrong(f"{owner}: {argument} must be a Variable, got {type(value).__name__}: {value!r}")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _name_set(block: Block, argument: str, values: Iterable[Variable | str] | None) -> set[str]:
    """The names in a list of variables or names; each must be declared."""
    names = set()
    for v in (values,) if isinstance(values, (str, Variable)) else values or ():
        name = v.name if isinstance(v, Variable) else v
        if not isinstance(name, str):
            raise wrong(f"append_backward: {argument} takes variables or their names, got {type(v).__name__}: {v!r}")
        block.desc(name)
        names.add(name)
    return names


def _parameter(block: Block, value: Variable | str) -> Parameter:
    name = value.name if isinstance(value, Variable) else value
    if not isinstance(name, str):
        raise wrong(f"append_backward: parameter_list takes parameters or their names, got {type(value).__name__}: {value!r}")
    var = block.var(name)
    if not isinstance(var, Parameter):
        raise wrong(
            f"append_backward: {name!r} is in parameter_list, but it is not a parameter; gradients(loss, [{name}]) takes any variable"
        )
    if var.stop_gradient:
        raise wrong(f"append_backward: {name!r} is in parameter_list, but it is not trainable (its stop_gradient is set)")
    return var
