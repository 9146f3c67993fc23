"""Files that fluidx writes: atomic replacement, safetensors, program texts, and saves by several processes."""
