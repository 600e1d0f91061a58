"""Sampling from a model."""

from fast_llm_ssm.generate.decoding import decode, generate
from fast_llm_ssm.generate.sampling import SamplingOptions, sample

__all__ = ["SamplingOptions", "decode", "generate", "sample"]
