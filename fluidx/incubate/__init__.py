"""fluid.incubate: fleet."""
