"""InferenceTranspiler: fold batch normalization into parameters, so that inference does not compute it in every run."""

from __future__ import annotations

from typing import Any

from ._checks import wrong
from .executor import Scope, global_scope
from .ir import NotInitializedError, Program
from .rewrite.batch_norm import fold_batch_norms


class InferenceTranspiler:
    """Folds batch normalization into the convolution or product before it, with or without a bias between them.

    As in fluid, the program is changed, and so are filters and biases in the scope: a program that trains on the same scope would go on
    from rescaled filters, so give a scope of its own to a program that is folded while training goes on.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     y = fx.layers.batch_norm(fx.layers.conv2d(fx.data("x", [-1, 3, 8, 8]), 4, 3, bias_attr=False), is_test=True)
    >>> exe, scope = fx.Executor(), fx.Scope()
    >>> _ = exe.run(startup, scope=scope)
    >>> fx.InferenceTranspiler().transpile(main, fx.CPUPlace(), scope)
    >>> [op.type for op in main.ops]
    ['conv2d', 'elementwise_add']
    """

    def __init__(self) -> None:
        self._log: list[str] = []

    def transpile(self, program: Program, place: Any = None, scope: Scope | None = None) -> None:
        """Fold all normalizations that can be folded. `place` is fluid's argument and has no effect; `scope` is by default the global one.

        Results differ from the program's before by rounding. A value between the operators that become one cannot be fetched as it
        was. Raises ProgramError for a program that trains: give it program.clone(for_test=True).
        """
        if not isinstance(program, Program):
            raise wrong(f"InferenceTranspiler: program must be a Program, got {type(program).__name__}")
        if scope is not None and not isinstance(scope, Scope):
            raise wrong(f"InferenceTranspiler: scope must be a Scope, got {type(scope).__name__}")
        held = scope if scope is not None else global_scope()

        def value(name: str) -> Any:
            if name not in held.arrays:
                raise NotInitializedError(
                    f"InferenceTranspiler: {name!r} has no value in this scope; run the startup program or load it first"
                )
            return held.get(name)

        folded = fold_batch_norms(program, value)
        program.become(folded.program)
        for name, array in folded.values.items():
            held.set(name, array)
        self._log = list(folded.log)

    def explain(self) -> list[str]:
        """The normalizations that the last transpile did not fold, with reasons."""
        return self._log
