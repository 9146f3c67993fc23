"""Planning: it turns a program and shapes into the steps, storage and kernels of one run. Nothing runs here."""
