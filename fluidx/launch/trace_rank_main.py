"""The script that `fluidx trace` runs on ranks that are processes: it runs the user's script with a profiler."""

import json
import sys

from fluidx.launch.trace import run_traced

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    how, script, *args = sys.argv[1:]
    run_traced(script, args, **json.loads(how))
