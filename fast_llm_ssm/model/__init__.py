"""Assembles embedding, blocks, shared blocks and head into a model."""
