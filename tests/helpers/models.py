"""Small models for tests."""

from __future__ import annotations

from typing import Any

import torch

from fast_llm_ssm.model import HybridModel, ModelConfig, build_model

MAMBA2 = {"type": "mamba2", "d_inner": 32, "d_state": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
MAMBA = {"type": "mamba", "d_inner": 32, "d_state": 4, "dt_rank": 3}
ATTENTION = {"type": "attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": {"theta": 100.0}}
MLP = {"type": "mlp", "size": 24}

MIXERS: dict[str, dict[str, Any]] = {
    "mamba2": MAMBA2,
    "mamba2 gate after norm": {**MAMBA2, "gate": "norm_before_gate", "D_has_hdim": True, "proj_bias": True},
    "mamba2 without norm": {**MAMBA2, "gate": "no_norm", "dt_limit": [0.01, 0.05], "conv_bias": False, "d_conv": 3},
    "mamba": MAMBA,
    "mamba with norms": {**MAMBA, "inner_norm": {"eps": 1e-6}, "proj_bias": True},
    "mamba with weightless norms": {**MAMBA, "inner_norm": {"weight": False}, "conv_bias": False, "d_conv": 3},
    "mamba with equal steps at first": {**MAMBA, "dt_rank": "auto", "dt_init": {"scheme": "constant", "scale": 0.5}},
    "attention": ATTENTION,
    "attention without rope": {**ATTENTION, "rope": None, "scale": 0.2, "bias": True, "out_bias": True},
    "attention with window": {
        **ATTENTION,
        "window": 5,
        "rope": {"partial": 0.5},
        "qk_norm": {"eps": 1e-6},
        "v_head_dim": 12,
    },
    "attention with window and prefix": {**ATTENTION, "window": 4, "prefix": 3},
    "attention with multipliers": {**ATTENTION, "in_multiplier": 0.7, "key_multiplier": 1.4, "out_multiplier": 0.8},
    "attention with scaled positions": {
        **ATTENTION,
        "rope": {"type": "llama3", "theta": 100.0, "factor": 4, "original_max_positions": 16},
    },
    "mamba2 with multipliers": {
        **MAMBA2,
        "in_multiplier": 1.3,
        "in_multipliers": [0.8, 1.2, 0.7, 1.5, 0.9],
        "out_multiplier": 0.7,
    },
    "mlp": MLP,
    "mlp with multipliers": {**MLP, "gate_multiplier": 1.5, "down_multiplier": 0.6},
    "mlp not gated": {"type": "mlp", "size": 24, "gated": False, "activation": "relu2", "bias": True},
    "parallel": {"type": "parallel", "branches": [MAMBA2, ATTENTION], "combine": "mean"},
    "parallel with one output projection": {
        "type": "parallel",
        "branches": [{**ATTENTION, "window": 4}, {**MAMBA2, "gate": "no_norm"}],
        "branch_norm": {"eps": 1e-6},
        "fused_out_proj": True,
    },
}
"""At least one config of every built-in mixer, by a readable name."""


def stack(*mixers: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A model of these mixers, one a layer."""
    blocks = {chr(ord("a") + i): {"mixer": mixer} for i, mixer in enumerate(mixers)}
    return {"hidden_size": 16, "vocab_size": 37, "blocks": blocks, "pattern": "".join(blocks), **options}


def shared_hybrid(**options: Any) -> dict[str, Any]:
    """Mamba 2 layers, three of which use two shared transformer blocks in turn, with adapters of their own."""
    attention = {"type": "attention", "num_heads": 4, "head_dim": 8, "scale": 0.5, "rope": {}}
    shared = [
        {"input_size": 32, "residual": False, "mixer": attention},
        {"residual": False, "mixer": {**MLP, "activation": "gelu"}},
    ]
    inject = {"shared": ["A", "B"], "adapters": {"rank": 3, "targets": ["q", "k", "v", "gate_up"]}}
    return {
        "hidden_size": 16,
        "vocab_size": 37,
        "shared": {"A": shared, "B": shared},
        "blocks": {"m": {"mixer": MAMBA2}, "h": {"mixer": MAMBA2, "inject": inject}},
        "pattern": "mh mhh",
        **options,
    }


def build(config: dict[str, Any], dtype: torch.dtype | None = None, seed: int = 0, spread: float = 3.0) -> HybridModel:
    """A model whose weights are spread enough for every part to matter to the logits."""
    model = build_model(ModelConfig.model_validate(config), dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (name.endswith(".weight") and parameter.dim() == 1) or name.endswith(".D"):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.2)
            elif parameter.dim() == 2 and not name.endswith("conv_weight"):
                parameter.mul_(spread)
            elif name.endswith("bias") and not name.endswith("dt_bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)
    return model


def tokens(*shape: int, seed: int = 1, vocab_size: int = 37) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def meta_hybrid(**options: Any) -> dict[str, Any]:
    """Attention and Mamba 2 side by side behind meta tokens; windows, and keys and values that later layers reuse."""
    attention = {**ATTENTION, "v_head_dim": 8, "rope": {"theta": 100.0}}
    local = {**attention, "window": 4, "prefix": 3}

    def block(attention: dict[str, Any]) -> list[dict[str, Any]]:
        parallel = {
            "type": "parallel",
            "branches": [attention, {**MAMBA2, "n_groups": 1}],
            "branch_norm": {},
            "fused_out_proj": True,
            "combine": "mean",
        }
        return [{"mixer": parallel}, {"mixer": MLP}]

    return {
        "hidden_size": 16,
        "vocab_size": 37,
        "meta_tokens": 3,
        "blocks": {
            "g": block(attention),
            "l": block(local),
            "r": block({**local, "kv": "reuse_previous"}),
            "m": {"mixer": MLP},
        },
        "pattern": "g l r m r g",
        **options,
    }
