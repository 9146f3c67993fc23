"""The exceptions of fluidx, and helpers for their messages."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class FluidxError(Exception):
    """Base of every error that fluidx raises on purpose."""


class ProgramError(FluidxError, ValueError):
    """A program was written wrongly: a shape, dtype, attribute or name does not fit."""


class ParseError(ProgramError):
    """A program text is truncated, foreign or malformed."""


class VerifyError(FluidxError, ValueError):
    """A program, or a set of rank programs, was not proved right."""


class TranspileError(FluidxError, ValueError):
    """A program cannot be transpiled as asked."""


class FeedError(FluidxError, ValueError):
    """A feed or a fetch does not fit the program."""


class EOFException(FluidxError):
    """A data loader of the program is exhausted. The name is fluid's, whose training loops catch it."""


class NotInitializedError(FluidxError, RuntimeError):
    """A persistable variable has no value yet: the startup program was not run."""


class ExecutionError(FluidxError, RuntimeError):
    """An operator failed while a program ran: `operator`, where it is known."""

    operator: Any = None


class RankError(ExecutionError):
    """A rank failed, stalled or disagreed; the message names the rank and the operator. `process` is the launched process that holds it."""

    process: int | None = None

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


fluid_op: Callable[[str], str | None] | None = None  # the replacement for the name of an op in fluid; fluidx.layers sets it

_NEAR = 0.65  # the least share of common letters at which a name counts as a misspelling of another


def install(extra: str, *others: str) -> str:
    """How the packages of an extra are installed, or of others in its place: fluidx itself is on no package index.

    >>> install("onnx"), install("cuda13", "cuda12")
    ("in a checkout of fluidx: pip install -e '.[onnx]'", "in a checkout of fluidx: pip install -e '.[cuda13]' (or '.[cuda12]')")
    """
    instead = "".join(f" (or '.[{other}]')" for other in others)
    return f"in a checkout of fluidx: pip install -e '.[{extra}]'{instead}"


def misspelt(name: str, options: Iterable[str]) -> str:
    """The option that `name` misspells or begins, whatever the case of letters; "" if there is none."""
    folded = {o.casefold(): o for o in sorted(options, reverse=True)}
    said = str(name).casefold()
    close = difflib.get_close_matches(said, folded, n=1, cutoff=_NEAR)
    if not close and len(said) > 3:
        close = [o for o in sorted(folded) if o.startswith(said)]
    return folded[close[0]] if close else ""


def nearest(name: str, options: Iterable[str], what: str = "") -> str:
    """A hint for an unknown name: the option that it misspells or begins, whatever the case of letters, otherwise a list of the options.

    >>> nearest("ring_optimiser", ["ring_optimizer", "data_parallel"]), nearest("Relu", ["selu", "relu"])
    ("did you mean 'ring_optimizer'?", "did you mean 'relu'?")
    """
    options = sorted(options)
    if near := misspelt(name, options):
        return f"did you mean {near!r}?"
    listed = ", ".join(options[:16]) + (", ..." if len(options) > 16 else "")
    return f"{what or 'there are'}: {listed}" if options else f"{what or 'there are'}: none"


def explains_arguments(function: _F) -> _F:
    """A decorator: a TypeError for wrong arguments lists the arguments that the function takes.

    >>> explains_arguments(nearest)(name="Relu", option=["relu"])
    Traceback (most recent call last):
    TypeError: nearest() got an unexpected keyword argument 'option'; did you mean 'options'?
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as e:
            if e.__traceback__ is None or e.__traceback__.tb_next is not None:  # raised inside, not by the call
                raise
            message = _of_arguments(function, args, kwargs, str(e))
        raise TypeError(message)

    return call  # type: ignore[return-value]


def _of_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> str:
    all_names = list(inspect.signature(function).parameters)
    names = [n for n in all_names if n != "self"]
    if names != all_names:  # Python counts self
        message = re.sub(r"takes .* but (\d+) were given", lambda m: f"got {_counted(int(m[1]) - 1)} by position", message)
    if function.__name__ == "__init__":  # of a base class, perhaps: the user called the class
        message = message.replace(f"{function.__qualname__}()", f"{type(args[0]).__name__}()")
    unknown = [n for n in kwargs if n not in names]
    near = misspelt(unknown[0], names) if unknown else ""
    return f"{message}; {f'did you mean {near!r}?' if near else 'it takes: ' + (', '.join(names) or 'none')}"


def _counted(arguments: int) -> str:
    return f"{arguments} argument{'s' * (arguments != 1)}"
