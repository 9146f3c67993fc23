"""Scheduling: the order of communication operators and of pipeline stages."""
