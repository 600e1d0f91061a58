"""Tiny random models of more families of transformers, for the contract tests of converters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers import huggingface as hf

_GENERAL = {
    "vocab_size": hf.VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": hf.CHUNK,
}
_OWN: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 2},
    "Qwen2": {"num_hidden_layers": 2},
    "Qwen3": {"num_hidden_layers": 2, "head_dim": 16},
    "Bamba": {**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1]},
    "FalconH1": {
        **_MAMBA,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "head_dim": 16,
        "embedding_multiplier": 2.5,
        "lm_head_multiplier": 1.6,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "key_multiplier": 1.3,
        "mlp_multipliers": [0.9, 0.7],
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.6, 0.8, 1.1, 1.3, 0.9],
        "ssm_out_multiplier": 0.7,
    },
    "GraniteMoeHybrid": {
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 3.0,
        "logits_scaling": 1.5,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
    "NemotronH": {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"],
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": hf.CHUNK,
        "head_dim": 16,
    },
}


def settings(name: str) -> dict[str, Any]:
    """What the config of class `{name}Config` is made of."""
    return {**_GENERAL, **_OWN[name]}


def decoder(name: str, **changes: Any) -> Callable[[], Any]:
    """Builds a small model of transformers' class `{name}ForCausalLM`."""

    def build() -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**settings(name), **changes})
        return hf.spread(getattr(transformers, f"{name}ForCausalLM"), config)

    return build
