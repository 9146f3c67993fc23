import os

os.environ.setdefault("FLUIDX_SEED", "0")  # programs that name no seed are the same in every run
