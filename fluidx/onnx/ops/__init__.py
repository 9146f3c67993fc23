"""The operators of ONNX by family. A module has the importers and exporters that the table of `fluidx.onnx.table` cannot state as entries.

Modules named `..._formulas` write fluidx operators that ONNX lacks as basic nodes.
"""
