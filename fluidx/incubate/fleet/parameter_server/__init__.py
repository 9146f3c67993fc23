"""fluid's fleet for parameter servers. It is not supported; its names raise an ImportError that names the replacement."""
