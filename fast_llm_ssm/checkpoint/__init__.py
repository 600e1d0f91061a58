"""Native checkpoints: save, find, read."""
