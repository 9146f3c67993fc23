"""Weight decay as a term added to gradients: `L1Decay` and `L2Decay`, on an optimizer or on one parameter's ParamAttr."""

from __future__ import annotations

from collections.abc import Sequence

from ._checks import number, wrong
from .ir import Block, Builder, Parameter, Role, Variable


class Regularizer:
    """Base of the regularizers. A parameter's record stores `record()`."""

    kind = ""

    def __init__(self, regularization_coeff: float = 0.0):
        self.coefficient = number(type(self).__name__, "regularization_coeff", regularization_coeff)

    def record(self) -> tuple[str, float]:
        """The regularizer as plain data: ("l1" | "l2", coefficient)."""
        return self.kind, self.coefficient

    def __call__(self, param: Parameter, grad: Variable, block: Block) -> Variable:
        """Append the operators that make the decay term of `param` to `block`; the term has the parameter's type."""
        return _decay_term(Builder(block, role=Role.OPTIMIZE), param, self.record())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.coefficient!r})"


class L2Decay(Regularizer):
    """Adds `regularization_coeff * param` to the gradient, the gradient of half the squared norm.

    >>> L2Decay(1e-4).record()
    ('l2', 0.0001)
    """

    kind = "l2"


class L1Decay(Regularizer):
    """Adds `regularization_coeff * sign(param)` to the gradient, the gradient of the sum of magnitudes."""

    kind = "l1"


L1DecayRegularizer = L1Decay
L2DecayRegularizer = L2Decay


def append_regularization_ops(
    params_grads: Sequence[tuple[Parameter, Variable]], regularization: Regularizer | tuple[str, float] | None = None
) -> list[tuple[Parameter, Variable]]:
    """Append each parameter's decay term to its gradient, and return the pairs with the sums.

    A parameter's own regularizer has priority over `regularization`. A pair without a regularizer is returned unchanged.
    """
    if regularization is not None and not isinstance(regularization, (Regularizer, tuple)):
        raise wrong(f"regularization must be L1Decay, L2Decay or None, got {type(regularization).__name__}: {regularization!r}")
    general = regularization.record() if isinstance(regularization, Regularizer) else regularization
    out = []
    for param, grad in params_grads:
        record = param.desc.attrs.get("regularizer") or general
        if record is None or record[1] == 0.0:
            out.append((param, grad))
            continue
        b = Builder(grad.block, role=Role.OPTIMIZE)
        term = _decay_term(b, param, record)
        out.append((param, b.emit("sum", [grad, term], name=f"{grad.name}.decayed")))
    return out


def _decay_term(b: Builder, param: Variable, record: tuple[str, float]) -> Variable:
    kind, coefficient = record
    if kind == "l2":
        return b.scale(param, scale=coefficient)
    if kind == "l1":
        return b.scale(b.sign(param), scale=coefficient)
    raise wrong(f"parameter {param.name!r}: unknown regularizer {kind!r}; there are l1, l2")
