"""Programs with data-dependent shapes: they are cut at such operators, and each segment is planned when its shapes are known."""
