"""Updates by a mean gradient divided by the root of the mean square: Adam, AdamW, Adamax and LAMB."""

from __future__ import annotations

import numpy as np

from ...ir import ProgramError, Sample
from ...ir.op_facets import Storage
from .base import WHY, Update, decaying_mean, decaying_square, divided_step, param_sets


def _adam_scalars(xp, lr, beta1_pow, beta2_pow, epsilon):
    """The step size and epsilon with both bias corrections included, so that a block needs no pass for them."""
    root = xp.sqrt(1.0 - beta2_pow)
    return lr * root / (1.0 - beta1_pow), root * epsilon


def _adam_moments(xp, g, m, v, beta1, beta2, t, m_out, v_out):
    decaying_mean(xp, m, g, beta1, t, m_out)
    decaying_square(xp, v, g, beta2, t, v_out)


class AdamUpdate(Update):
    """The parameter moved by its bias-corrected mean gradient divided by the root of its mean square (Kingma & Ba, 2015, algorithm 1).

    Beta1Pow and Beta2Pow are beta1 and beta2 to the power of the step number, counted from 1; the op reads them and does not update them.
    """

    name = "adam"
    inputs = ("Param", "Grad", "Moment1", "Moment2", "LearningRate", "Beta1Pow", "Beta2Pow")
    outputs = ("ParamOut", "Moment1Out", "Moment2Out")
    attrs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    storage = Storage(inplace=(("Param", "ParamOut"), ("Moment1", "Moment1Out"), ("Moment2", "Moment2Out")))

    @staticmethod
    def scalars(xp, lr, beta1_pow, beta2_pow, *, epsilon, **attrs):
        return _adam_scalars(xp, lr, beta1_pow, beta2_pow, epsilon)

    @staticmethod
    def formula(xp, ins, outs, s, t, *, beta1, beta2, **attrs):
        p, g, m, v = ins
        p_out, m_out, v_out = outs
        step, epsilon = s
        t = t[0]
        _adam_moments(xp, g, m, v, beta1, beta2, t, m_out, v_out)
        divided_step(xp, p, m_out, v_out, step, epsilon, t, p_out)

    @staticmethod
    def samples():
        for args in param_sets(2, (0.1, 0.9, 0.999), positive=(1,)):
            yield Sample.of(*args, grad=(), why=WHY)
            yield Sample.of(*args, beta1=0.5, beta2=0.9, epsilon=1e-3, grad=(), why=WHY)


class AdamWUpdate(Update):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019): Param * (1 - LearningRate * coeff), then Adam's step."""

    name = "adamw"
    inputs, outputs = AdamUpdate.inputs, AdamUpdate.outputs
    attrs = {**AdamUpdate.attrs, "coeff": 0.01}
    storage = Storage(inplace=AdamUpdate.storage.inplace)

    @staticmethod
    def scalars(xp, lr, beta1_pow, beta2_pow, *, epsilon, coeff, **attrs):
        return (*_adam_scalars(xp, lr, beta1_pow, beta2_pow, epsilon), 1.0 - lr * coeff)

    @staticmethod
    def formula(xp, ins, outs, s, t, *, beta1, beta2, **attrs):
        p, g, m, v = ins
        p_out, m_out, v_out = outs
        step, epsilon, shrink = s
        t = t[0]
        _adam_moments(xp, g, m, v, beta1, beta2, t, m_out, v_out)
        xp.multiply(p, shrink, out=p_out)
        divided_step(xp, p_out, m_out, v_out, step, epsilon, t, p_out)

    @staticmethod
    def samples():
        for args in param_sets(2, (0.1, 0.9, 0.999), positive=(1,)):
            yield Sample.of(*args, coeff=0.1, grad=(), why=WHY)


class AdamaxUpdate(Update):
    """Adam with the largest gradient instead of the mean square (Kingma & Ba, 2015, algorithm 2).

    Moment = beta1 * Moment + (1 - beta1) * Grad; InfNorm = max(beta2 * InfNorm + epsilon, |Grad|);
    Param - LearningRate / (1 - Beta1Pow) * Moment / InfNorm. As in fluid, epsilon keeps InfNorm from being 0.
    """

    name = "adamax"
    inputs = ("Param", "Grad", "LearningRate", "Moment", "InfNorm", "Beta1Pow")
    outputs = ("ParamOut", "MomentOut", "InfNormOut")
    attrs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    storage = Storage(inplace=(("Param", "ParamOut"), ("Moment", "MomentOut"), ("InfNorm", "InfNormOut")))

    @staticmethod
    def scalars(xp, lr, beta1_pow, **attrs):
        return lr / (1.0 - beta1_pow)

    @staticmethod
    def formula(xp, ins, outs, step, t, *, beta1, beta2, epsilon):
        p, g, m, n = ins
        p_out, m_out, n_out = outs
        t = t[0]
        decaying_mean(xp, m, g, beta1, t, m_out)
        xp.absolute(g, out=t)
        xp.multiply(n, beta2, out=n_out)
        xp.add(n_out, epsilon, out=n_out)
        xp.maximum(n_out, t, out=n_out)
        xp.divide(m_out, n_out, out=t)
        xp.multiply(t, step, out=t)
        xp.subtract(p, t, out=p_out)

    @staticmethod
    def samples():
        for p, g, m, n, lr, beta1_pow in param_sets(2, (0.1, 0.9), positive=(1,)):
            yield Sample.of(p, g, lr, m, n, beta1_pow, beta2=0.9, grad=(), why=WHY)


class LambUpdate(Update):
    """The direction of a LAMB step, before its length is set: Adam's direction plus weight_decay * Param (You et al., 2020).

    Update = m / (sqrt(v) + epsilon) + weight_decay * Param. Here m and v are the new Moment1 and Moment2, bias-corrected if Beta1Pow and
    Beta2Pow are given. `lamb_apply` takes the step.
    """

    name = "lamb_update"
    inputs = ("Param", "Grad", "Moment1", "Moment2", "Beta1Pow?", "Beta2Pow?")
    outputs = ("Update", "Moment1Out", "Moment2Out")
    attrs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01}
    storage = Storage(inplace=(("Moment1", "Moment1Out"), ("Moment2", "Moment2Out")))

    @classmethod
    def infer(cls, param, grad, moment1, moment2, beta1_pow, beta2_pow, **attrs):
        if (beta1_pow is None) != (beta2_pow is None):
            raise ProgramError("op lamb_update takes Beta1Pow and Beta2Pow together; only one was given")
        return super().infer(param, grad, moment1, moment2, beta1_pow, beta2_pow, **attrs)

    @staticmethod
    def scalars(xp, beta1_pow, beta2_pow, *, epsilon, **attrs):
        if beta1_pow is None:
            return 1.0, epsilon
        return _adam_scalars(xp, 1.0, beta1_pow, beta2_pow, epsilon)

    @staticmethod
    def formula(xp, ins, outs, s, t, *, beta1, beta2, weight_decay, **attrs):
        p, g, m, v = ins
        u_out, m_out, v_out = outs
        step, epsilon = s
        t = t[0]
        _adam_moments(xp, g, m, v, beta1, beta2, t, m_out, v_out)
        xp.sqrt(v_out, out=t)
        xp.add(t, epsilon, out=t)
        xp.divide(m_out, t, out=t)
        xp.multiply(t, step, out=t)
        xp.multiply(p, weight_decay, out=u_out)
        xp.add(u_out, t, out=u_out)

    @staticmethod
    def samples():
        for p, g, m, v, b1, b2 in param_sets(2, (0.9, 0.999), positive=(1,)):
            yield Sample.of(p, g, m, v, None, None, grad=(), why=WHY)
            yield Sample.of(p, g, m, v, b1, b2, weight_decay=0.1, grad=(), why=WHY)


class LambApply(Update):
    """The parameter moved along Update, with a step proportional to its norm: Param - LearningRate * |Param| / |Update| * Update.

    The squared norms are inputs; if one is 0, their ratio counts as 1.
    """

    name = "lamb_apply"
    inputs = ("Param", "Update", "ParamNormSq", "UpdateNormSq", "LearningRate")
    outputs = ("ParamOut",)
    storage = Storage(inplace=(("Param", "ParamOut"),))
    groups = "L(0,1)"

    @staticmethod
    def scalars(xp, param_sq, update_sq, lr):
        some = (param_sq > 0) & (update_sq > 0)
        ratio = xp.sqrt(param_sq) / xp.sqrt(xp.where(some, update_sq, 1))
        return (lr * xp.where(some, ratio, 1)).astype(lr.dtype)

    @staticmethod
    def formula(xp, ins, outs, rate, t):
        p, u = ins
        xp.multiply(u, rate, out=t[0])
        xp.subtract(p, t[0], out=outs[0])

    @staticmethod
    def samples():
        for p, u, lr in param_sets(0, (0.1,)):
            norms = [np.sum(np.square(a)).reshape(1) for a in (p, u)]
            yield Sample.of(p, u, *norms, lr, grad=(), why=WHY)
            yield Sample.of(p, u * 0, norms[0], norms[1] * 0, lr, grad=(), why=WHY)
