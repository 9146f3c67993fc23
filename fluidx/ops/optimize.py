"""Update operators: one step of an optimizer over one parameter, or over any slice of it.

Every op here is elementwise over the parameter, its gradient and its state, beside scalars of one element. So a strategy may cut a
parameter anywhere and update each piece on another rank; the values are the same. Norms of whole parameters (LARS, LAMB) come in as
inputs, made by `squared_l2_norm`, and the powers of beta (Adam) are advanced by `scale` operators of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir import ANY, OpDef, Partial, ProgramError, Sample, TensorType, show_placement
from ..ir.placement import PlaceError, flat, place_elementwise

# Elements worked on at a time: the temporaries of a block stay in the L2 cache of one core.
BLOCK = 1 << 15

# Slots of one element; every other slot has the parameter's shape.
_SCALARS = ("LearningRate", "Beta1Pow", "Beta2Pow", "ParamNormSq", "GradNormSq", "UpdateNormSq", "Decay")


class _Update(OpDef):
    """What the update ops share. A subclass states its slots, `scalars` (what is computed once per step) and `formula`."""

    elementwise = True
    scratch = 1  # temporaries of the parameter's shape that `formula` is handed

    @classmethod
    def infer(cls, *types, **attrs):
        by_name = dict(zip((s.name for s in cls.in_slots), types, strict=True))
        param = by_name["Param"]
        if not param.is_float:
            raise ProgramError(f"op {cls.name}: Param must be a float, it is {param}")
        for slot, t in by_name.items():
            if t is None:
                continue
            if not t.is_float:
                raise ProgramError(f"op {cls.name}: {slot} must be a float, it is {t}")
            if slot in _SCALARS:
                if any(d not in (1, ANY) for d in t.shape):
                    raise ProgramError(f"op {cls.name}: {slot} must have one element, it is {t}")
            elif t.shape != param.shape:
                raise ProgramError(f"op {cls.name}: Param is {param}, {slot} is {t}; they must have the same shape")
            elif slot == "Grad" and t.dtype != param.dtype:
                raise ProgramError(f"op {cls.name}: Param is {param}, Grad is {t}; they must have the same dtype")
        result = []
        for s in cls.out_slots:
            t = by_name.get(s.name.removesuffix("Out"))
            result.append(t if t is not None else TensorType(work_dtype(param.dtype), param.shape))
        return result[0] if len(result) == 1 else tuple(result)

    @classmethod
    def place(cls, *args, **attrs):
        by_name = {s.name: a for s, a in zip(cls.in_slots, args, strict=True) if a is not None}
        param, grad = by_name["Param"], by_name.get("Grad")
        for a in flat(args):
            partial = next((p for p in a.placement if isinstance(p, Partial)), None)
            if partial is not None and a is grad:
                raise PlaceError(
                    f"op {cls.name}: parameter %{param.name} is {show_placement(param.placement)} but its gradient %{a.name} is {partial}\n"
                    "  all_reduce or reduce_scatter the gradient first"
                )
            if partial is not None:
                raise PlaceError(f"op {cls.name}: %{a.name} is {partial}; all_reduce it first")
        entry = place_elementwise(*args)
        return (entry,) * len(cls.out_slots) if len(cls.out_slots) > 1 else entry

    @staticmethod
    def scalars(*args: Any, **attrs: Any) -> Any:
        """scalars(xp, *ones, **attrs): values of one element that are the same for every block."""
        raise NotImplementedError

    @staticmethod
    def formula(*args: Any, **attrs: Any) -> None:
        """formula(xp, ins, outs, s, t, **attrs): write `outs` from the tensors `ins`, the scalars `s` and the temporaries `t`.

        Each element of an input is read before it is overwritten.
        """
        raise NotImplementedError

    @classmethod
    def _split(cls, arrays):
        """(tensors, scalars) of the inputs, in slot order."""
        pairs = list(zip(cls.in_slots, arrays, strict=True))
        return [a for s, a in pairs if s.name not in _SCALARS], [a for s, a in pairs if s.name in _SCALARS]

    @classmethod
    def kernel(cls, xp, *arrays, out, **attrs):
        tensors, ones = cls._split(arrays)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        temps = [xp.empty(tensors[0].shape, work_dtype(tensors[0].dtype.name)) for _ in range(cls.scratch)]
        cls.formula(xp, tensors, outs, cls.scalars(xp, *ones, **attrs), temps, **attrs)

    @classmethod
    def bind(cls, xp, ins, outs, attrs, ctx):
        if xp is not np:
            return None  # the kernel serves: a GPU needs no blocks
        tensors, ones = cls._split(ins)
        outs = list(outs)
        scalars, formula = cls.scalars, cls.formula
        present = [a for a in (*tensors, *outs) if a is not None]
        size = tensors[0].size
        if size > BLOCK and all(a.flags.c_contiguous for a in present):

            def block(a, start):
                return None if a is None else a.reshape(-1)[start : start + BLOCK]

            work = [np.empty(BLOCK, work_dtype(tensors[0].dtype.name)) for _ in range(cls.scratch)]
            parts = [
                ([block(a, i) for a in tensors], [block(a, i) for a in outs], [w[: min(BLOCK, size - i)] for w in work])
                for i in range(0, size, BLOCK)
            ]
        else:
            parts = [(tensors, outs, [np.empty(tensors[0].shape, work_dtype(tensors[0].dtype.name)) for _ in range(cls.scratch)])]

        def run():
            s = scalars(np, *ones, **attrs)
            for tensor_parts, out_parts, temps in parts:
                formula(np, tensor_parts, out_parts, s, temps, **attrs)

        return run


def work_dtype(dtype: str) -> str:
    """The dtype that an update is computed in: float32 for 16-bit parameters.

    >>> work_dtype("bfloat16"), work_dtype("float64")
    ('float32', 'float64')
    """
    return "float64" if dtype == "float64" else "float32"


def _param_sets(states: int, scalars: tuple[float, ...], positive: tuple[int, ...] = ()):
    """Sample arguments: Param, Grad, `states` state tensors and scalars; `positive` lists the states that hold squares."""
    for seed, shape in enumerate([(3, 4), (1,), (7,)]):
        rng = np.random.default_rng(seed)
        tensors = [rng.standard_normal(shape).astype("float32") for _ in range(2 + states)]
        for k in positive:
            tensors[2 + k] = np.square(tensors[2 + k]) + np.float32(0.1)
        yield [*tensors, *(np.full(1, s, "float32") for s in scalars)]


_WHY = "an update is not differentiated"


class Sgd(_Update):
    """The parameter moved against its gradient: Param - LearningRate * Grad."""

    name = "sgd"
    inputs, outputs = ("Param", "Grad", "LearningRate"), ("ParamOut",)
    inplace = (("Param", "ParamOut"),)

    @staticmethod
    def scalars(xp, lr):
        return lr

    @staticmethod
    def formula(xp, ins, outs, lr, t):
        p, g = ins
        xp.multiply(g, lr, out=t[0])
        xp.subtract(p, t[0], out=outs[0])

    @staticmethod
    def samples():
        for args in _param_sets(0, (0.1,)):
            yield Sample.of(*args, grad=(), why=_WHY)


class Momentum(_Update):
    """The parameter moved along a decaying sum of gradients: Velocity = mu * Velocity + Grad; Param - LearningRate * Velocity.

    With `use_nesterov` the step is LearningRate * (Grad + mu * Velocity) (Sutskever et al., 2013).
    """

    name = "momentum"
    inputs, outputs = ("Param", "Grad", "Velocity", "LearningRate"), ("ParamOut", "VelocityOut")
    attrs = {"mu": 0.9, "use_nesterov": False}
    inplace = (("Param", "ParamOut"), ("Velocity", "VelocityOut"))

    @staticmethod
    def scalars(xp, lr, **attrs):
        return lr

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
        for args in _param_sets(1, (0.1,)):
            yield Sample.of(*args, grad=(), why=_WHY)
            yield Sample.of(*args, mu=0.5, use_nesterov=True, grad=(), why=_WHY)


class LarsMomentum(_Update):
    """Momentum whose step is scaled by the ratio of the norms of parameter and gradient (You et al., LARS, 2017).

    rate = LearningRate * lars_coeff * |Param| / (|Grad| + lars_weight_decay * |Param| + epsilon), or LearningRate when a norm is 0;
    Velocity = mu * Velocity + rate * (Grad + lars_weight_decay * Param); Param - Velocity. The squared norms are inputs.
    """

    name = "lars_momentum"
    inputs = ("Param", "Grad", "Velocity", "ParamNormSq", "GradNormSq", "LearningRate")
    outputs = ("ParamOut", "VelocityOut")
    attrs = {"mu": 0.9, "lars_coeff": 0.001, "lars_weight_decay": 0.0005, "epsilon": 0.0}
    inplace = (("Param", "ParamOut"), ("Velocity", "VelocityOut"))

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
        for p, g, v, lr in _param_sets(1, (0.1,)):
            norms = [np.sum(np.square(a)).reshape(1) for a in (p, g)]
            yield Sample.of(p, g, v, *norms, lr, grad=(), why=_WHY)
            yield Sample.of(p, g, v, norms[0], np.zeros(1, "float32"), lr, epsilon=1e-3, grad=(), why=_WHY)


class Adagrad(_Update):
    """Each element's step divided by the root of its summed squared gradients (Duchi et al., 2011).

    Moment = Moment + Grad^2; Param - LearningRate * Grad / (sqrt(Moment) + epsilon).
    """

    name = "adagrad"
    inputs, outputs = ("Param", "Grad", "Moment", "LearningRate"), ("ParamOut", "MomentOut")
    attrs = {"epsilon": 1e-6}
    inplace = (("Param", "ParamOut"), ("Moment", "MomentOut"))

    @staticmethod
    def scalars(xp, lr, **attrs):
        return lr

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, epsilon):
        p, g, m = ins
        p_out, m_out = outs
        xp.multiply(g, g, out=t[0])
        xp.add(m, t[0], out=m_out)
        _divided_step(xp, p, g, m_out, lr, epsilon, t[0], p_out)

    @staticmethod
    def samples():
        for args in _param_sets(1, (0.1,), positive=(0,)):
            yield Sample.of(*args, grad=(), why=_WHY)


def _divided_step(xp, p, g, m, lr, epsilon, t, p_out):
    """p_out = p - lr * g / (sqrt(m) + epsilon)."""
    xp.sqrt(m, out=t)
    xp.add(t, epsilon, out=t)
    xp.divide(g, t, out=t)
    xp.multiply(t, lr, out=t)
    xp.subtract(p, t, out=p_out)


class DecayedAdagrad(_Update):
    """Adagrad over a decaying average of squares: Param - LearningRate * Grad / (sqrt(Moment) + epsilon).

    Moment = decay * Moment + (1 - decay) * Grad^2.
    """

    name = "decayed_adagrad"
    inputs, outputs = ("Param", "Grad", "Moment", "LearningRate"), ("ParamOut", "MomentOut")
    attrs = {"decay": 0.95, "epsilon": 1e-6}
    inplace = (("Param", "ParamOut"), ("Moment", "MomentOut"))

    @staticmethod
    def scalars(xp, lr, **attrs):
        return lr

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, decay, epsilon):
        p, g, m = ins
        p_out, m_out = outs
        _decaying_square(xp, m, g, decay, t[0], m_out)
        _divided_step(xp, p, g, m_out, lr, epsilon, t[0], p_out)

    @staticmethod
    def samples():
        for args in _param_sets(1, (0.1,), positive=(0,)):
            yield Sample.of(*args, decay=0.8, grad=(), why=_WHY)


def _decaying_square(xp, m, g, decay, t, m_out):
    """m_out = decay * m + (1 - decay) * g^2."""
    xp.multiply(g, g, out=t)
    xp.multiply(t, 1.0 - decay, out=t)
    xp.multiply(m, decay, out=m_out)
    xp.add(m_out, t, out=m_out)


def _adam_scalars(xp, lr, beta1_pow, beta2_pow, epsilon):
    """The step size and epsilon with both bias corrections moved into them, so that a block needs no pass for them."""
    root = xp.sqrt(1.0 - beta2_pow)
    return lr * root / (1.0 - beta1_pow), root * epsilon


def _adam_moments(xp, g, m, v, beta1, beta2, t, m_out, v_out):
    xp.multiply(g, 1.0 - beta1, out=t)
    xp.multiply(m, beta1, out=m_out)
    xp.add(m_out, t, out=m_out)
    _decaying_square(xp, v, g, beta2, t, v_out)


class Adam(_Update):
    """The parameter moved by its bias-corrected mean gradient over the root of its mean square (Kingma & Ba, 2015, algorithm 1).

    Beta1Pow and Beta2Pow are beta1 and beta2 to the power of the step, counted from 1; they are read, not advanced.
    """

    name = "adam"
    inputs = ("Param", "Grad", "Moment1", "Moment2", "LearningRate", "Beta1Pow", "Beta2Pow")
    outputs = ("ParamOut", "Moment1Out", "Moment2Out")
    attrs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    inplace = (("Param", "ParamOut"), ("Moment1", "Moment1Out"), ("Moment2", "Moment2Out"))

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
        _divided_step(xp, p, m_out, v_out, step, epsilon, t, p_out)

    @staticmethod
    def samples():
        for args in _param_sets(2, (0.1, 0.9, 0.999), positive=(1,)):
            yield Sample.of(*args, grad=(), why=_WHY)
            yield Sample.of(*args, beta1=0.5, beta2=0.9, epsilon=1e-3, grad=(), why=_WHY)


class AdamW(_Update):
    """Adam with weight decay apart from the gradient (Loshchilov & Hutter, 2019): Param * (1 - LearningRate * coeff), then Adam's step."""

    name = "adamw"
    inputs, outputs = Adam.inputs, Adam.outputs
    attrs = {**Adam.attrs, "coeff": 0.01}
    inplace = Adam.inplace

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
        _divided_step(xp, p_out, m_out, v_out, step, epsilon, t, p_out)

    @staticmethod
    def samples():
        for args in _param_sets(2, (0.1, 0.9, 0.999), positive=(1,)):
            yield Sample.of(*args, coeff=0.1, grad=(), why=_WHY)


class Adamax(_Update):
    """Adam with the largest gradient in place of the mean square (Kingma & Ba, 2015, algorithm 2).

    Moment = beta1 * Moment + (1 - beta1) * Grad; InfNorm = max(beta2 * InfNorm + epsilon, |Grad|);
    Param - LearningRate / (1 - Beta1Pow) * Moment / InfNorm. As in fluid, epsilon keeps InfNorm from being 0.
    """

    name = "adamax"
    inputs = ("Param", "Grad", "LearningRate", "Moment", "InfNorm", "Beta1Pow")
    outputs = ("ParamOut", "MomentOut", "InfNormOut")
    attrs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    inplace = (("Param", "ParamOut"), ("Moment", "MomentOut"), ("InfNorm", "InfNormOut"))

    @staticmethod
    def scalars(xp, lr, beta1_pow, **attrs):
        return lr / (1.0 - beta1_pow)

    @staticmethod
    def formula(xp, ins, outs, step, t, *, beta1, beta2, epsilon):
        p, g, m, n = ins
        p_out, m_out, n_out = outs
        t = t[0]
        xp.multiply(g, 1.0 - beta1, out=t)
        xp.multiply(m, beta1, out=m_out)
        xp.add(m_out, t, out=m_out)
        xp.absolute(g, out=t)
        xp.multiply(n, beta2, out=n_out)
        xp.add(n_out, epsilon, out=n_out)
        xp.maximum(n_out, t, out=n_out)
        xp.divide(m_out, n_out, out=t)
        xp.multiply(t, step, out=t)
        xp.subtract(p, t, out=p_out)

    @staticmethod
    def samples():
        for p, g, m, n, lr, beta1_pow in _param_sets(2, (0.1, 0.9), positive=(1,)):
            yield Sample.of(p, g, lr, m, n, beta1_pow, beta2=0.9, grad=(), why=_WHY)


class Adadelta(_Update):
    """Steps sized by the root mean square of earlier steps over that of the gradients (Zeiler, 2012).

    Update = -sqrt((AvgSquaredUpdate + epsilon) / (AvgSquaredGrad + epsilon)) * Grad, with AvgSquaredGrad already brought up to date;
    Param + LearningRate * Update.
    """

    name = "adadelta"
    inputs = ("Param", "Grad", "AvgSquaredGrad", "AvgSquaredUpdate", "LearningRate")
    outputs = ("ParamOut", "AvgSquaredGradOut", "AvgSquaredUpdateOut")
    attrs = {"rho": 0.95, "epsilon": 1e-6}
    inplace = (("Param", "ParamOut"), ("AvgSquaredGrad", "AvgSquaredGradOut"), ("AvgSquaredUpdate", "AvgSquaredUpdateOut"))
    scratch = 2

    @staticmethod
    def scalars(xp, lr, **attrs):
        return lr

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, rho, epsilon):
        p, g, a, d = ins
        p_out, a_out, d_out = outs
        t, u = t
        _decaying_square(xp, a, g, rho, t, a_out)
        xp.add(d, epsilon, out=u)
        xp.add(a_out, epsilon, out=t)
        xp.divide(u, t, out=u)
        xp.sqrt(u, out=u)
        xp.multiply(u, g, out=u)
        _decaying_square(xp, d, u, rho, t, d_out)
        xp.multiply(u, lr, out=u)
        xp.subtract(p, u, out=p_out)

    @staticmethod
    def samples():
        for args in _param_sets(2, (0.5,), positive=(0, 1)):
            yield Sample.of(*args, rho=0.8, grad=(), why=_WHY)


class RmsProp(_Update):
    """Gradients divided by their decaying root mean square, with momentum (Hinton, lecture 6e; centered: Graves, 2013).

    MeanSquare = decay * MeanSquare + (1 - decay) * Grad^2; Moment = momentum * Moment + LearningRate * Grad / sqrt(MeanSquare + epsilon);
    Param - Moment. With `centered` the square of MeanGrad, a decaying mean gradient, is taken off MeanSquare under the root.
    """

    name = "rmsprop"
    inputs = ("Param", "MeanSquare", "MeanGrad?", "Grad", "Moment", "LearningRate")
    outputs = ("ParamOut", "MomentOut", "MeanSquareOut", "MeanGradOut?")
    attrs = {"epsilon": 1e-10, "decay": 0.9, "momentum": 0.0, "centered": False}
    inplace = (("Param", "ParamOut"), ("Moment", "MomentOut"), ("MeanSquare", "MeanSquareOut"), ("MeanGrad", "MeanGradOut"))
    scratch = 2

    @classmethod
    def infer(cls, param, square, mean, grad, moment, lr, **attrs):
        if attrs["centered"] and mean is None:
            raise ProgramError("op rmsprop with centered=True needs input 'MeanGrad', which was not given")
        return super().infer(param, square, mean, grad, moment, lr, **attrs)

    @staticmethod
    def scalars(xp, lr, **attrs):
        return lr

    @staticmethod
    def formula(xp, ins, outs, lr, t, *, epsilon, decay, momentum, centered):
        p, s, a, g, m = ins
        p_out, m_out, s_out, a_out = outs
        t, u = t
        _decaying_square(xp, s, g, decay, t, s_out)
        if centered:
            if a_out is None:
                a_out = u
            xp.multiply(g, 1.0 - decay, out=t)
            xp.multiply(a, decay, out=a_out)
            xp.add(a_out, t, out=a_out)
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
        for p, g, s, m, lr in _param_sets(2, (0.1,), positive=(0,)):
            yield Sample.of(p, s, None, g, m, lr, epsilon=1e-6, momentum=0.5, grad=(), why=_WHY)
            yield Sample.of(p, s, g * np.float32(0.1), g, m, lr, epsilon=1.0, centered=True, grad=(), why=_WHY)


class Ftrl(_Update):
    """Follow the regularized leader: sparse weights from l1, small ones from l2 (McMahan et al., 2013).

    With n = SquaredAccumulator + Grad^2 and r(x) = x ** -lr_power: LinearAccumulator grows by
    Grad - (r(n) - r(SquaredAccumulator)) / LearningRate * Param, and Param becomes
    (l1 * sign(linear) - linear) / (r(n) / LearningRate + 2 * l2) where |linear| is above l1, and 0 elsewhere.
    """

    name = "ftrl"
    inputs = ("Param", "SquaredAccumulator", "LinearAccumulator", "Grad", "LearningRate")
    outputs = ("ParamOut", "SquaredAccumOut", "LinearAccumOut")
    attrs = {"l1": 0.0, "l2": 0.0, "lr_power": -0.5}
    inplace = (("Param", "ParamOut"), ("SquaredAccumulator", "SquaredAccumOut"), ("LinearAccumulator", "LinearAccumOut"))
    scratch = 2

    @classmethod
    def infer(cls, param, square, linear, grad, lr, **attrs):
        super().infer(param, square, linear, grad, lr, **attrs)
        return param, square, linear

    @staticmethod
    def scalars(xp, lr, **attrs):
        return lr

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
        for p, g, n, z, lr in _param_sets(2, (0.1,), positive=(0,)):
            yield Sample.of(p, n, z, g, lr, grad=(), why=_WHY)
            yield Sample.of(p, n, z, g, lr, l1=0.5, l2=0.1, lr_power=-0.7, grad=(), why=_WHY)


class LambUpdate(_Update):
    """The direction of a LAMB step, before its length is set: Adam's direction plus weight_decay * Param (You et al., 2020).

    Update = m / (sqrt(v) + epsilon) + weight_decay * Param, where m and v are the new Moment1 and Moment2, bias-corrected when Beta1Pow
    and Beta2Pow are given. `lamb_apply` takes the step.
    """

    name = "lamb_update"
    inputs = ("Param", "Grad", "Moment1", "Moment2", "Beta1Pow?", "Beta2Pow?")
    outputs = ("Update", "Moment1Out", "Moment2Out")
    attrs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01}
    inplace = (("Moment1", "Moment1Out"), ("Moment2", "Moment2Out"))

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
        for p, g, m, v, b1, b2 in _param_sets(2, (0.9, 0.999), positive=(1,)):
            yield Sample.of(p, g, m, v, None, None, grad=(), why=_WHY)
            yield Sample.of(p, g, m, v, b1, b2, weight_decay=0.1, grad=(), why=_WHY)


class LambApply(_Update):
    """The parameter moved along Update with a step as long as the parameter: Param - LearningRate * |Param| / |Update| * Update.

    The squared norms are inputs; where one is 0 their ratio counts as 1.
    """

    name = "lamb_apply"
    inputs = ("Param", "Update", "ParamNormSq", "UpdateNormSq", "LearningRate")
    outputs = ("ParamOut",)
    inplace = (("Param", "ParamOut"),)

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
        for p, u, lr in _param_sets(0, (0.1,)):
            norms = [np.sum(np.square(a)).reshape(1) for a in (p, u)]
            yield Sample.of(p, u, *norms, lr, grad=(), why=_WHY)
            yield Sample.of(p, u * 0, norms[0], norms[1] * 0, lr, grad=(), why=_WHY)


class EmaUpdate(_Update):
    """A decaying average of a parameter: Decay * Ema + (1 - Decay) * Param."""

    name = "ema_update"
    inputs, outputs = ("Param", "Ema", "Decay"), ("EmaOut",)
    inplace = (("Ema", "EmaOut"),)

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
        for p, e, decay in _param_sets(0, (0.9,)):
            yield Sample.of(p, e, decay, grad=(), why=_WHY)
