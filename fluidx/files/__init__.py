"""What fluidx writes to disk: atomic files, safetensors, states, program texts, and the commits of saves."""
