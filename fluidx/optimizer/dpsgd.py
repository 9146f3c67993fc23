"""`Dpsgd`: gradient descent with differential privacy, by clipped gradients and noise."""

from __future__ import annotations

from typing import Any

from .._checks import number, wrong
from ..initializer import derive_seed
from ..ir import Parameter, Variable
from .base import Optimizer, UpdateStep


class Dpsgd(Optimizer):
    """parameter - learning_rate * (gradient * min(1, clip / its norm) + noise / batch_size), with noise of standard deviation `sigma`.

    Each element has its own noise, drawn again in each run; fluid draws one number for all elements. Source: Abadi et al., "Deep Learning
    with Differential Privacy" (2016).
    """

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        clip: float = 0.9,
        batch_size: float = 0.999,
        sigma: float = 1e-8,
        parameter_list: Any = None,
        **common: Any,
    ):
        super().__init__(learning_rate, parameter_list, **common)
        self.clip, self.batch_size, self.sigma = (
            number(self.label, n, v) for n, v in (("clip", clip), ("batch_size", batch_size), ("sigma", sigma))
        )
        if self.clip <= 0 or self.batch_size <= 0 or self.sigma < 0:
            raise wrong(f"{self.label}: clip and batch_size must be above 0 and sigma 0 or more, got {clip}, {batch_size} and {sigma}")

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        b = step.b
        norm = b.sqrt(b.squared_l2_norm(g))
        bound = b.fill_constant(shape=(1,), dtype=norm.dtype, value=self.clip)
        clipped = b.elementwise_mul(g, b.elementwise_div(bound, b.elementwise_max(norm, bound)))
        if self.sigma:
            seed = derive_seed(step.main, f"{p.name}@DPSGD")
            noise = b.gaussian_random(shape=p.shape, dtype=g.dtype, std=self.sigma / self.batch_size, seed=seed, per_run=True)
            clipped = b.elementwise_add(clipped, noise)
        b.sgd(p, clipped, lr, out={"ParamOut": p})
