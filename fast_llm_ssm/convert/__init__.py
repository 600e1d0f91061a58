"""Checkpoints of other libraries, in and out: rules written once, run both ways."""

from fast_llm_ssm.convert import formats  # noqa: F401 - registers the built-in ones
from fast_llm_ssm.convert.base import Converter, converters, register

__all__ = ["Converter", "converters", "register"]
