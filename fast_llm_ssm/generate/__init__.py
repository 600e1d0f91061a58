"""Sampling from a model: one prompt, or many that come and go."""

from fast_llm_ssm.generate.decoding import generate
from fast_llm_ssm.generate.engine import Engine, Job
from fast_llm_ssm.generate.request import Request, Token
from fast_llm_ssm.generate.sampling import SamplingOptions
from fast_llm_ssm.generate.text import TextStream

__all__ = ["Engine", "Job", "Request", "SamplingOptions", "TextStream", "Token", "generate"]
