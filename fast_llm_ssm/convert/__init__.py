"""Published checkpoints in and out."""
