"""What operators of several kinds need: shapes and dtypes, broadcasting, placement rules, blocked NumPy passes, sample arrays."""
