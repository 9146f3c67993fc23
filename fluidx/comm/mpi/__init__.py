"""Ranks as MPI processes: the message layer, mpirun, and how ranks connect."""
