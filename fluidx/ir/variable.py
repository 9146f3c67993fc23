"""Variable and Parameter: the user's handles on what a block declares, with arithmetic that writes operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import ProgramError
from .source_location import wrong
from .text import show_var

if TYPE_CHECKING:
    from .program import Block
    from .var import Var

# the functions behind `x + y`, `x < y`, `x[y]`, `-x` and `x.astype(y)`, by symbol; fluidx.ops fills it in
OPERATORS: dict[str, Callable[[Any, Any], Variable]] = {}

_FETCH = "run the program and fetch it: exe.run(main, feed=..., fetch_list=[x])"
# attributes of PyTorch tensors that variables of a program do not have, with a hint
_AS_IN_PYTORCH = dict.fromkeys(("numpy", "item", "tolist"), f"a variable has no value while the program is written; {_FETCH}") | {
    "backward": "an optimizer's minimize(loss) appends the gradients and the updates to the program",
    "to": "the place of an Executor is the device",
    "cpu": "the place of an Executor is the device",
    "cuda": "the place of an Executor is the device",
    "grad": "minimize(loss) gives the pairs (parameter, gradient), and fluidx.gradients(loss, x) the gradients of x",
    "detach": "set x.stop_gradient = True to cut the gradient here",
}


class Variable:
    """A name in a block. Arithmetic, comparison and slicing append operators to the program's current block."""

    __slots__ = ("block", "name")

    def __init__(self, block: Block, name: str):
        self.block = block
        self.name = name

    @property
    def desc(self) -> Var:
        return self.block.descs[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        """Raises ProgramError for a value that has none, such as a sequence, or a tensor of unknown rank."""
        try:
            return self.desc.type.shape
        except ProgramError as e:
            raise wrong(f"variable {self.name!r}: {e}") from None

    @property
    def dtype(self) -> str:
        """Raises ProgramError for a value that has none, such as a sequence."""
        try:
            return self.desc.type.dtype
        except ProgramError as e:
            raise wrong(f"variable {self.name!r}: {e}") from None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def grad_name(self) -> str:
        """The name that its gradient gets."""
        return f"{self.name}@GRAD"

    @property
    def lod_level(self) -> int:
        """0: there are no LoD tensors."""
        return 0

    @property
    def placement(self) -> Any:
        """How its parts are distributed over ranks."""
        return self.desc.placement

    def _set(self, **changes: Any) -> None:
        self.block.declare(self.desc.changed(**changes))

    @property
    def persistable(self) -> bool:
        """Does the value outlive a run?"""
        return self.desc.persistable

    @persistable.setter
    def persistable(self, value: bool) -> None:
        self._set(persistable=bool(value))

    @property
    def stop_gradient(self) -> bool:
        """Does the backward pass stop here?"""
        return self.desc.stop_gradient

    @stop_gradient.setter
    def stop_gradient(self, value: bool) -> None:
        self._set(stop_gradient=bool(value))

    @property
    def is_resized(self) -> bool:
        """May its open sizes change while a program runs? Then they are equal to no others."""
        return bool(self.desc.attrs.get("resized"))

    @is_resized.setter
    def is_resized(self, value: bool) -> None:
        self._set(attrs={**{k: v for k, v in self.desc.attrs.items() if k != "resized"}, **({"resized": True} if value else {})})

    @property
    def is_data(self) -> bool:
        """Is it fed?"""
        return self.desc.is_data

    @property
    def type(self) -> Any:
        """The type: f32[-1,10], seq<f32[n]>."""
        return self.desc.type

    @property
    def error_clip(self) -> Any:
        """The limits (min, max) of its gradient in the backward pass; None for no limits. Set it to a clip.ErrorClipByValue."""
        return self.desc.attrs.get("error_clip")

    @error_clip.setter
    def error_clip(self, clip: Any) -> None:
        if clip is not None and not hasattr(clip, "attach"):
            raise wrong(f"variable {self.name!r}: error_clip must be a clip.ErrorClipByValue or None, got {clip!r:.60}")
        if clip is None:
            self._set(attrs={k: v for k, v in self.desc.attrs.items() if k != "error_clip"})
        else:
            clip.attach(self)

    # -- operators: what they write is registered by fluidx.ops ----------------------------------------------------------------

    def astype(self, dtype: Any) -> Variable:
        """The variable converted to another dtype, as `layers.cast` does."""
        return OPERATORS["astype"](self, dtype)

    def __neg__(self) -> Variable:
        return OPERATORS["neg"](self, None)

    def __add__(self, o: Any) -> Variable:
        return OPERATORS["+"](self, o)

    __radd__ = __add__

    def __sub__(self, o: Any) -> Variable:
        return OPERATORS["-"](self, o)

    def __rsub__(self, o: Any) -> Variable:
        return OPERATORS["-"](o, self)

    def __mul__(self, o: Any) -> Variable:
        return OPERATORS["*"](self, o)

    __rmul__ = __mul__

    def __truediv__(self, o: Any) -> Variable:
        return OPERATORS["/"](self, o)

    def __rtruediv__(self, o: Any) -> Variable:
        return OPERATORS["/"](o, self)

    def __pow__(self, o: Any) -> Variable:
        return OPERATORS["**"](self, o)

    def __rpow__(self, o: Any) -> Variable:
        return OPERATORS["**"](o, self)

    def __mod__(self, o: Any) -> Variable:
        return OPERATORS["%"](self, o)

    def __floordiv__(self, o: Any) -> Variable:
        return OPERATORS["//"](self, o)

    def __matmul__(self, o: Variable) -> Variable:
        return OPERATORS["@"](self, o)

    def __lt__(self, o: Any) -> Variable:
        return OPERATORS["<"](self, o)

    def __le__(self, o: Any) -> Variable:
        return OPERATORS["<="](self, o)

    def __gt__(self, o: Any) -> Variable:
        return OPERATORS[">"](self, o)

    def __ge__(self, o: Any) -> Variable:
        return OPERATORS[">="](self, o)

    # == and != write operators, as in fluid; the hash is that of program and name
    def __eq__(self, o: Any) -> Any:
        return OPERATORS["=="](self, o)

    def __ne__(self, o: Any) -> Any:
        return OPERATORS["!="](self, o)

    def __getitem__(self, index: Any) -> Variable:
        """Slice with integers, slices, None and Ellipsis; an integer drops its axis."""
        return OPERATORS["[]"](self, index)

    def __hash__(self) -> int:
        return hash((id(self.block.program), self.name))

    def __bool__(self) -> bool:
        """True, as in fluid: `if bias:` asks whether there is a variable. Of a comparison it is an error: `if x > 0:` asks for a value."""
        if getattr(self.desc.type, "dtype", "") != "bool":
            return True
        raise wrong(f"variable {self.name!r} has no value while the program is written; use layers.cond or layers.While")

    # Conversion to an array and iteration need values, which do not exist yet. Iteration by __getitem__ would never end.
    __array_ufunc__ = None

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._without_value("it cannot become a NumPy array; fluidx.layers has functions of variables")

    def __iter__(self) -> Any:
        raise self._without_value("a Python loop cannot go over it; use x[i], layers.split or layers.unstack for its parts")

    def __len__(self) -> int:
        raise self._without_value(f"its shape is {list(self.shape)}; layers.shape(x) computes it in the run")

    def __float__(self) -> float:
        raise self._without_value(_FETCH)

    __int__ = __index__ = __float__

    def __getattr__(self, name: str) -> Any:
        hint = f"; {_AS_IN_PYTORCH[name]}" if name in _AS_IN_PYTORCH else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def _without_value(self, hint: str) -> ProgramError:
        return wrong(f"variable {self.name!r} has no value while the program is written; {hint}")

    def __repr__(self) -> str:
        d = self.desc
        return f"<{type(self).__name__} {self.name}: {d.type}{', persistable' if d.persistable else ''}>"

    def to_string(self, throw_on_error: bool = True, with_details: bool = False) -> str:
        """The declaration as text."""
        return show_var(self.desc)

    __str__ = __repr__


class Parameter(Variable):
    """A persistable variable that optimizers train."""

    __slots__ = ()

    @property
    def trainable(self) -> bool:
        """Do optimizers train it?"""
        return bool(self.desc.attrs.get("trainable", True))

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._set(attrs={**self.desc.attrs, "trainable": bool(value)}, stop_gradient=not value)

    @property
    def optimize_attr(self) -> dict[str, float]:
        """Settings for optimizers: `learning_rate`, a factor."""
        return {"learning_rate": self.desc.attrs.get("learning_rate", 1.0)}

    @property
    def regularizer(self) -> Any:
        """("l1" | "l2", coefficient), or None."""
        return self.desc.attrs.get("regularizer")
