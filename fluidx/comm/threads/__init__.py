"""Ranks as threads of one process: the communicator, its locks, and the calls into the C kernels."""
