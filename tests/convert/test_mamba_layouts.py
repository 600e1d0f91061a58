"""The layouts of the published Mamba models: their real settings, spellings, and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import huggingface as hf
from helpers.mamba_layouts import mamba, save_codestral, save_mamba_ssm
from helpers.models import MAMBA, MAMBA2, build, stack

from fast_llm_ssm import checkpoint
from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import converters
from fast_llm_ssm.convert.exporting import export_folder
from fast_llm_ssm.convert.importing import import_folder
from fast_llm_ssm.convert.load import load_model
from fast_llm_ssm.convert.source import HuggingFaceFolder
from fast_llm_ssm.model import ModelConfig, build_meta

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
SILENT = {"say": lambda line: None}
AUTHORS = {
    "vocab_size": 50277,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}
AUTHORS2 = {
    **AUTHORS,
    "d_intermediate": 0,
    "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}
CODESTRAL = {
    "dim": 4096,
    "n_layers": 64,
    "vocab_size": 32768,
    "n_groups": 8,
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 1,
    "tie_embeddings": False,
    "model_type": "mamba",
}


@pytest.mark.parametrize(
    ("name", "d_model", "n_layer", "count"),
    [
        ("mamba-130m", 768, 24, 129_135_360),
        ("mamba-370m", 1024, 48, 371_516_416),
        ("mamba-790m", 1536, 48, 793_204_224),
        ("mamba-1.4b", 2048, 48, 1_372_178_432),
        ("mamba-2.8b", 2560, 64, 2_768_345_600),
        ("mamba2-130m", 768, 24, 128_989_632),
        ("mamba2-2.7b", 2560, 64, 2_702_599_680),
    ],
)
def test_published_settings_give_the_published_size(name: str, d_model: int, n_layer: int, count: int) -> None:
    converter = converters["mamba_ssm"]()
    source = {"d_model": d_model, "n_layer": n_layer, **(AUTHORS2 if "mamba2" in name else AUTHORS)}
    config = converter.import_config(source, name)
    assert build_meta(config).num_parameters() == count
    shipped = ModelConfig.model_validate(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"])
    assert converter.export_config(config, source) == source
    fresh = {key: value for key, value in source.items() if key not in ("attn_cfg", "attn_layer_idx", "d_intermediate")}
    assert converter.export_config(shipped) == {**fresh, "tie_embeddings": True}


def test_codestral_gives_the_published_size() -> None:
    converter = converters["codestral"]()
    config = converter.import_config(CODESTRAL, "codestral")
    assert build_meta(config).num_parameters() == 7_285_403_648
    shipped = ModelConfig.model_validate(yaml.safe_load((CONFIGS / "mamba-codestral-7b.yaml").read_text())["model"])
    assert converter.export_config(shipped) == CODESTRAL


def test_falcon_mambas_published_settings() -> None:
    source = {
        "model_type": "falcon_mamba",
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "vocab_size": 65024,
        "expand": 16,
        "intermediate_size": 8192,
        "time_step_rank": 256,
        "tie_word_embeddings": False,
        "use_falcon_mambapy": False,
    }
    config = converters["falcon_mamba"]().import_config(source, "falcon-mamba-7b")
    assert build_meta(config).num_parameters() == 7_272_665_088
    assert converters["falcon_mamba"]().export_config(config, source) == source


def test_old_files_repeat_the_authors_keys() -> None:
    source = {
        "model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280, "expand": 2,
        "intermediate_size": 1536, "d_inner": 1536, "d_model": 768, "n_layer": 24, "ssm_cfg": {}, "rms_norm": True,
        "fused_add_norm": True, "pad_vocab_size_multiple": 8, "time_step_rank": 48, "torch_dtype": "float32",
    }  # fmt: skip
    config = converters["mamba"]().import_config(source, "mamba-130m-hf")
    assert build_meta(config).num_parameters() == 129_135_360
    assert converters["mamba"]().export_config(config, source) == source


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer is 'Mamba3', expected Mamba1 or Mamba2"),
        ({"ssm_cfg": {"d_stat": 8}}, "ssm_cfg of Mamba1 does not know d_stat: 8"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_rank": 8}}, "ssm_cfg of Mamba2 does not know dt_rank: 8"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 64}}, "d_ssm is 64, expected None"),
        ({"attn_layer_idx": [9, 18]}, r"attn_layer_idx is \[9, 18\], expected \[\]"),
        ({"d_intermediate": 64}, "d_intermediate is 64, expected 0"),
        ({"bimamba": True}, "does not know bimamba: true"),
        ({"n_layer": "many"}, "config.json: "),
        ({"ssm_cfg": [1]}, r"ssm_cfg is \[1\], expected a mapping"),
    ],
)
def test_settings_that_are_not_built_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        converters["mamba_ssm"]().import_config({"d_model": 64, "n_layer": 2, **AUTHORS, **changes}, "x")


def test_a_changed_model_keeps_the_settings_that_still_hold() -> None:
    converter = converters["mamba_ssm"]()
    source = {"d_model": 64, "n_layer": 2, **AUTHORS, "ssm_cfg": {"use_fast_path": False, "d_state": 8, "expand": 3}}
    model = converter.import_config(source, "x").model_dump()
    model["blocks"]["m"][0]["mixer"] |= {"d_state": 16, "dt_rank": 6}
    written = converter.export_config(ModelConfig.model_validate(model), source)
    assert written == {**source, "ssm_cfg": {"use_fast_path": False, "expand": 3, "dt_rank": 6}}


def test_a_layer_norm_comes_and_goes(tmp_path: Path) -> None:
    config = stack(MAMBA, MAMBA, residual_fp32=True)
    for block in (*config["blocks"].values(), config):
        block["final_norm" if block is config else "norm"] = {"type": "layer"}
    check_fresh(tmp_path, config, "mamba_ssm", "pytorch_model.bin")


@pytest.mark.parametrize("mixer", [MAMBA, {**MAMBA2, "gate": "no_norm", "D_has_hdim": True, "dt_limit": [0.01, 0.3]}])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_model_leaves_in_the_authors_layout(tmp_path: Path, mixer: dict[str, Any], tied: bool) -> None:
    config = stack(mixer, mixer, tie_embeddings=tied, residual_fp32=True)
    out = check_fresh(tmp_path, config, "mamba_ssm", "pytorch_model.bin")
    tensors = hf.read_tensors(out)
    assert "lm_head.weight" in tensors  # the package loads strictly
    shared = tensors["lm_head.weight"].data_ptr() == tensors["backbone.embedding.weight"].data_ptr()
    assert shared == tied


def test_a_fresh_model_leaves_in_codestrals_layout(tmp_path: Path) -> None:
    mixer = {"type": "mamba2", "d_inner": 128, "n_groups": 2}
    config = stack(mixer, mixer, tie_embeddings=False, hidden_size=64)
    check_fresh(tmp_path, config, "codestral", "consolidated.safetensors")


def check_fresh(tmp_path: Path, config: dict[str, Any], format: str, file: str) -> Path:
    model = build(config, spread=1.5)
    saved = checkpoint.save(
        tmp_path / "checkpoint",
        tensors=dict(model.named_parameters()),
        config_yaml=yaml.safe_dump({"model": config}),
    )
    out = export_folder(saved, tmp_path / "out", format=format, **SILENT)
    assert {path.name for path in out.iterdir()} == {converters[format].config_file, file}
    again = load_model(out)
    with torch.no_grad():
        assert torch.equal(again(hf.tokens(1, 9) % 37), model(hf.tokens(1, 9) % 37))
    return out


def test_safetensors_of_the_authors_layout_load_and_leave_as_bin(tmp_path: Path) -> None:
    folder = save_mamba_ssm(mamba(vocab_size=64)(), tmp_path / "bin")
    tensors = hf.read_tensors(folder)
    del tensors["lm_head.weight"]  # some writers drop the copy
    other = hf.write_folder(tmp_path / "safe", hf.read_config(folder), tensors)
    import_folder(other, tmp_path / "checkpoint", **SILENT)
    out = export_folder(tmp_path / "checkpoint", tmp_path / "out", **SILENT)
    assert hf.read_tensors(out).keys() == tensors.keys() and (out / "pytorch_model.bin").exists()


def test_a_head_that_differs_from_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    folder = save_mamba_ssm(mamba(vocab_size=64)(), tmp_path / "bin")
    tensors = hf.read_tensors(folder)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="lm_head.weight and backbone.embedding.weight differ"):
        import_folder(folder, tmp_path / "checkpoint", **SILENT)


def test_both_layouts_of_codestral_in_one_folder_read_the_one_of_transformers(tmp_path: Path) -> None:
    model = hf.mamba2(hidden_size=64, num_heads=2, head_dim=64, state_size=128, tie_word_embeddings=False)
    folder = save_codestral(model, hf.save(model, tmp_path / "both"))
    assert HuggingFaceFolder(folder).converter.name == "mamba2"
    (folder / "model.safetensors").unlink()
    assert HuggingFaceFolder(folder).converter.name == "codestral"


def test_what_is_none_of_these_names_the_keys_seen(tmp_path: Path) -> None:
    folder = hf.write_folder(tmp_path / "hf", {"d_model": 8, "depth": 2}, {"layers.0.weight": torch.ones(1)})
    with pytest.raises(UserError, match=r"of no known format .*config.json has the keys d_model, depth; its tensors"):
        HuggingFaceFolder(folder)


@pytest.mark.slow
def test_the_130m_shape_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    reference = MambaForCausalLM(MambaConfig(num_hidden_layers=24, initializer_range=0.02)).eval()
    folder = save_mamba_ssm(reference, tmp_path / "ssm")
    config = hf.read_config(folder)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 50277, "pad_vocab_size_multiple": 8}))
    model = load_model(folder)
    assert model.num_parameters() == 129_135_360
    ids = torch.randint(50277, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, ours = reference(ids).logits, model(ids)
    assert (ours - theirs).abs().max() <= 5e-5 * theirs.abs().max()
