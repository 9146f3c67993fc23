"""Matrix products and reductions."""
