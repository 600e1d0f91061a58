"""Tiny random models of transformers, spread so that every parameter matters to the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CHUNK = 8
VOCABULARY = 61


def zamba2(**changes: Any) -> Any:
    """A Zamba2ForCausalLM: by default one shared block, adapters everywhere, rotary positions."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    layers = changes.pop("layers", "mhmmh")
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": len(layers),
        "layers_block_type": ["hybrid" if layer == "h" else "mamba" for layer in layers],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "chunk_size": CHUNK,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "adapter_rank": 3,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "max_position_embeddings": 256,
    }
    return spread(Zamba2ForCausalLM, Zamba2Config(**{**settings, **changes}))


def mamba2(**changes: Any) -> Any:
    """A Mamba2ForCausalLM: by default with two groups, tied."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": CHUNK,
        "tie_word_embeddings": True,
    }
    return spread(Mamba2ForCausalLM, Mamba2Config(**{**settings, **changes}))


def spread(cls: Any, config: Any) -> Any:
    """A model of this config in which every parameter matters."""
    model = cls(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            kind = name.split(".")[-1] if parameter.dim() < 2 else "matrix"
            if kind == "A_log":
                parameter.copy_((1 + 3 * torch.rand(parameter.shape, generator=generator)).log())
            elif kind == "dt_bias":
                parameter.copy_(noise - 2)
            elif kind == "bias":
                parameter.copy_(0.1 * noise)
            elif kind in ("D", "weight"):  # norms
                parameter.copy_(1 + 0.2 * noise)
            else:
                # Wide enough to matter, narrow enough that rounding does not grow from layer to layer.
                parameter.copy_(noise * (0.3 if parameter.dim() == 3 else 0.5 * parameter.shape[-1] ** -0.5))
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Ids without 0: transformers takes that for padding, whose embedding gets no gradient there."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def save(model: Any, folder: Path, **options: Any) -> Path:
    """As `save_pretrained` writes it."""
    model.save_pretrained(folder, **options)
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's weight files."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    files += [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.bin"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def write_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], config_file: str = "config.json"
) -> Path:
    """A Hugging Face folder from its parts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / config_file).write_text(json.dumps(config, indent=2))
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def read_config(folder: Path, config_file: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / config_file).read_text())
