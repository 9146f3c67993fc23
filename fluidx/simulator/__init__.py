"""Prediction: what a step of all ranks takes, and why, before anything runs."""
