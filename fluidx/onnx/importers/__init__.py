"""Functions that import ONNX operators: one module for each kind of operator. `fluidx.onnx.import_tables` has the tables they fill."""
