"""`LayerHelper`: fluid's class for writing layers of your own, with its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._checks import wrong
from ..initializer import Initializer
from ..ir import Operator, Program, Variable, default_startup_program
from .helper import LayerWriter


class LayerHelper(LayerWriter):
    """Writes one layer: its parameters, operators, bias and activation. `kwargs` are the arguments of the layer, usually `**locals()`.

    >>> import fluidx as fx
    >>> def double(input, act=None, name=None):
    ...     helper = LayerHelper("double", **locals())
    ...     out = helper.create_variable_for_type_inference(dtype=input.dtype)
    ...     _ = helper.append_op(type="scale", inputs={"X": [input]}, outputs={"Out": [out]}, attrs={"scale": 2.0})
    ...     return helper.append_activation(out)
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     double(fx.data("x", [None, 3], "float32"), act="relu")
    <Variable double_0.tmp_1: f32[-1,3]>
    """

    # Positional only, because `**locals()` of a layer may contain any name: many losses have an argument `label`.
    def __init__(self, layer_type: str, name: str | None = None, label: str = "", /, **kwargs: Any):
        super().__init__(layer_type, kwargs.get("name", name), label)
        self.layer_type, self.kwargs = layer_type, kwargs

    @property
    def main_program(self) -> Program:
        return self.main

    @property
    def startup_program(self) -> Program:
        return default_startup_program()

    @property
    def param_attr(self) -> Any:
        return self.kwargs.get("param_attr")

    @property
    def bias_attr(self) -> Any:
        return self.kwargs.get("bias_attr")

    def input(self, input_param_name: str = "input") -> Variable:
        """The layer's only input."""
        return self.variable(self.kwargs.get(input_param_name), input_param_name)

    def multiple_input(self, input_param_name: str = "input") -> list[Variable]:
        """The layer's inputs."""
        return self.variables(self.kwargs.get(input_param_name), input_param_name)

    def input_dtype(self, input_param_name: str = "input") -> str:
        """The dtype of all inputs, which must be equal."""
        found = {v.dtype for v in self.multiple_input(input_param_name)}
        if len(found) > 1:
            raise wrong(f"{self.label}: {input_param_name} have several dtypes: {', '.join(sorted(found))}; cast them to one")
        return found.pop()

    def create_parameter(
        self, attr: Any, shape: Sequence[int], dtype: Any = "float32", is_bias: bool = False, default_initializer: Initializer | None = None
    ) -> Any:
        """A parameter; None if attr is False."""
        return self.parameter(attr, tuple(shape), dtype, is_bias, default_initializer)

    def create_variable_for_type_inference(self, dtype: Any = None, stop_gradient: bool = False) -> Variable:
        """A variable for a result. The operator that writes it determines its type."""
        return Variable(self.block, self.fresh())

    create_tmp_variable = create_variable_for_type_inference

    def create_variable(self, **kwargs: Any) -> Variable:
        """A variable of the current block."""
        return self.block.create_var(**kwargs)

    def create_global_variable(self, persistable: bool = False, **kwargs: Any) -> Variable:
        """A variable of the program."""
        return self.main.global_block().create_var(persistable=persistable, **kwargs)

    def append_op(
        self, type: str, inputs: Mapping[str, Any] | None = None, outputs: Mapping[str, Any] | None = None, attrs: Any = None
    ) -> Operator:
        """Append an operator to the current block."""
        return self.block.append_op(type, inputs, outputs, attrs)

    def append_bias_op(self, input_var: Variable, dim_start: int = 1, dim_end: int | None = None) -> Variable:
        """input_var plus a vector parameter along axis `dim_start`, unless the layer's `bias_attr` is False."""
        return self.add_bias(input_var, self.bias_attr, self.known(input_var, "the input of a bias", dim_start), dim_start)

    def append_activation(self, input_var: Variable) -> Variable:
        """input_var through the layer's `act`."""
        return self.activate(input_var, self.kwargs.get("act"))


__all__ = ["LayerHelper"]
