"""Communication operators: collectives, messages, and operators between placements."""
