"""The layout of the first Zamba 2 uploads, made from a model of transformers by plain renaming."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from helpers import huggingface as hf


def blocks_config(config: Any) -> dict[str, Any]:
    """config.json as those uploads have it."""
    return {
        "add_bias_linear": False,
        "architectures": ["Zamba2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "chunk_size": config.chunk_size,
        "conv_dimension": config.mamba_d_conv,
        "eos_token_id": 2,
        "expansion_factor": config.mamba_expand,
        "ffn_hidden_size": config.intermediate_size,
        "ft_lora": False,
        "gated_linear_unit": True,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "kv_channels": config.hidden_size // config.num_attention_heads,
        "layers_block_type": ["g" if i in config.hybrid_layer_ids else "m" for i in range(config.num_hidden_layers)],
        "lora_rank": config.adapter_rank,
        "mamba_headdim": config.mamba_headdim,
        "mamba_ngroups": config.mamba_ngroups,
        "max_position_embeddings": 4096,
        "model_type": "zamba2",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_logits_to_keep": 1,
        "num_mem_blocks": config.num_mem_blocks,
        "num_query_groups": config.num_attention_heads,
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000,
        "sliding_window": None,
        "state_size": config.mamba_d_state,
        "torch_dtype": "float32",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "use_mamba_kernels": True,
        "use_mem_rope": config.use_mem_rope,
        "use_shared_attention_lora": config.use_shared_attention_adapter,
        "use_shared_block_lora": True,
        "vocab_size": config.vocab_size,
    }


def blocks_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors under their old names; every block has adapters for all uses, most of them dead."""
    config = model.config
    hybrids = config.hybrid_layer_ids
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            if name != "lm_head.weight":
                renamed[name] = tensor
            continue
        layer, rest = int(found[1]), found[2]
        if not rest.startswith(("shared_transformer.", "linear.")):
            renamed[f"model.mamba_layers.{layer}.{rest.removeprefix('mamba_decoder.')}"] = tensor
            continue
        use = hybrids.index(layer)
        if rest.startswith("linear."):
            renamed[f"model.linear_layers.{use}.weight"] = tensor
            continue
        rest = rest.removeprefix("shared_transformer.")
        rest = rest.replace("gate_up_proj_adapter_list", "linear_fc1_lora_list").replace("_adapter_list", "_lora_list")
        rest = rest.replace("gate_up_proj.", "linear_fc1.").replace(
            "feed_forward.down_proj.", "feed_forward.linear_fc2."
        )
        rest = re.sub(r"_lora_list\.(\d+)\.([01])\.", lambda m: f"_lora_{'AB'[int(m[2])]}_list.{m[1]}.", rest)
        renamed[f"model.blocks.{use % config.num_mem_blocks}.{rest}"] = tensor
    for name, tensor in list(renamed.items()):
        if found := re.fullmatch(r"model\.blocks\.\d+\.(.*_lora_[AB]_list\.\d+\.weight)", name):
            for block in range(config.num_mem_blocks):
                renamed.setdefault(f"model.blocks.{block}.{found[1]}", torch.full_like(tensor, 7.0))
    return renamed


def save_blocks_layout(model: Any, folder: Path) -> Path:
    return hf.write_folder(folder, blocks_config(model.config), blocks_tensors(model))
