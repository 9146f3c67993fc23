"""Losses, and what measures a prediction."""
