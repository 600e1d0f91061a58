"""Assembles embedding, blocks, shared blocks and head into a model."""

from fast_llm_ssm.model.build import build_meta, build_model
from fast_llm_ssm.model.config import ModelConfig
from fast_llm_ssm.model.count import Estimate, estimate
from fast_llm_ssm.model.hybrid import HybridModel
from fast_llm_ssm.model.state import DecodingState

__all__ = ["DecodingState", "Estimate", "HybridModel", "ModelConfig", "build_meta", "build_model", "estimate"]
