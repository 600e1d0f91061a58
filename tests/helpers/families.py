"""What the contract tests of converters run over: tiny random models of every registered format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import huggingface as hf
from helpers.decoders import decoder
from helpers.mamba_layouts import mamba, save_codestral, save_mamba_ssm
from helpers.zamba2_blocks import save_blocks_layout


@dataclass(frozen=True)
class Case:
    """One model of a format.

    Attributes:
        format: As registered.
        build: The model in the library that defines it.
        save: Writes it in the format; by default as transformers does.
        loads: Whether transformers loads the format.
    """

    format: str
    build: Callable[[], Any]
    save: Callable[[Any, Path], Path] = hf.save
    loads: bool = True


def _zamba2(**changes: Any) -> Callable[[], Any]:
    return lambda: hf.zamba2(**changes)


def _mamba2(**changes: Any) -> Callable[[], Any]:
    return lambda: hf.mamba2(**changes)


CASES = {
    "zamba2 one block": Case("zamba2", _zamba2()),
    "zamba2 two blocks, no attention adapters, no rope": Case(
        "zamba2",
        _zamba2(num_mem_blocks=2, use_shared_attention_adapter=False, use_mem_rope=False, layers="mhmhhm"),
    ),
    "zamba2 three blocks, two groups": Case("zamba2", _zamba2(num_mem_blocks=3, mamba_ngroups=2, layers="hmhhmhh")),
    "zamba2 hybrids at 1, 11, 21": Case(
        "zamba2", _zamba2(num_mem_blocks=2, use_mem_rope=False, layers="mh" + "m" * 9 + "h" + "m" * 9 + "hm")
    ),
    "zamba2 biases, head sizes, silu": Case(
        "zamba2",
        _zamba2(
            add_bias_linear=True,
            use_shared_attention_adapter=False,
            attention_head_dim=8,
            num_key_value_heads=2,
            mamba_headdim=4,
            n_mamba_heads=16,
            hidden_act="silu",
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            rms_norm_eps=1e-3,
            mamba_d_conv=3,
        ),
    ),
    "zamba2_blocks": Case(
        "zamba2_blocks", _zamba2(num_mem_blocks=2, layers="mhmhh", time_step_min=1e-30), save_blocks_layout, loads=False
    ),
    "mamba2 one group": Case("mamba2", _mamba2(n_groups=1)),
    "mamba2 two groups": Case("mamba2", _mamba2(n_groups=2)),
    "mamba2 eight groups, untied": Case("mamba2", _mamba2(n_groups=8, tie_word_embeddings=False)),
    "mamba2 biases, limited steps": Case(
        "mamba2",
        _mamba2(use_bias=True, use_conv_bias=True, time_step_limit=(0.05, 0.2), layer_norm_epsilon=1e-3, conv_kernel=3),
    ),
    "mamba2 no convolution bias": Case("mamba2", _mamba2(use_conv_bias=False)),
    "mamba": Case("mamba", mamba()),
    "mamba biases, wide, untied": Case(
        "mamba", mamba(use_bias=True, expand=3, time_step_rank=5, conv_kernel=3, tie_word_embeddings=False)
    ),
    "mamba no convolution bias": Case("mamba", mamba(use_conv_bias=False, layer_norm_epsilon=1e-3)),
    "falcon_mamba": Case("falcon_mamba", mamba("FalconMamba", expand=16, intermediate_size=64, mixer_rms_eps=1e-3)),
    "mamba_ssm mamba 1": Case("mamba_ssm", mamba(vocab_size=64), save_mamba_ssm, loads=False),
    "mamba_ssm mamba 1 of other sizes": Case(
        "mamba_ssm",
        mamba(vocab_size=64, use_bias=True, expand=3, time_step_rank=5, conv_kernel=3),
        save_mamba_ssm,
        loads=False,
    ),
    "mamba_ssm mamba 2": Case("mamba_ssm", _mamba2(vocab_size=64), save_mamba_ssm, loads=False),
    "mamba_ssm mamba 2 untied": Case(
        "mamba_ssm",
        _mamba2(vocab_size=64, n_groups=4, use_bias=True, tie_word_embeddings=False),
        save_mamba_ssm,
        loads=False,
    ),
    "codestral": Case(
        "codestral",
        _mamba2(
            hidden_size=64,
            num_heads=2,
            head_dim=64,
            state_size=128,
            chunk_size=256,
            tie_word_embeddings=False,
        ),
        save_codestral,
        loads=False,
    ),
    "llama": Case("llama", decoder("Llama")),
    "llama 3 positions, biases, tied": Case(
        "llama",
        decoder(
            "Llama",
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            hidden_act="gelu",
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "qwen2": Case("qwen2", decoder("Qwen2", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})),
    "qwen2 windows above": Case(
        "qwen2", decoder("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3)
    ),
    "qwen3": Case("qwen3", decoder("Qwen3", rms_norm_eps=1e-3, attention_bias=True)),
    "bamba": Case("bamba", decoder("Bamba", time_step_limit=(0.05, 0.3))),
    "bamba biases": Case(
        "bamba", decoder("Bamba", attention_bias=True, mlp_bias=True, mamba_proj_bias=True, mamba_conv_bias=False)
    ),
    "falcon_h1 without norm": Case("falcon_h1", decoder("FalconH1", mamba_norm_before_gate=False)),
    "falcon_h1 norm before gate": Case(
        "falcon_h1",
        decoder("FalconH1", mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_d_ssm=48, mamba_d_head=6),
    ),
    "falcon_h1 norm after gate": Case(
        "falcon_h1", decoder("FalconH1", mamba_rms_norm=True, mamba_norm_before_gate=False)
    ),
    "granitemoehybrid": Case("granitemoehybrid", decoder("GraniteMoeHybrid")),
    "granitemoehybrid rope": Case(
        "granitemoehybrid", decoder("GraniteMoeHybrid", position_embedding_type="rope", tie_word_embeddings=False)
    ),
    "nemotron_h": Case("nemotron_h", decoder("NemotronH")),
    "nemotron_h biases, other limit": Case(
        "nemotron_h", decoder("NemotronH", use_bias=True, mlp_bias=True, time_step_min=0.05, layer_norm_epsilon=1e-3)
    ),
}

ELSEWHERE = {"hymba"}
"""Formats that transformers lacks; they have tests of their own."""
