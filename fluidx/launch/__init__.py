"""`fluidx run`: one script on many ranks, started, watched and ended together."""
