"""The mathematics: one folder an op."""
