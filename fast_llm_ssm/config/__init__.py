"""YAML with line numbers to a frozen tree."""
