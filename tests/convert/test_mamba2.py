"""Mamba 2 in transformers' layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import huggingface as hf

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.exporting import export_folder
from fast_llm_ssm.convert.importing import import_folder
from fast_llm_ssm.convert.load import load_model
from fast_llm_ssm.convert.source import HuggingFaceFolder
from fast_llm_ssm.layers.mamba2 import Mamba2Config

SILENT = {"say": lambda line: None}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.mamba2(), tmp_path_factory.mktemp("mamba2") / "hf")


def changed(small: Path, folder: Path, **changes: Any) -> Path:
    return hf.write_folder(folder, {**hf.read_config(small), **changes}, hf.read_tensors(small))


def mixer(folder: Path) -> Mamba2Config:
    config = HuggingFaceFolder(folder).config.blocks["m"][0].mixer
    assert isinstance(config, Mamba2Config)
    return config


@pytest.mark.parametrize("infinity", ["Infinity", '"Infinity"', '{"__float__": "Infinity"}'])
def test_an_infinite_limit_in_every_spelling(small: Path, tmp_path: Path, infinity: str) -> None:
    folder = changed(small, tmp_path / "hf")
    text = json.dumps({**hf.read_config(small), "time_step_limit": [0.0, "INF"]}, indent=2).replace('"INF"', infinity)
    (folder / "config.json").write_text(text)
    assert mixer(folder).dt_limit == (0.0, math.inf)
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    out = export_folder(saved, tmp_path / "out", **SILENT)
    assert (out / "config.json").read_text() == text


def test_a_changed_limit_is_the_only_change(small: Path, tmp_path: Path) -> None:
    saved = import_folder(small, tmp_path / "checkpoint", ["mamba2.dt_limit=[0.01, 0.1]"], **SILENT)
    out = export_folder(saved, tmp_path / "out", **SILENT)
    before, after = hf.read_config(small), hf.read_config(out)
    assert after == {**before, "time_step_limit": [0.01, 0.1]} and list(before) == list(after)
    assert_same_in_transformers(out, saved)


def test_the_inner_width_is_heads_times_head_size(small: Path, tmp_path: Path) -> None:
    config = mixer(changed(small, tmp_path / "hf", expand=7, intermediate_size=99))
    assert (config.d_inner, config.head_dim, config.n_groups) == (64, 8, 2)


def test_groups_that_do_not_fit_the_tensors_are_said(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in_proj.weight has shape \[168, 32\], the settings give \[152, 32\]"):
        HuggingFaceFolder(changed(small, tmp_path / "hf", n_groups=1))


def test_the_gate_is_before_the_norm_whatever_the_config_says(small: Path, tmp_path: Path) -> None:
    assert mixer(changed(small, tmp_path / "hf", norm_before_gate=True)).gate == "norm_after_gate"


def test_a_tied_head_may_be_stored_and_is_then_written_back(small: Path, tmp_path: Path) -> None:
    tensors = hf.read_tensors(small)
    tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()
    folder = hf.write_folder(tmp_path / "hf", hf.read_config(small), tensors)
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    out = hf.read_tensors(export_folder(saved, tmp_path / "out", **SILENT))
    assert out.keys() == tensors.keys() and torch.equal(out["lm_head.weight"], tensors["lm_head.weight"])
    tensors["lm_head.weight"] += 1
    hf.write_folder(folder, hf.read_config(small), tensors)
    with pytest.raises(UserError, match="lm_head.weight and backbone.embeddings.weight differ"):
        import_folder(folder, tmp_path / "other", **SILENT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu' or 'swish'"),
        ({"rms_norm": False}, "rms_norm is False"),
        ({"time_step_limit": [0.0, "lots"]}, "got 'lots', expected a number"),
        ({"num_hidden_layers": 0}, "num_blocks|greater than 0"),
        ({"quantization_config": {"bits": 4}}, "does not know quantization_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
    ],
)
def test_settings_that_are_not_built_are_refused(small: Path, tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=rf"config\.json: .*({words})"):
        HuggingFaceFolder(changed(small, tmp_path / "hf", **changes))


def test_bf16_is_kept(tmp_path: Path) -> None:
    folder = hf.save(hf.mamba2().to(torch.bfloat16), tmp_path / "hf")
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    out = export_folder(saved, tmp_path / "out", **SILENT)
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        assert load_model(saved)(hf.tokens(1, 5)).dtype == torch.bfloat16


def assert_same_in_transformers(folder: Path, saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = hf.tokens(2, 29)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        torch.testing.assert_close(load_model(saved)(ids), theirs, rtol=0, atol=1e-5)
