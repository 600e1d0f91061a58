"""YAML with line numbers to a frozen tree; every error at once, in plain words. No torch in this room."""

from fast_llm_ssm.config.base import Config
from fast_llm_ssm.config.dump import dump
from fast_llm_ssm.config.errors import ConfigError, ConfigErrors, UserError
from fast_llm_ssm.config.load import load, loads, read_yaml, validate
from fast_llm_ssm.config.registry import Registry

__all__ = [
    "Config",
    "ConfigError",
    "ConfigErrors",
    "Registry",
    "UserError",
    "dump",
    "load",
    "loads",
    "read_yaml",
    "validate",
]
