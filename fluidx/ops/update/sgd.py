"""Updates along the gradient or a decaying sum of gradients: sgd, momentum, LARS; and the moving average of a parameter."""

from __future__ import annotations

import numpy as np

from ...ir import Sample
from ...ir.op_facets import Storage
from .base import WHY, Update, param_sets


class Sgd(Update):
    """The parameter moved against its gradient: Param - LearningRate * Grad."""

    name = "sgd"
    inputs, outputs = ("Param", "Grad", "LearningRate"), ("ParamOut",)
    storage = Storage(inplace=(("Param", "ParamOut"),))
    groups = "L(0,1)"

    @staticmethod
    def formula(xp, ins, outs, lr, t):
        p, g = ins
        xp.multiply(g, lr, out=t[0])
        xp.subtract(p, t[0], out=outs[0])

    @staticmethod
    def samples():
        for args in param_sets(0, (0.1,)):
            yield Sample.of(*args, grad=(), why=WHY)


class MomentumUpdate(Update):
    """The parameter moved along a decaying sum of gradients: Velocity = mu * Velocity + Grad; Param - LearningRate * Velocity.

    With `use_nesterov` the step is LearningRate * (Grad + mu * Velocity) (Sutskever et al., 2013).
    """

    name = "momentum"
    inputs, outputs = ("Param", "Grad", "Velocity", "LearningRate"), ("ParamOut", "VelocityOut")
    attrs = {"mu": 0.9, "use_nesterov": False}
    storage = Storage(inplace=(("Param", "ParamOut"), ("Velocity", "VelocityOut")))
    groups = "L(0,1,2)"

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, mu, use_nesterov):
        p, g, v = ins
        p_out, v_out = outs
        xp.multiply(v, mu, out=v_out)
        xp.add(v_out, g, out=v_out)
        if use_nesterov:
            xp.multiply(v_out, mu, out=t[0])
            xp.add(t[0], g, out=t[0])
            xp.multiply(t[0], lr, out=t[0])
        else:
            xp.multiply(v_out, lr, out=t[0])
        xp.subtract(p, t[0], out=p_out)

    @staticmethod
    def samples():
        for args in param_sets(1, (0.1,)):
            yield Sample.of(*args, grad=(), why=WHY)
            yield Sample.of(*args, mu=0.5, use_nesterov=True, grad=(), why=WHY)


class LarsMomentumUpdate(Update):
    """Momentum whose step is scaled by the ratio of the norms of parameter and gradient (You et al., LARS, 2017).

    rate = LearningRate * lars_coeff * |Param| / (|Grad| + lars_weight_decay * |Param| + epsilon), or LearningRate when a norm is 0;
    Velocity = mu * Velocity + rate * (Grad + lars_weight_decay * Param); Param - Velocity. The squared norms are inputs.
    """

    name = "lars_momentum"
    inputs = ("Param", "Grad", "Velocity", "ParamNormSq", "GradNormSq", "LearningRate")
    outputs = ("ParamOut", "VelocityOut")
    attrs = {"mu": 0.9, "lars_coeff": 0.001, "lars_weight_decay": 0.0005, "epsilon": 0.0}
    storage = Storage(inplace=(("Param", "ParamOut"), ("Velocity", "VelocityOut")))
    groups = "L(0,1,2)"

    @staticmethod
    def scalars(xp, param_sq, grad_sq, lr, *, lars_coeff, lars_weight_decay, epsilon, **attrs):
        p, g = xp.sqrt(param_sq), xp.sqrt(grad_sq)
        some = (p > 0) & (g > 0)
        below = xp.where(some, g + lars_weight_decay * p + epsilon, 1)
        return xp.where(some, lr * lars_coeff * p / below, lr).astype(lr.dtype)

    @staticmethod
    def formula(xp, ins, outs, rate, t, *, mu, lars_weight_decay, **attrs):
        p, g, v = ins
        p_out, v_out = outs
        xp.multiply(p, lars_weight_decay, out=t[0])
        xp.add(t[0], g, out=t[0])
        xp.multiply(t[0], rate, out=t[0])
        xp.multiply(v, mu, out=v_out)
        xp.add(v_out, t[0], out=v_out)
        xp.subtract(p, v_out, out=p_out)

    @staticmethod
    def samples():
        for p, g, v, lr in param_sets(1, (0.1,)):
            norms = [np.sum(np.square(a)).reshape(1) for a in (p, g)]
            yield Sample.of(p, g, v, *norms, lr, grad=(), why=WHY)
            yield Sample.of(p, g, v, norms[0], np.zeros(1, "float32"), lr, epsilon=1e-3, grad=(), why=WHY)


class EmaUpdate(Update):
    """A decaying average of a parameter: Decay * Ema + (1 - Decay) * Param."""

    name = "ema_update"
    inputs, outputs = ("Param", "Ema", "Decay"), ("EmaOut",)
    storage = Storage(inplace=(("Ema", "EmaOut"),))
    groups = "L(0,1)"

    @staticmethod
    def scalars(xp, decay):
        return decay, 1.0 - decay

    @staticmethod
    def formula(xp, ins, outs, s, t):
        p, e = ins
        decay, rest = s
        xp.multiply(p, rest, out=t[0])
        xp.multiply(e, decay, out=outs[0])
        xp.add(outs[0], t[0], out=outs[0])

    @staticmethod
    def samples():
        for p, e, decay in param_sets(0, (0.9,)):
            yield Sample.of(p, e, decay, grad=(), why=WHY)
