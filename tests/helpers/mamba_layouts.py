"""Tiny random Mamba models, and their authors' layouts written from transformers' models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import huggingface as hf
from safetensors.torch import save_file


def mamba(family: str = "Mamba", **changes: Any) -> Callable[[], Any]:
    """Builds a MambaForCausalLM or FalconMambaForCausalLM."""

    def build() -> Any:
        import transformers

        settings = {
            "vocab_size": hf.VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "state_size": 8,
            "initializer_range": 0.02,
        }
        config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
        return hf.spread(getattr(transformers, f"{family}ForCausalLM"), config)

    return build


def authors_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Under the names of mamba_ssm's own model, which keeps the tied head too."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    return tensors


def save_mamba_ssm(model: Any, folder: Path) -> Path:
    """As mamba_ssm's `save_pretrained` writes it."""
    config = model.config
    if config.model_type == "mamba2":
        settings: dict[str, Any] = {"layer": "Mamba2"}
        own = {
            "d_state": config.state_size,
            "headdim": config.head_dim,
            "ngroups": config.n_groups,
            "chunk_size": config.chunk_size,
        }
        defaults: dict[str, Any] = {"d_state": 128, "headdim": 64, "ngroups": 1, "chunk_size": 256}
        extra: dict[str, Any] = {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}}
        extra["tie_embeddings"] = config.tie_word_embeddings
    else:
        settings, extra, defaults = {}, {}, {"d_state": 16, "dt_rank": -(-config.hidden_size // 16)}
        own = {"d_state": config.state_size, "dt_rank": config.time_step_rank}
    own |= {"expand": config.expand, "d_conv": config.conv_kernel, "bias": config.use_bias}
    defaults |= {"expand": 2, "d_conv": 4, "bias": False}
    settings |= {key: value for key, value in own.items() if value != defaults[key]}
    written = {
        "d_model": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size - 3,
        "ssm_cfg": settings,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 4,
        **extra,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written))
    torch.save(authors_tensors(model), folder / "pytorch_model.bin")
    return folder


def save_codestral(model: Any, folder: Path) -> Path:
    """As Codestral Mamba was published."""
    config = model.config
    written = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "n_groups": config.n_groups,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": config.tie_word_embeddings,
        "model_type": "mamba",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(written))
    tensors = {f"model.{name}": tensor.contiguous() for name, tensor in authors_tensors(model).items()}
    save_file(tensors, folder / "consolidated.safetensors", {"format": "pt"})
    return folder
