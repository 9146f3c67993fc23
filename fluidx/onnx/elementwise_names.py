"""Elementwise operators that fluidx and ONNX both have as one operator: importers and exporters read the same table."""

UNARY = {
    "relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "abs": "Abs", "floor": "Floor",
    "ceil": "Ceil", "erf": "Erf", "sign": "Sign", "softsign": "Softsign", "softplus": "Softplus", "mish": "Mish",
    "reciprocal": "Reciprocal", "sin": "Sin", "cos": "Cos", "tan": "Tan", "sinh": "Sinh", "cosh": "Cosh", "asin": "Asin", "acos": "Acos",
    "atan": "Atan", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "logical_not": "Not", "bitwise_not": "BitwiseNot",
    "isnan": "IsNaN",
}  # fmt: skip
