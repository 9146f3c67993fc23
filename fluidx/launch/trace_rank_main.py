"""The script of ranks that are processes under `fluidx trace`: it runs the user's, with a profiler on."""

import json
import sys

from fluidx.launch.trace import run_traced

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    how, script, *args = sys.argv[1:]
    run_traced(script, args, **json.loads(how))
