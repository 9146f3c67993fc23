"""Running a plan: arrays are bound to its steps, calls are made, and observers see them."""
