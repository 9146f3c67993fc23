"""Parameter updates: one operator for a whole step of an optimizer."""
