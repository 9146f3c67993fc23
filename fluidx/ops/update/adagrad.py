"""Updates that divide the step of each element by a statistic of its squared gradients: Adagrad, Adadelta, RMSProp, FTRL."""

from __future__ import annotations

import numpy as np

from ...ir import ProgramError, Sample
from ...ir.op_facets import Storage
from .base import WHY, Update, decaying_mean, decaying_square, divided_step, param_sets


class AdagradUpdate(Update):
    """Each element's step divided by the root of its summed squared gradients (Duchi et al., 2011).

    Moment = Moment + Grad^2; Param - LearningRate * Grad / (sqrt(Moment) + epsilon).
    """

    name = "adagrad"
    inputs, outputs = ("Param", "Grad", "Moment", "LearningRate"), ("ParamOut", "MomentOut")
    attrs = {"epsilon": 1e-6}
    storage = Storage(inplace=(("Param", "ParamOut"), ("Moment", "MomentOut")))

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, epsilon):
        p, g, m = ins
        p_out, m_out = outs
        xp.multiply(g, g, out=t[0])
        xp.add(m, t[0], out=m_out)
        divided_step(xp, p, g, m_out, lr, epsilon, t[0], p_out)

    @staticmethod
    def samples():
        for args in param_sets(1, (0.1,), positive=(0,)):
            yield Sample.of(*args, grad=(), why=WHY)


class DecayedAdagradUpdate(Update):
    """Adagrad over a decaying average of squares: Param - LearningRate * Grad / (sqrt(Moment) + epsilon).

    Moment = decay * Moment + (1 - decay) * Grad^2.
    """

    name = "decayed_adagrad"
    inputs, outputs = ("Param", "Grad", "Moment", "LearningRate"), ("ParamOut", "MomentOut")
    attrs = {"decay": 0.95, "epsilon": 1e-6}
    storage = Storage(inplace=(("Param", "ParamOut"), ("Moment", "MomentOut")))

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, decay, epsilon):
        p, g, m = ins
        p_out, m_out = outs
        decaying_square(xp, m, g, decay, t[0], m_out)
        divided_step(xp, p, g, m_out, lr, epsilon, t[0], p_out)

    @staticmethod
    def samples():
        for args in param_sets(1, (0.1,), positive=(0,)):
            yield Sample.of(*args, decay=0.8, grad=(), why=WHY)


class AdadeltaUpdate(Update):
    """Steps of the size of earlier steps, relative to the root mean square of the gradients (Zeiler, 2012).

    Update = -sqrt((AvgSquaredUpdate + epsilon) / (AvgSquaredGrad + epsilon)) * Grad, with the new AvgSquaredGrad; Param + LearningRate *
    Update.
    """

    name = "adadelta"
    inputs = ("Param", "Grad", "AvgSquaredGrad", "AvgSquaredUpdate", "LearningRate")
    outputs = ("ParamOut", "AvgSquaredGradOut", "AvgSquaredUpdateOut")
    attrs = {"rho": 0.95, "epsilon": 1e-6}
    storage = Storage(inplace=(("Param", "ParamOut"), ("AvgSquaredGrad", "AvgSquaredGradOut"), ("AvgSquaredUpdate", "AvgSquaredUpdateOut")))
    temps = 2

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, rho, epsilon):
        p, g, a, d = ins
        p_out, a_out, d_out = outs
        t, u = t
        decaying_square(xp, a, g, rho, t, a_out)
        xp.add(d, epsilon, out=u)
        xp.add(a_out, epsilon, out=t)
        xp.divide(u, t, out=u)
        xp.sqrt(u, out=u)
        xp.multiply(u, g, out=u)
        decaying_square(xp, d, u, rho, t, d_out)
        xp.multiply(u, lr, out=u)
        xp.subtract(p, u, out=p_out)

    @staticmethod
    def samples():
        for args in param_sets(2, (0.5,), positive=(0, 1)):
            yield Sample.of(*args, rho=0.8, grad=(), why=WHY)


class RmsProp(Update):
    """Gradients divided by their decaying root mean square, with momentum (Hinton, lecture 6e; centered: Graves, 2013).

    MeanSquare = decay * MeanSquare + (1 - decay) * Grad^2; Moment = momentum * Moment + LearningRate * Grad / sqrt(MeanSquare + epsilon);
    Param - Moment. With `centered`, the square of MeanGrad, a decaying mean gradient, is subtracted from MeanSquare under the root.
    """

    name = "rmsprop"
    inputs = ("Param", "MeanSquare", "MeanGrad?", "Grad", "Moment", "LearningRate")
    outputs = ("ParamOut", "MomentOut", "MeanSquareOut", "MeanGradOut?")
    attrs = {"epsilon": 1e-10, "decay": 0.9, "momentum": 0.0, "centered": False}
    storage = Storage(
        inplace=(("Param", "ParamOut"), ("Moment", "MomentOut"), ("MeanSquare", "MeanSquareOut"), ("MeanGrad", "MeanGradOut"))
    )  # fmt: skip
    temps = 2

    @classmethod
    def infer(cls, param, square, mean, grad, moment, lr, **attrs):
        if attrs["centered"] and mean is None:
            raise ProgramError("op rmsprop with centered=True needs input 'MeanGrad', which was not given")
        return super().infer(param, square, mean, grad, moment, lr, **attrs)

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, epsilon, decay, momentum, centered):
        p, s, a, g, m = ins
        p_out, m_out, s_out, a_out = outs
        t, u = t
        decaying_square(xp, s, g, decay, t, s_out)
        if centered:
            if a_out is None:
                a_out = u
            decaying_mean(xp, a, g, decay, t, a_out)
            xp.multiply(a_out, a_out, out=t)
            xp.subtract(s_out, t, out=t)
            xp.add(t, epsilon, out=t)
        else:
            if a_out is not None:
                a_out[...] = 0 if a is None else a
            xp.add(s_out, epsilon, out=t)
        xp.sqrt(t, out=t)
        xp.divide(g, t, out=t)
        xp.multiply(t, lr, out=t)
        xp.multiply(m, momentum, out=m_out)
        xp.add(m_out, t, out=m_out)
        xp.subtract(p, m_out, out=p_out)

    @staticmethod
    def samples():
        for p, g, s, m, lr in param_sets(2, (0.1,), positive=(0,)):
            yield Sample.of(p, s, None, g, m, lr, epsilon=1e-6, momentum=0.5, grad=(), why=WHY)
            yield Sample.of(p, s, g * np.float32(0.1), g, m, lr, epsilon=1.0, centered=True, grad=(), why=WHY)


class FtrlUpdate(Update):
    """Follow the regularized leader: l1 makes weights sparse, l2 makes them small (McMahan et al., 2013).

    With n = SquaredAccumulator + Grad^2 and r(x) = x ** -lr_power: LinearAccumulator grows by Grad - (r(n) - r(SquaredAccumulator)) /
    LearningRate * Param, and Param becomes (l1 * sign(linear) - linear) / (r(n) / LearningRate + 2 * l2) where |linear| > l1, and 0
    elsewhere.
    """

    name = "ftrl"
    inputs = ("Param", "SquaredAccumulator", "LinearAccumulator", "Grad", "LearningRate")
    outputs = ("ParamOut", "SquaredAccumOut", "LinearAccumOut")
    attrs = {"l1": 0.0, "l2": 0.0, "lr_power": -0.5}
    storage = Storage(inplace=(("Param", "ParamOut"), ("SquaredAccumulator", "SquaredAccumOut"), ("LinearAccumulator", "LinearAccumOut")))
    temps = 2

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, l1, l2, lr_power):
        p, n, z, g = ins
        p_out, n_out, z_out = outs
        t, u = t

        def root(x, out):
            if lr_power == -0.5:
                xp.sqrt(x, out=out)
            else:
                xp.power(x, -lr_power, out=out)

        root(n, t)
        xp.multiply(g, g, out=u)
        xp.add(n, u, out=n_out)
        root(n_out, u)
        xp.subtract(u, t, out=t)
        xp.divide(t, lr, out=t)
        xp.multiply(t, p, out=t)
        xp.subtract(g, t, out=t)
        xp.add(z, t, out=z_out)
        xp.divide(u, lr, out=u)
        xp.add(u, 2.0 * l2, out=u)
        # l1 * sign(z) - z where |z| > l1, 0 elsewhere, is clip(z, -l1, l1) - z
        xp.clip(z_out, -l1, l1, out=t)
        xp.subtract(t, z_out, out=t)
        xp.divide(t, u, out=p_out)

    @staticmethod
    def samples():
        for p, g, n, z, lr in param_sets(2, (0.1,), positive=(0,)):
            yield Sample.of(p, n, z, g, lr, grad=(), why=WHY)
            yield Sample.of(p, n, z, g, lr, l1=0.5, l2=0.1, lr_power=-0.7, grad=(), why=WHY)
