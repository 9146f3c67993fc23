"""fluid's fleet for parameter servers, which is not here: its names say what to write instead."""
