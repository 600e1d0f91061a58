"""Sampling from a model."""
