"""Scopes hold the values of persistable variables between runs."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..ir.errors import FeedError, nearest
from .memory import copied, fetched, put


class ScopeTensor:
    """A variable's value in a scope, with fluid's accessors: `np.array(tensor)`, `tensor.set(array)`, `tensor.shape()`."""

    def __init__(self, scope: Scope, name: str):
        self._scope, self._name = scope, name

    def _array(self) -> Any:
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
    """What `scope.find_var(name)` gives."""

    def __init__(self, scope: Scope, name: str):
        self._tensor, self.name = ScopeTensor(scope, name), name

    def get_tensor(self) -> ScopeTensor:
        return self._tensor


class Scope:
    """Arrays by name. Plans bind to the arrays themselves, so `set` writes into an array of the same type in place.

    >>> s = Scope(); s.set("w", np.ones(2, "float32")); np.array(s.find_var("w").get_tensor()).tolist()
    [1.0, 1.0]
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.version = 0  # counts the times an array was replaced by another object
        self.steps: MutableMapping[Any, int] = WeakKeyDictionary()  # runs so far, by program

    def var(self, name: str) -> ScopeVariable:
        return ScopeVariable(self, name)

    def find_var(self, name: str) -> ScopeVariable | None:
        return ScopeVariable(self, name) if name in self.arrays else None

    def local_var_names(self) -> list[str]:
        return list(self.arrays)

    def bind(self, name: str, array: Any) -> None:
        """Make `array` itself the storage of `name`."""
        self.arrays[name] = array
        self.version += 1

    def set(self, name: str, value: Any) -> None:
        """Give `name` a value; an existing array must keep its shape and dtype (FeedError otherwise)."""
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
        if name not in self.arrays:
            raise FeedError(f"the scope holds no variable {name!r}; {nearest(name, self.arrays, 'it holds')}")
        return np.array(ScopeTensor(self, name))

    def drop_kids(self) -> None:
        """fluid's call; scopes here have no children to drop."""


_global = Scope()


def global_scope() -> Scope:
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
