"""Operators on quantized values: integers of 8 bits with a scale and a zero point."""
