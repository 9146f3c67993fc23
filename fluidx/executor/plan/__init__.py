"""Planning: from a program and shapes to the steps, the storage and the kernels of one run. Nothing runs here."""
