"""Scopes: arrays by name, which keep the values of persistable variables between runs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from ..ir.errors import FeedError, nearest
from .plan.allocation import copied, fetched, put


class ScopeTensor:
    """A variable's value in a scope, with fluid's accessors: `np.array(tensor)`, `tensor.set(array)`, `tensor.shape()`."""

    def __init__(self, scope: Scope, name: str):
        self._scope, self._name = scope, name

    def _array(self) -> Any:
        self._scope.sync()
        return self._scope.arrays[self._name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self._array()
        return np.array(fetched(value) if hasattr(value, "get") else value, dtype=dtype)

    def shape(self) -> list[int]:
        return list(self._array().shape)

    def set(self, array: Any, place: Any = None) -> None:
        self._scope.set(self._name, array)

    def __repr__(self) -> str:
        return f"<tensor {self._name}: {self._array().dtype}{self.shape()}>"


class ScopeVariable:
    """The variable that `scope.find_var(name)` returns, with fluid's `get_tensor()`."""

    def __init__(self, scope: Scope, name: str):
        self._tensor, self.name = ScopeTensor(scope, name), name

    def get_tensor(self) -> ScopeTensor:
        return self._tensor


class RankValues(Protocol):
    """An executor of many ranks that trained the variables of a scope."""

    def copy_to(self, scope: Scope) -> None:
        """Copy the values of the ranks into the scope."""


class Scope:
    """Arrays by name. Plans bind to the arrays themselves, so `set` writes into an array of the same type in place.

    >>> s = Scope(); s.set("w", np.ones(2, "float32")); np.array(s.find_var("w").get_tensor()).tolist()
    [1.0, 1.0]
    """

    def __init__(self, parent: Scope | None = None) -> None:
        self.arrays: MutableMapping[str, Any] = {} if parent is None else ChainMap({}, parent.arrays)
        self.steps: MutableMapping[Any, int] = WeakKeyDictionary()  # runs so far, by program
        self.newer_on_ranks: RankValues | None = None
        self.same_on_ranks: RankValues | None = None  # ranks whose values equal those of this scope
        self.parent = parent
        self._replaced = 0

    @property
    def version(self) -> int:
        """How often an array was replaced by another object."""
        return self._replaced if self.parent is None else self._replaced + self.parent.version

    @version.setter
    def version(self, value: int) -> None:
        self._replaced = value

    def sync(self) -> None:
        """Copy the newest values from ranks that trained the variables of this scope."""
        if self.newer_on_ranks is not None:
            ranks, self.newer_on_ranks = self.newer_on_ranks, None
            ranks.copy_to(self)
            self.same_on_ranks = ranks
        if self.parent is not None:
            self.parent.sync()

    def new_scope(self) -> Scope:
        """A child scope. It reads the variables of this scope; variables that it creates are not visible here.

        >>> s = Scope(); s.set("w", np.ones(1, "float32"))
        >>> inner = s.new_scope(); inner.set("v", np.zeros(1, "float32"))
        >>> inner.find_var("w").name, s.find_var("v")
        ('w', None)
        """
        return Scope(self)

    def var(self, name: str) -> ScopeVariable:
        """The variable of that name. It may have no value yet."""
        return ScopeVariable(self, name)

    def find_var(self, name: str) -> ScopeVariable | None:
        """The variable of that name; None if it has no value."""
        self.sync()
        return ScopeVariable(self, name) if name in self.arrays else None

    def local_var_names(self) -> list[str]:
        """The names of the variables that have values."""
        return list(self.arrays)

    def bind(self, name: str, array: Any) -> None:
        """Make `array` itself the storage of `name`."""
        self.arrays[name] = array
        self._replaced += 1
        self.same_on_ranks = None

    def set(self, name: str, value: Any) -> None:
        """Give `name` a value; an existing array must keep its shape and dtype (FeedError otherwise)."""
        self.sync()
        self.same_on_ranks = None
        value = np.asarray(value)
        old = self.arrays.get(name)
        if old is None:
            self.bind(name, copied(value))
            return
        if old.shape != value.shape or old.dtype != value.dtype:
            raise FeedError(
                f"variable {name!r} is {old.dtype}{list(old.shape)} in this scope, the new value is {value.dtype}{list(value.shape)}"
            )
        put(old, value)

    def get(self, name: str) -> np.ndarray:
        """A copy of the value as a NumPy array."""
        self.sync()
        if name not in self.arrays:
            raise FeedError(f"the scope holds no variable {name!r}; {nearest(name, self.arrays, 'it holds')}")
        return np.array(ScopeTensor(self, name))

    def drop_kids(self) -> None:
        """fluid's call. It does nothing: a scope keeps no reference to its child scopes."""


_global = Scope()


def global_scope() -> Scope:
    """The scope that executors use: the one given to `scope_guard`, else the default scope of the process."""
    return _global


@contextmanager
def scope_guard(scope: Scope) -> Iterator[None]:
    """Inside the block `global_scope()` is `scope`."""
    global _global
    old, _global = _global, scope
    try:
        yield
    finally:
        _global = old
