"""Parameter updates: each operator is a whole step of an optimizer for one parameter."""
