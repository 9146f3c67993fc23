"""Programs with data-dependent shapes: they are cut at such operators, and each segment is planned when its sizes are known."""
