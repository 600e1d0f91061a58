"""Training: the run file, the loop, and what surrounds it."""
