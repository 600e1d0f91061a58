"""Mamba 2 layers and hybrid language models, declared in YAML."""
