"""`load` turns an ONNX model into a program to train, transpile and export again. Open axes stay open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from ..ir import Parameter, ProgramError, Variable, unique_name
from ..ir.dtypes import HALVES
from ..ir.errors import nearest
from .constants import output
from .errors import OnnxError
from .half_precision import in_precision
from .importer import Importer
from .lora import weight_modules
from .normalize import initialized
from .rank_models import refuse_rank_model
from .read import parse_model, read
from .roles import Roles, with_own_copies
from .sessions import Session
from .values import FrozenPart, Weight
from .whole_model import WholeModel, import_model


class OnnxModel:
    """An ONNX model as programs. `program` computes `fetches` from `feeds`, which are lists of variables; `startup` initialises the
    parameters. `modules` has the module of each weight, by the names that the file has.

    `model["name"]` is the variable for a value of the model. Build a loss on it under `fx.program_guard(model.program, model.startup)`.
    """

    def __init__(self, proto: Any, importer: Importer, modules: Mapping[str, str]):
        self.program, self.startup = importer.main, importer.startup
        self.proto, self.modules = proto, modules
        self._importer = importer
        self._session: Session | None = None
        given = initialized(proto.graph)
        self.feeds = [self[i.name] for i in proto.graph.input if i.name not in given]
        self.fetches = [self._output(o) for o in proto.graph.output]
        self.outputs = {o.name: v for o, v in zip(proto.graph.output, self.fetches)}
        whole = WholeModel.of(importer, [i.name for i in proto.graph.input if i.name not in given], [o.name for o in proto.graph.output])
        self._whole: WholeModel | Literal[False] = whole if whole.is_plain() else False

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of `program`, in the order of their first use."""
        return self.program.all_parameters()

    @property
    def trained_names(self) -> dict[str, str]:
        """Names of weights in the model -> names of the parameters of `program` that hold them. These are trained unless frozen."""
        return self._names(Weight)

    @property
    def frozen_names(self) -> dict[str, str]:
        """The same for the parts of quantized weights, which are not trained."""
        return self._names(FrozenPart)

    def _names(self, kind: type[Weight] | type[FrozenPart]) -> dict[str, str]:
        found = {w.name: v for w, v in self._importer._made.values() if isinstance(w, kind)}
        return {name: v.name for name, v in found.items() if self.program.global_block().has_var(v.name)}

    @property
    def parameter_modules(self) -> dict[str, str]:
        """Names of parameters of `program` -> the modules of the weights that they hold."""
        names = self.trained_names | self.frozen_names
        return {own: self.modules[name] for name, own in names.items() if name in self.modules}

    @property
    def half(self) -> str:
        """The dtype of weights in 16 bits of the file: "float16" or "bfloat16"; "" if there are none."""
        counts = Counter[str]()
        for w, v in self._importer._made.values():
            if isinstance(w, Weight) and w.array.dtype.name in HALVES and self.program.global_block().has_var(v.name):
                counts[w.array.dtype.name] += w.array.size
        return max(counts, key=lambda name: counts[name], default="")

    def in_own_precision(self, optimizer: Any) -> Any:
        """An optimizer that trains in the precision of the file: of a model in 16 bits, `mixed_precision.decorate` with float32 parameters,
        and a scaled loss for float16; otherwise the optimizer itself. Call `set_training` first."""
        return in_precision(optimizer, self.half)

    @property
    def precision(self) -> str:
        """A sentence about how a model in 16 bits is trained; "" for other models."""
        scaled = ", and the loss is scaled" if self.half == "float16" else ""
        return f"weights in {self.half}: products are trained in {self.half}, parameters and loss in float32{scaled}" if self.half else ""

    def _output(self, info: Any) -> Variable:
        try:
            return output(self._importer, info)
        except ProgramError as e:
            raise OnnxError(f"output {info.name!r} is not a variable of the program: {e}") from None

    def __getitem__(self, name: str) -> Variable:
        """The variable for a value of the model. Raises OnnxError if there is none."""
        env = self._importer.env
        if name not in env:
            raise OnnxError(f"the model has no value {name!r}; {nearest(name, env, 'it has')}")
        try:
            return self._importer.variable(env[name])
        except ProgramError as e:
            raise OnnxError(f"value {name!r} is not a variable of the program: {e}") from None

    def run(self, feed: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """The outputs for inputs by name or in order, of any shape that the model supports. Parameters have the values of the file."""
        if self._session is None:
            self._session = Session(self.proto, self._whole)
        return self._session.run(feed)

    def __repr__(self) -> str:
        return f"<OnnxModel of {self.program!r}: {', '.join(v.name for v in self.feeds)} -> {', '.join(v.name for v in self.fetches)}>"


def load(
    source: Any,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    also_train: str | Sequence[str] = (),
    untie: bool | str | Sequence[str] = (),
) -> OnnxModel:
    """The program of a model, from a path, bytes or a ModelProto.

    Open axes of the model stay open and keep their names. `shapes` gives sizes of inputs by name, if the program needs them, or opens axes
    that the model fixes (-1 or a name).

    Float initializers are parameters. A single number that only arithmetic reads, such as the scale of an attention or a limit, is a
    constant; `also_train`, names or patterns, makes it a parameter. If an exporter merged running statistics with equal initializers, they
    become initializers of their own. A weight that several nodes read trains as one; `untie`, True or names or patterns, gives each node a
    weight of its own, which is right for equal weights that an exporter merged, and wrong for an embedding that the output layer shares.

    Raises OnnxError if the source is not a model, and for operators that fluidx does not support, all of which it names.

    >>> import fluidx as fx
    >>> from onnx import TensorProto, helper
    >>> x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 2]) for n in "xy")
    >>> proto = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "small", [x], [y]))
    >>> model = fx.onnx.load(proto)
    >>> print(model, model["y"].shape)
    <OnnxModel of <Program small: 1 ops, 0 params>: x -> y> (batch, 2)
    """
    if shapes is not None and not isinstance(shapes, Mapping):
        raise OnnxError(f'shapes are given by name, such as {{"image": [-1, 3, 224, 224]}}, not as {type(shapes).__name__}')
    source = parse_model(source)
    refuse_rank_model(source)
    proto = read(source, strict=True)
    proto = with_untied(proto, untie)
    own = source.producer_name == "fluidx"
    roles = Roles(proto.graph)
    trained = _named("also_train", also_train, roles.floats(), "float")
    trained |= set(roles.tensors) if own else set()  # fluidx exports constants as nodes
    with unique_name.guard():  # each load of a model gives the same names
        constants = () if own else set(roles.constants())
        made = import_model(proto, shapes or {}, own, constants_train=not own, constants=constants, trained=trained, fake_quantized=True)
    modules = weight_modules(proto.graph) | weight_modules(source.graph)  # conversion drops the metadata of nodes, untying adds weights
    return OnnxModel(proto, made, modules)


def with_untied(proto: Any, untie: bool | str | Sequence[str]) -> Any:
    """The model with statistics of their own for normalizations, and weights of their own for the nodes that `untie` says."""
    shared = Roles(proto.graph).shared()
    return with_own_copies(proto, shared if untie is True else _named("untie", untie or (), list(shared), "shared weight"))


def _named(option: str, patterns: str | Sequence[str], names: Sequence[str], what: str) -> set[str]:
    """The names that match a pattern. Raises OnnxError for a pattern without a match."""
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise OnnxError(f"{option} must be a name, a pattern or a list of them, got {patterns!r}")
    found = set[str]()
    for p in patterns:
        like = {n for n in names if fnmatchcase(n, p)}
        if not like:
            raise OnnxError(f"{option} names {p!r}, but no {what} of the model has that name; {nearest(p, names, 'they are')}")
        found |= like
    return found
