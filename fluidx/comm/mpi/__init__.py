"""Ranks as MPI processes: the world, collectives made of messages, and hosts whose ranks share memory."""
