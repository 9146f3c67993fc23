"""Passes that add low-rank adapters to a program, and the adapters that a program has.

A is a parameter `<module>.lora_A.weight` of shape [rank, in], and B is `<module>.lora_B.weight` of shape [out, rank], as in PEFT. Of a
convolution A is a filter [rank, in, height, width], and B one of [out, rank, 1, 1].
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from ..initializer import Constant, Uniform, derive_seed
from ..ir import Block, Builder, Operator, Program, ProgramError, ProgramPair, Role, Variable, flow, program_guard
from ..ir.errors import nearest
from ..ir.pass_base import ONE_DEVICE, Job, Pass
from ..layers import create_parameter
from .errors import OnnxError
from .lora import Lora, module_of, unique_modules
from .program_writer import valid_name
from .training_passes import exclude_from_training

A, B = ".lora_A.weight", ".lora_B.weight"
_OF_INTEGERS = "matmul_n_bits"


class WeightProduct(NamedTuple):
    """A product of a computed value and a weight of two axes: an operator, its weight, the sizes of the axes that it sums and keeps, and
    whether it multiplies by the transpose. Its factor is that of the product alone, or, if `outer`, that of its sum with an adapter: ONNX
    has a product with a factor, Gemm, for two axes, and multiplies others afterwards. A convolution has a window, and sums over channels
    and window."""

    op: Operator
    weight: str
    rows: int
    columns: int
    transposed: bool = False
    factor: float = 1.0
    outer: bool = True
    window: tuple[int, ...] = ()

    @property
    def x(self) -> str:
        """The name of the computed value."""
        return self.op.inputs["Input" if self.window else "X"][0]


def products(program: Program) -> Iterator[WeightProduct]:
    """The products that can be adapted, in execution order. The weight may be transposed, or converted to another float, before."""
    block = program.global_block()
    makers = {n: op for op in block.oplist for n in op.output_arg_names}
    for op in block.oplist:
        if op.role is not Role.FORWARD:
            continue
        if op.type == "conv2d" and op.attrs["groups"] == 1:
            weight, _ = _origin(block, makers, op.inputs["Filter"][0], ndim=4)
            if weight is not None and _origin(block, makers, op.inputs["Input"][0], ndim=4)[0] is None:
                out, *sizes = block.desc(weight).type.shape
                yield WeightProduct(op, weight, prod(sizes), out, window=tuple(sizes[1:]))
        elif op.type == _OF_INTEGERS and block.desc(y := op.inputs["Y"][0]).is_parameter:
            yield WeightProduct(op, y, block.desc(op.inputs["X"][0]).type.shape[-1], block.desc(y).type.shape[0])
        if op.type not in ("matmul", "mul"):
            continue
        (x,), (y,) = op.inputs["X"], op.inputs["Y"]
        weight, transposed = _origin(block, makers, y)
        if weight is None or _origin(block, makers, x)[0] is not None or block.desc(x).type.ndim < 2:
            continue
        rows, columns = block.desc(y).type.shape
        if op.type == "matmul":
            turned = bool(op.attrs["transpose_y"])
            rows, columns, transposed = (columns, rows, not transposed) if turned else (rows, columns, transposed)
        elif op.attrs["x_num_col_dims"] != block.desc(x).type.ndim - 1:
            continue
        yield WeightProduct(op, weight, rows, columns, transposed, float(op.attrs.get("alpha", 1.0)), block.desc(x).type.ndim > 2)


def has_integer_weights(program: Program) -> bool:
    """Are there products with a weight of integers? No adapter can be added to it."""
    return any(op.type == _OF_INTEGERS for op in program.ops)


def _origin(block: Block, makers: Mapping[str, Operator], name: str, ndim: int = 2) -> tuple[str | None, bool]:
    """The float parameter of `ndim` axes that a value is, or is in another precision, or, of two axes, the transpose of; is it that?"""
    transposed = False
    passed = ("transpose", "cast") if ndim == 2 else ("cast",)
    while (maker := makers.get(name)) is not None and maker.type in passed and block.desc(name).type.is_float:
        transposed ^= maker.type == "transpose" and tuple(maker.attrs["axis"]) == (1, 0)
        name = maker.inputs["X"][0]
    desc = block.desc(name)
    known = desc.is_parameter and desc.type.ndim == ndim and desc.type.is_float and name not in makers
    return name if known else None, transposed


def product_modules(program: Program, known: Mapping[str, str], without: Container[str] = ()) -> dict[str, str]:
    """The weights of products that can be adapted -> their modules, which are `known` or follow from their names."""
    found = unique_modules(_scopes(program, known))  # all of them, so that names do not depend on what is trained
    return {w: m for w, m in found.items() if w not in without}


def _scopes(program: Program, known: Mapping[str, str]) -> dict[str, str]:
    """The same, where several weights may have one module."""
    return {p.weight: known.get(p.weight) or module_of(p.weight) or p.weight for p in products(program)}


@dataclass(frozen=True)
class AddAdapters(Pass):
    """Products with a target's weight get an adapter, and no other parameter is trained, except those that `also_train` names.

    `modules` are pairs (parameter, module) of weights whose names do not say their module.
    """

    lora: Lora = Lora()
    modules: tuple[tuple[str, str], ...] = ()
    requires = (ONE_DEVICE,)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        trained = self._trained(pair.main)
        found = [p for p in products(pair.main) if p.weight not in trained]
        if not found and any(op.type == "fake_quantize" for op in pair.main.ops):
            raise OnnxError(f"Lora: the weights of {pair.main.label()} are rounded to 8 bits, and adapters add to float weights; "
                            "train those of the float model, merge them, and quantize the merged one")  # fmt: skip
        if there := next((p.weight for p in found if p.weight.endswith((A, B))), None):
            raise OnnxError(f"Lora: {pair.main.label()} has adapters already, such as {there}")
        modules = product_modules(pair.main, dict(self.modules), trained)
        linear = {p.weight for p in found if not p.window}
        chosen = self.lora.chosen(list(modules.items()), _scopes(pair.main, dict(self.modules)), linear)
        adapted = {id(p.op): p for p in found if p.weight in chosen}
        _expect_one_kind(list(adapted.values()))
        main, startup = pair.main.copy(), pair.startup.copy()
        made: dict[str, tuple[Variable, Variable]] = {}
        block = main.global_block()
        for parameter in main.all_parameters():
            if parameter.name not in trained:
                exclude_from_training(block, parameter.name)
        block.oplist, ops = [], block.oplist
        for op in ops:
            p = adapted.get(id(op))
            if p is None:
                block.oplist.append(op)
                continue
            if p.weight not in made:
                with program_guard(main, startup):
                    made[p.weight] = self._parameters(block, modules[p.weight], p)
            self._write(block, p, *made[p.weight])
        _pass_gradients(block, pair.main.global_block())
        return ProgramPair(main, startup)

    def _trained(self, program: Program) -> set[str]:
        """The parameters that are trained as they are."""
        names, found = {p.name for p in program.all_parameters()}, set[str]()
        for pattern in self.lora.also_train:
            like = {n for n in names if fnmatchcase(n, pattern)}
            if not like:
                raise OnnxError(f"Lora: also_train names {pattern!r}, which no parameter is called; {nearest(pattern, names, 'they are')}")
            found |= like
        return found

    def _parameters(self, block: Block, module: str, p: WeightProduct) -> tuple[Variable, Variable]:
        """A and B. A starts as PEFT's does: Kaiming's uniform distribution with a slope of sqrt(5)."""
        rank = self.lora.rank
        if rank > min(p.rows, p.columns):
            raise OnnxError(f"Lora: rank {rank} is more than the {min(p.rows, p.columns)} that the weight of {module!r}, "
                            f"{p.rows} x {p.columns}, can have; give a smaller rank, or leave the module out of targets")  # fmt: skip
        dtype, bound = _dtype(block, p), p.rows**-0.5
        name, inner = valid_name(module), [p.rows // prod(p.window), *p.window]
        a = create_parameter([rank, *inner], dtype, name + A, default_initializer=Uniform(-bound, bound))
        return a, create_parameter([p.columns, rank, *[1] * len(p.window)], dtype, name + B, default_initializer=Constant(0.0))

    def _write(self, block: Block, p: WeightProduct, a: Variable, b: Variable) -> None:
        """The product under another name, the adapter, and their sum under the name of the product."""
        (out,), y = p.op.output_arg_names, block.desc(p.op.output_arg_names[0])
        base = f"{out}.base"
        if block.has_var(base):
            raise ProgramError(f"{block.program.label()} has a variable {base!r}, the name of the product of {p.op.to_string()}")
        block.declare(y.changed(name=base))
        block.oplist.append(p.op.renamed({out: base}, outputs=True))
        w = Builder(block, role=p.op.role)
        w.site, w.device = p.op.site, p.op.device
        x, dtype = block.var(p.x), a.desc.type.dtype
        if x.desc.type.dtype != dtype:
            x = w.cast(x, dtype=dtype, name=f"{out}.lora_X")
        if self.lora.dropout:
            seed, how = derive_seed(block.program, out), "upscale_in_train"
            x, _ = w.dropout(x, dropout_prob=float(self.lora.dropout), seed=seed, dropout_implementation=how, name=f"{out}.lora_D")
        factor, to = self.lora.scale * p.factor / _inner(p), f"{out}.lora_B"
        if p.window:
            low = w.conv2d(x, a, **p.op.attrs, name=f"{out}.lora_A")
            up = w.scale(w.conv2d(low, b, data_format=p.op.attrs["data_format"], name=f"{out}.lora_C"), scale=factor, name=to)
        else:
            low = w.matmul(x, a, transpose_x=p.op.attrs.get("transpose_x", False), transpose_y=True, name=f"{out}.lora_A")
            up = w.matmul(low, b, transpose_y=True, alpha=factor, name=to)
        if y.type.dtype != dtype:
            up = w.cast(up, dtype=y.type.dtype, name=f"{out}.lora_Y")
        w.elementwise_add(block.var(base), up, name=out)


def _pass_gradients(block: Block, before: Block) -> None:
    """Gradients pass values that no trained parameter had a part in before, and now has: behind weights that are stored as integers."""
    makers = {n: op for op in before.oplist for n in op.output_arg_names}
    for op in block.oplist:
        if all(block.desc(n).stop_gradient for n in op.input_arg_names):
            continue
        for n in op.output_arg_names:
            d, maker = block.desc(n), makers.get(n)
            if d.stop_gradient and d.type.is_float and maker and all(before.desc(x).stop_gradient for x in maker.input_arg_names):
                block.declare(d.changed(stop_gradient=False))


def _expect_one_kind(adapted: Sequence[WeightProduct]) -> None:
    """Raise OnnxError where no change of one weight would have the effect of its adapter, so that it could not be merged."""
    first = dict[str, WeightProduct]()
    for p in adapted:
        other = first.setdefault(p.weight, p)
        if not p.factor:
            raise OnnxError(f"Lora: the product {p.op.output_arg_names[0]!r} multiplies the weight {p.weight!r} by alpha=0, so no "
                            "change of the weight has the effect of an adapter; give targets that leave the weight out")  # fmt: skip
        if (p.transposed, _inner(p)) != (other.transposed, _inner(other)):
            how = " and ".join(f"{q.op.output_arg_names[0]!r} ({_kind(q)})" for q in (other, p))
            raise OnnxError(f"Lora: the weight {p.weight!r} is read in two ways, so no single change of it has the effect of an adapter: "
                            f"by the products {how}; give targets without it, or load the model with untie={p.weight!r}")  # fmt: skip


def _inner(p: WeightProduct) -> float:
    """The factor of the product without that of its adapter."""
    return 1.0 if p.outer else p.factor


def _kind(p: WeightProduct) -> str:
    return ("its transpose" if p.transposed else "as it is") + f", alpha={_inner(p):g}" * (_inner(p) != 1.0)


def _dtype(block: Block, p: WeightProduct) -> str:
    """The dtype of adapters: that of the weight, or float32 for 16-bit weights."""
    own = str(block.desc(p.weight).type.dtype)
    return own if own == "float64" else "float32"


@dataclass(frozen=True)
class RemoveAdapters(Pass):
    """The program without its adapters: the products have their own names again."""

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        new = program.copy()
        block = new.global_block()
        back = {f"{out}.base": out for _, _, out in _adapters(block)}
        kept = [op for op in block.oplist if op.output_arg_names[:1] not in [(out,) for out in back.values()]]
        block.oplist = [op.renamed(back, outputs=True) for op in kept]
        live = flow.live_ops(new, job.fetched(program), given=set())
        used = {n for op in live for n in (*flow.reads(new, op), *flow.writes(new, op))}
        block.oplist = live
        block.descs = {n: d for n, d in block.descs.items() if n in used or d.is_data}
        return new


def _adapters(block: Block) -> Iterator[tuple[Operator, str, str]]:
    """The operator with the factor of each adapter, its B, and the name of the product that it adds to. Mixed precision casts B."""
    makers = {n: op for op in block.oplist if op.role is Role.FORWARD for n in op.output_arg_names}
    for op in block.oplist:
        if op.type in ("matmul", "scale") and op.output_arg_names[0].endswith(".lora_B"):
            if op.type == "matmul":
                name, _ = _origin(block, makers, op.inputs["Y"][0])
            else:
                name, _ = _origin(block, makers, makers[op.inputs["X"][0]].inputs["Filter"][0], ndim=4)
            if name is not None and name.endswith(B):
                yield op, name, op.output_arg_names[0].removesuffix(".lora_B")


class Adapter(NamedTuple):
    """An adapter of a program: its module, weight, rank, scale and rate of dropout."""

    module: str
    weight: str
    rank: int
    scale: float
    dropout: float


def adapters_of(program: Program) -> list[Adapter]:
    """The adapters of a program, in execution order."""
    block, found = program.global_block(), dict[str, Adapter]()
    known = {p.op.output_arg_names[0].removesuffix(".base"): p for p in products(program)}
    rates = {op.output_arg_names[0]: op.attrs["dropout_prob"] for op in block.oplist if op.type == "dropout"}
    for op, name, out in _adapters(block):
        rank, rate = block.desc(name).type.shape[1], float(rates.get(f"{out}.lora_D", 0.0))
        p = known.get(out)
        scale = op.attrs["alpha" if op.type == "matmul" else "scale"]
        scale = scale if p is None else scale * _inner(p) / p.factor
        found[name] = Adapter(name.removesuffix(B), "" if p is None else p.weight, rank, scale, rate)
    return list(found.values())
