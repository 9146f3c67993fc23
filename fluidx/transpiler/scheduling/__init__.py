"""Scheduling: the order of communication and of pipeline stages."""
