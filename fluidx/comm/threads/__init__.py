"""Communicators of ranks that are threads of one process: in Python, and in C."""
