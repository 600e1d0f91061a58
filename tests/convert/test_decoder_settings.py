"""Settings of decoders: spellings of old and new files, and what is refused, by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.decoders import settings

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import converters
from fast_llm_ssm.model import ModelConfig

FORMATS = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "bamba": "Bamba",
    "falcon_h1": "FalconH1",
    "granitemoehybrid": "GraniteMoeHybrid",
    "nemotron_h": "NemotronH",
}


def imported(name: str, **changes: Any) -> ModelConfig:
    source = {**settings(FORMATS[name]), "model_type": name, **changes}
    return converters[name]().import_config({key: value for key, value in source.items() if value != "absent"}, name)


@pytest.mark.parametrize(
    "name, old, new",
    [
        (
            "nemotron_h",
            {"layers_block_type": "absent", "hybrid_override_pattern": "M-*-M", "num_hidden_layers": 5},
            {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
        ),
        ("nemotron_h", {"attention_head_dim": 16, "head_dim": "absent", "mamba_d_conv": 3}, {"conv_kernel": 3}),
        (
            "granitemoehybrid",
            {"layer_types": "absent", "layers_block_type": ["mamba", "attention", "mamba"]},
            {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        ),
        (
            "llama",
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        ),
        ("llama", {"rope_scaling": None, "num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ("bamba", {"mamba_d_head": "auto"}, {"mamba_d_head": 8}),
        ("bamba", {"time_step_limit": [0.0, float("inf")]}, {"time_step_limit": [0.0, {"__float__": "Infinity"}]}),
        ("bamba", {"time_step_limit": [0.0, "Infinity"]}, {"time_step_limit": None}),
        ("falcon_h1", {"mamba_d_head": "auto"}, {"mamba_d_head": 8}),
        ("falcon_h1", {"ssm_multipliers": None}, {"ssm_multipliers": "absent"}),
    ],
)
def test_old_and_new_spellings_mean_the_same(name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert imported(name, **old) == imported(name, **new)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("granitemoehybrid", {"num_local_experts": 8}, "num_local_experts is 8: mixtures of experts are not built"),
        ("granitemoehybrid", {"num_local_experts": "absent"}, "num_local_experts is 8: mixtures of experts"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi', expected rope"),
        ("granitemoehybrid", {"layer_types": ["mamba", "rnn", "mamba"]}, "layer_types has rnn, expected mamba"),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe"]}, r"layers of experts \(E, moe\) are not built"),
        ("nemotron_h", {"layers_block_type": "absent", "hybrid_override_pattern": "M-E*"}, "layers of experts"),
        ("nemotron_h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, expected 0"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn', expected default"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "trick": 2.0}}, "rope type llama3 has trick"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1, expected 0.0"),
        ("llama", {"hidden_act": "mish"}, "hidden_act is 'mish', expected one of silu"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention, but use_sliding_window or",
        ),
        ("qwen2", {"layer_types": ["full_attention", "chunked"]}, "layer_types has chunked"),
        ("qwen2", {"layer_types": ["full_attention"]}, "num_hidden_layers is 2, but layer_types gives 1"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias and mamba_proj_bias differ, which is not built"),
        ("falcon_h1", {"mamba_d_ssm": 60, "mamba_d_head": 8}, "mamba_d_ssm is 60, but heads and head size give 64"),
        ("bamba", {"hidden_size": "absent"}, "the key hidden_size is missing"),
    ],
)
def test_what_is_not_built_is_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"config.json: {message}"):
        imported(name, **change)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("llama", {"blocks.t.0.mixer.window": 8}, r"cannot hold layers.0.0.mixer.window: 8 \(would become None\)"),
        ("qwen2", {"blocks.t.0.mixer.bias": False}, "cannot hold layers.0.0.mixer.bias: False"),
        ("bamba", {"blocks.m.0.mixer.gate": "no_norm"}, "cannot hold layers.0.0.mixer.gate: no_norm"),
        ("bamba", {"blocks.a.0.mixer.rope.partial": 1.0}, "cannot hold layers.1.0.mixer.rope.partial: 1.0"),
        ("nemotron_h", {"blocks.-.0.mixer.gated": True}, "cannot hold layers.1.0.mixer.gated: True"),
        ("falcon_h1", {"meta_tokens": 3}, "cannot hold meta_tokens: 3"),
        ("granitemoehybrid", {"blocks.m.0.residual_multiplier": 0.5}, "one residual_multiplier for all layers"),
    ],
)
def test_what_a_format_cannot_hold_is_named(name: str, change: dict[str, Any], message: str) -> None:
    model = json.loads(json.dumps(imported(name).model_dump()).replace("Infinity", "1e999"))
    for path, value in change.items():
        place: Any = model
        *before, last = path.split(".")
        for key in before:
            place = place[int(key) if isinstance(place, list) else key]
        place[last] = value
    with pytest.raises(UserError, match=message):
        converters[name]().export_config(ModelConfig.model_validate(model))


def test_changed_settings_keep_their_spelling() -> None:
    source = {
        **settings("Llama"),
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    converter = converters["llama"]()
    model = converter.import_config(source, "x").model_dump()
    model["blocks"]["t"][0]["mixer"]["rope"] |= {"type": "linear", "factor": 2.0, "theta": 200.0}
    written = converter.export_config(ModelConfig.model_validate(model), source)
    assert written["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 200.0}
    assert "rope_theta" not in written and "rope_scaling" not in written
    source = {**settings("NemotronH"), "model_type": "nemotron_h"}
    source["layers_block_type"] = ["linear_attention", "mlp", "full_attention"]
    converter = converters["nemotron_h"]()
    model = converter.import_config(source, "x").model_dump() | {"pattern": "M-*-"}
    written = converter.export_config(ModelConfig.model_validate(model), source)
    assert written["layers_block_type"] == ["linear_attention", "mlp", "full_attention", "mlp"]
    assert "hybrid_override_pattern" not in written
