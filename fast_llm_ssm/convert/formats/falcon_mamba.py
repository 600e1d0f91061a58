"""Falcon Mamba: Mamba 1 with norms that have no weights on the step sizes' input, B and C."""

from __future__ import annotations

from collections.abc import Collection

from fast_llm_ssm.convert import decoder
from fast_llm_ssm.convert.base import register
from fast_llm_ssm.convert.config_rules import Carried, Fixed, Json, Value, mixer
from fast_llm_ssm.convert.formats.mamba import MambaConverter


@register("falcon_mamba")
class FalconMambaConverter(MambaConverter):
    """transformers' Falcon Mamba. Its published file says `expand: 16`; only `intermediate_size` is right."""

    config_rules = (
        decoder.Uniform("num_hidden_layers", {"type": "mamba", "inner_norm": {"weight": False}}),
        Fixed("model_type", "falcon_mamba", fresh=True),
        Carried(architectures=["FalconMambaForCausalLM"]),
        Value("mixer_rms_eps", mixer("mamba", "inner_norm", "eps"), default=1e-6),
        *MambaConverter.config_rules[3:],
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "falcon_mamba"
