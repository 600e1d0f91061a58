"""Models that were never imported leave with fresh settings; folders of no known format are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import huggingface as hf
from helpers.models import build, shared_hybrid, stack, tokens

from fast_llm_ssm import checkpoint
from fast_llm_ssm.checkpoint import Checkpoint
from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.base import converters
from fast_llm_ssm.convert.exporting import export_folder
from fast_llm_ssm.convert.importing import import_folder
from fast_llm_ssm.convert.load import load_model, load_tokenizer_of, model_config
from fast_llm_ssm.convert.source import HuggingFaceFolder
from fast_llm_ssm.data.tokenizer import ByteTokenizer
from fast_llm_ssm.model import ModelConfig

SILENT = {"say": lambda line: None}
CONFIGS = Path(__file__).parents[2] / "configs" / "models"
MAMBA2 = {"type": "mamba2", "d_inner": 32, "d_state": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}


def saved_model(folder: Path, config: dict[str, Any], **parts: Any) -> Path:
    model = build(config, spread=1.5)
    return checkpoint.save(
        folder, tensors=dict(model.named_parameters()), config_yaml=yaml.safe_dump({"model": config}), **parts
    )


@pytest.mark.parametrize(
    ("config", "format"),
    [
        (shared_hybrid(conversion={"format": "zamba2"}), "zamba2"),
        (shared_hybrid(), "zamba2"),  # the only one that can hold it
        (stack(MAMBA2, MAMBA2, residual_fp32=True, pad_vocab_multiple=8, tie_embeddings=False), "mamba2"),
    ],
)
def test_fresh_files_compute_the_same_in_transformers(tmp_path: Path, config: dict[str, Any], format: str) -> None:
    from transformers import AutoModelForCausalLM

    saved = saved_model(tmp_path / "checkpoint", config, tokenizer=ByteTokenizer())
    said: list[str] = []
    out = export_folder(saved, tmp_path / "out", say=said.append)
    assert f"format {format}" in said[0] and any("no tokenizer that transformers knows" in line for line in said)
    written = hf.read_config(out)
    assert written["model_type"] == format and written["torch_dtype"] == "float32" and written["eos_token_id"] == 257
    json.loads((out / "config.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    if format == "zamba2":
        assert set(written["layers_block_type"]) == {"mamba", "hybrid"}
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids = tokens(2, 29)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, load_model(saved)(ids), rtol=0, atol=1e-5)
        torch.testing.assert_close(load_model(out)(ids), load_model(saved)(ids), rtol=0, atol=1e-5)


def test_blocks_that_no_layer_uses_do_not_matter(tmp_path: Path) -> None:
    config = shared_hybrid()
    unused = {"mixer": {"type": "mlp", "size": 8}, "inject": {"shared": ["C"], "input": "hidden"}}
    config["blocks"] = {"x": unused, **config["blocks"]}
    config["shared"] = {"C": {"mixer": {"type": "mlp", "size": 8}}, **config["shared"]}
    config = ModelConfig.model_validate(config)
    assert converters["zamba2"]().export_config(config)["num_mem_blocks"] == 2


def test_another_dtype_can_be_asked_for(tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "checkpoint", shared_hybrid())
    out = export_folder(saved, tmp_path / "out", dtype=torch.bfloat16, **SILENT)
    assert {tensor.dtype for tensor in hf.read_tensors(out).values()} == {torch.bfloat16}
    assert hf.read_config(out)["torch_dtype"] == "bfloat16"


def test_a_model_that_fits_two_formats_needs_a_choice(tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "checkpoint", stack(MAMBA2, MAMBA2))
    with pytest.raises(UserError, match=r"fits several formats \(mamba2, zamba2\), choose one by --format"):
        export_folder(saved, tmp_path / "out", **SILENT)
    assert hf.read_config(export_folder(saved, tmp_path / "out", format="mamba2", **SILENT))["model_type"] == "mamba2"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (stack(MAMBA2, {"type": "mlp", "size": 8}), "block `b` is (not one mamba2|mlp, expected one mamba2)"),
        (stack({**MAMBA2, "D_has_hdim": True}), "D_has_hdim: True \\(would become False\\)"),
        (stack(MAMBA2, {**MAMBA2, "d_state": 4}), "one (state_size|mamba_d_state) for all layers, got 8 and 4"),
        (shared_hybrid(embedding_multiplier=2.0), "embedding_multiplier: 2.0 \\(would become 1.0\\)"),
    ],
)
def test_what_no_format_can_hold_is_said(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    saved = saved_model(tmp_path / "checkpoint", config)
    with pytest.raises(UserError, match=words):
        export_folder(saved, tmp_path / "out", **SILENT)
    assert not (tmp_path / "out").exists()


def test_unknown_and_unsuitable_formats(tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "checkpoint", shared_hybrid())
    with pytest.raises(UserError, match="unknown checkpoint format `zamba`, did you mean `zamba2`"):
        export_folder(saved, tmp_path / "out", format="zamba", **SILENT)
    with pytest.raises(UserError, match="format zamba2_blocks is for models that were imported from it"):
        export_folder(saved, tmp_path / "out", format="zamba2_blocks", **SILENT)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_published_models_fit_the_format_that_they_name(path: Path) -> None:
    config = ModelConfig.model_validate(yaml.safe_load(path.read_text())["model"])
    assert config.conversion is not None and config.expect.params is not None
    settings = converters[config.conversion.format]().export_config(config)
    assert settings["hidden_size"] == config.hidden_size and settings["vocab_size"] == config.num_rows


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        model = build(shared_hybrid(), seed=step, spread=1.5)
        checkpoint.save(
            tmp_path / "run" / "checkpoints" / f"step-{step}",
            tensors=dict(model.named_parameters()),
            config_yaml=yaml.safe_dump({"name": "run", "seed": 3, "model": {**shared_hybrid(), "from": "elsewhere"}}),
            tokenizer=ByteTokenizer(),
        )
    out = export_folder(tmp_path / "run", tmp_path / "out", **SILENT)
    with torch.no_grad():
        expected = model(tokens(1, 9))
        assert torch.equal(load_model(tmp_path / "run")(tokens(1, 9)), expected)
        assert torch.equal(load_model(out)(tokens(1, 9)), expected)
    tokenizer = load_tokenizer_of(tmp_path / "run")
    assert tokenizer is not None and tokenizer.encode("a") == [97] and load_tokenizer_of(out) is None


@pytest.mark.parametrize(
    "config",
    [
        {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba7"}, "rms_norm": True},
        {"model_type": "jukebox", "hidden_size": 8},
        {},
    ],
)
def test_an_unknown_layout_is_refused_with_the_keys_seen(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = hf.write_folder(tmp_path / "hf", config, {"encoder.some.weight": torch.ones(2)})
    with pytest.raises(UserError) as caught:
        import_folder(folder, tmp_path / "checkpoint", **SILENT)
    text = str(caught.value)
    assert "no known format" in text and "encoder.some.weight" in text and all(key in text for key in config)
    assert "\n" not in text and not (tmp_path / "checkpoint").exists()


def test_a_known_type_with_foreign_tensors_is_refused(tmp_path: Path) -> None:
    folder = hf.write_folder(tmp_path / "hf", {"model_type": "zamba2"}, {"decoder.layers.0.norm.weight": torch.ones(2)})
    with pytest.raises(UserError, match="no known format .*model_type 'zamba2'.*decoder.layers.0.norm.weight"):
        HuggingFaceFolder(folder)


def test_folders_without_settings_or_of_another_kind(tmp_path: Path) -> None:
    folder = hf.write_folder(tmp_path / "hf", {}, {"a": torch.ones(2)})
    (folder / "config.json").write_text("[1, 2]")
    with pytest.raises(UserError, match="config.json: holds a list, expected a mapping"):
        HuggingFaceFolder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json"):
        HuggingFaceFolder(folder)
    for wrong in (folder, tmp_path / "absent"):
        with pytest.raises(UserError, match="neither a checkpoint nor a run folder|no such folder"):
            load_model(wrong)


def test_nothing_is_allocated_before_the_files_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf.save(hf.zamba2(), tmp_path / "hf", max_shard_size="60KB")
    gone = sorted(folder.glob("*.safetensors"))[-1]
    gone.unlink()
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("memory was taken"))
    with pytest.raises(UserError, match=f"{gone.name}, which is missing"):
        load_model(folder)


def test_a_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "checkpoint", shared_hybrid())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(UserError, match="out: exists and is not empty"):
        export_folder(saved, tmp_path / "out", **SILENT)
    folder = hf.save(hf.mamba2(), tmp_path / "hf")
    with pytest.raises(UserError, match="out: exists and is not empty"):
        import_folder(folder, tmp_path / "out", **SILENT)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_files_that_lead_out_of_the_folder_are_not_taken_along(tmp_path: Path) -> None:
    folder = hf.save(hf.mamba2(), tmp_path / "hf")
    (tmp_path / "secret").write_text("x")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="'notes.txt', which leaves the folder"):
        import_folder(folder, tmp_path / "checkpoint", **SILENT)


def test_a_mixer_of_a_plugin_is_not_imported_unasked(tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "checkpoint", stack(MAMBA2))
    marker = tmp_path / "ran"
    plugin = tmp_path / "hostile_plugin.py"
    plugin.write_text(f"open({str(marker)!r}, 'w').close()")
    config = {"plugins": ["hostile_plugin"], "model": stack(MAMBA2)}
    tensors = Checkpoint(saved).read_tensors()
    other = checkpoint.save(tmp_path / "other", tensors=tensors, config_yaml=yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        load_model(other)
        assert not marker.exists()
        model_config(Checkpoint(other), allow_plugins=True)
        assert marker.exists()
