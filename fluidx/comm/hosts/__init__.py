"""Ranks on several hosts, over any message layer: collectives by messages, and two levels with shared memory in a host."""
