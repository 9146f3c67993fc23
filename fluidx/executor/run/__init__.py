"""Running a plan: it is bound to arrays, its calls are made, and observers see them."""
