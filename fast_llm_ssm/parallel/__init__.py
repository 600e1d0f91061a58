"""Meshes, sharding and launch; the model never imports it."""
