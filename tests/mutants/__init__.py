"""An attack on the proof: rank programs are broken at random, and what the proof accepts is run against one device.

    python -m tests.mutants                       the whole run, as `make mutants` does
    python -m tests.mutants --false-alarms 1000   right programs, which the proof must accept

Nothing here knows how the proof works or what a strategy inserts: mutators see Programs, and the judge is the executor.
"""

import os

os.environ.setdefault("FLUIDX_SEED", "0")  # programs that name no seed are the same in every run
