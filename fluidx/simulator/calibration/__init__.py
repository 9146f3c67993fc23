"""Calibration: measure what steps and messages take on this machine, and keep it in a file that `simulate` and `plan` read."""
