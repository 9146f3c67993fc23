"""Gradient clipping: by value, by each gradient's norm, or by the norm of all gradients together.

Norms are written with the primitives `squared_l2_norm`, `sum`, `sqrt`, so that a strategy sees where a norm spans ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from ._checks import number, wrong
from .ir import Builder, Parameter, Program, Role, Variable, default_main_program

ParamsGrads = list[tuple[Parameter, Variable]]


class GradientClip:
    """Base of the clips: `clip(params_grads)` appends operators and returns the pairs with clipped gradients.

    Pairs pass unchanged when `need_clip(param)` is false, or when the parameter was made with `ParamAttr(need_clip=False)`.
    """

    def __init__(self, need_clip: Callable[[Parameter], bool] | None = None):
        if need_clip is not None and not callable(need_clip):
            raise wrong(f"{type(self).__name__}: need_clip must be a function of a parameter or None, got {need_clip!r}")
        self.need_clip = need_clip

    def applies_to(self, param: Parameter) -> bool:
        """Is this parameter's gradient clipped?"""
        return bool(param.desc.attrs.get("need_clip", True)) and (self.need_clip is None or bool(self.need_clip(param)))

    def __call__(self, params_grads: Sequence[tuple[Parameter, Variable]]) -> ParamsGrads:
        chosen = {p.name: g for p, g in params_grads if g is not None and self.applies_to(p)}
        if not chosen:
            return list(params_grads)
        b = Builder(next(iter(chosen.values())).block, role=Role.OPTIMIZE)
        clipped = dict(zip(chosen, self._clip(b, list(chosen.values())), strict=True))
        return [(p, clipped.get(p.name, g)) for p, g in params_grads]

    def _clip(self, b: Builder, grads: list[Variable]) -> list[Variable]:
        raise NotImplementedError(f"{type(self).__name__} does not define how it clips")


class GradientClipByValue(GradientClip):
    """Limits every element to [min, max]; without `min` to [-max, max]."""

    def __init__(self, max: float, min: float | None = None, need_clip: Callable[[Parameter], bool] | None = None):
        super().__init__(need_clip)
        self.max = number("GradientClipByValue", "max", max)
        self.min = -self.max if min is None else number("GradientClipByValue", "min", min)
        if self.min > self.max:
            raise wrong(f"GradientClipByValue: min is {self.min}, above max, which is {self.max}")

    def _clip(self, b: Builder, grads: list[Variable]) -> list[Variable]:
        return [b.clip(g, min=self.min, max=self.max, name=f"{g.name}.clipped") for g in grads]

    def __repr__(self) -> str:
        return f"GradientClipByValue(max={self.max}, min={self.min})"


class GradientClipByNorm(GradientClip):
    """Scales a gradient down to norm `clip_norm` where its own norm is larger."""

    def __init__(self, clip_norm: float, need_clip: Callable[[Parameter], bool] | None = None):
        super().__init__(need_clip)
        self.clip_norm = _positive("GradientClipByNorm", clip_norm)

    def _clip(self, b: Builder, grads: list[Variable]) -> list[Variable]:
        out = []
        for g in grads:
            factor = _factor(b, b.squared_l2_norm(g), self.clip_norm)
            out.append(b.elementwise_mul(g, factor, name=f"{g.name}.clipped"))
        return out

    def __repr__(self) -> str:
        return f"GradientClipByNorm({self.clip_norm})"


class GradientClipByGlobalNorm(GradientClip):
    """Scales all gradients by one factor, so that their common norm is at most `clip_norm` (Pascanu et al., 2013)."""

    def __init__(self, clip_norm: float, group_name: str = "default_group", need_clip: Callable[[Parameter], bool] | None = None):
        super().__init__(need_clip)
        self.clip_norm = _positive("GradientClipByGlobalNorm", clip_norm)
        self.group_name = str(group_name)

    def _clip(self, b: Builder, grads: list[Variable]) -> list[Variable]:
        # 16-bit gradients overflow when squared: their norm is taken in float32
        wide = "float64" if any(g.dtype == "float64" for g in grads) else "float32"
        squares = [b.squared_l2_norm(g if g.dtype == wide else b.cast(g, dtype=wide)) for g in grads]
        total = b.emit("sum", squares) if len(squares) > 1 else squares[0]
        factor = _factor(b, total, self.clip_norm)
        narrow: dict[str, Variable] = {wide: factor}
        out = []
        for g in grads:
            if g.dtype not in narrow:
                narrow[g.dtype] = b.cast(factor, dtype=g.dtype)
            out.append(b.elementwise_mul(g, narrow[g.dtype], name=f"{g.name}.clipped"))
        return out

    def __repr__(self) -> str:
        return f"GradientClipByGlobalNorm({self.clip_norm})"


class ErrorClipByValue:
    """Limits the gradient of an intermediate variable to [min, max] while it flows backwards.

    `variable.error_clip = clip`, or `clip.attach(variable)`, before `append_backward`.
    """

    def __init__(self, max: float, min: float | None = None):
        self.max = number("ErrorClipByValue", "max", max)
        self.min = -self.max if min is None else number("ErrorClipByValue", "min", min)

    def attach(self, variable: Variable) -> None:
        """Clip the gradient of `variable` in every later `append_backward`."""
        if not isinstance(variable, Variable):
            raise wrong(f"ErrorClipByValue: attach takes a Variable, got {type(variable).__name__}: {variable!r}")
        variable.block.declare(variable.desc.changed(attrs={**variable.desc.attrs, "error_clip": (self.min, self.max)}))


def _positive(owner: str, clip_norm: float) -> float:
    value = number(owner, "clip_norm", clip_norm)
    if not value > 0:
        raise wrong(f"{owner}: clip_norm must be above 0, got {value}")
    return value


def _factor(b: Builder, square: Variable, limit: float) -> Variable:
    """limit / max(limit, sqrt(square)): 1 where the norm is within the limit."""
    bound = b.fill_constant(shape=(1,), dtype=square.dtype, value=limit)
    return b.elementwise_div(bound, b.elementwise_max(b.sqrt(square), bound))


_of_program: WeakKeyDictionary[Program, dict[str | None, GradientClip]] = WeakKeyDictionary()


def set_gradient_clip(clip: GradientClip, param_list: Sequence[Parameter | str] | None = None, program: Program | None = None) -> None:
    """Clip the gradients of `param_list` (all parameters, when None) for every optimizer of `program` that has no `grad_clip`."""
    if not isinstance(clip, GradientClip):
        raise wrong(f"set_gradient_clip takes a GradientClipBy..., got {type(clip).__name__}: {clip!r}")
    program = program or default_main_program()
    chosen = _of_program.setdefault(program, {})
    if param_list is None:
        chosen[None] = clip
        return
    for p in param_list:
        chosen[program.global_block().desc(p if isinstance(p, str) else p.name).name] = clip


def append_gradient_clip_ops(params_grads: Sequence[tuple[Parameter, Variable]]) -> ParamsGrads:
    """Append the clips of `set_gradient_clip` and return the clipped pairs, in the given order."""
    pairs = list(params_grads)
    chosen = _of_program.get(pairs[0][0].block.program) if pairs else None
    if not chosen:
        return pairs
    of_param = {p.name: chosen.get(p.name) or chosen.get(None) for p, _ in pairs}
    clips: list[GradientClip] = []
    for c in of_param.values():
        if c is not None and all(c is not other for other in clips):
            clips.append(c)
    clipped: dict[str, Variable] = {}
    for c in clips:
        clipped |= {p.name: g for p, g in c([(p, g) for p, g in pairs if of_param[p.name] is c])}
    return [(p, clipped.get(p.name, g)) for p, g in pairs]
