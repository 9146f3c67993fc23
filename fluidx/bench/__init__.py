"""`fluidx bench`: a synthetic benchmark of a program on ranks. Models that it knows, random feeds, and the measurement."""
