"""Qwen 3: norms on queries and keys."""

from __future__ import annotations

from fast_llm_ssm.convert import decoder
from fast_llm_ssm.convert.base import register
from fast_llm_ssm.convert.config_rules import Carried, Fixed, Value, mixer
from fast_llm_ssm.convert.formats.llama import COMMON, Transformer
from fast_llm_ssm.convert.formats.qwen2 import Layers


@register("qwen3")
class Qwen3Converter(Transformer):
    """Qwen 3 without experts."""

    config_rules = (
        Layers({"qk_norm": {}}),
        Fixed("model_type", "qwen3", fresh=True),
        Carried(architectures=["Qwen3ForCausalLM"]),
        decoder.Heads(default_kv_heads=32, default_size=128),
        Value("attention_bias", mixer("attention", "bias"), mixer("attention", "out_bias"), default=False),
        Value("rms_norm_eps", mixer("attention", "qk_norm", "eps"), default=1e-6),
        *COMMON,
    )
