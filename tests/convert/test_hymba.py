"""Hymba against values of the original: a tiny model with its logits, loss and gradients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import huggingface as hf
from safetensors.torch import load_file

from fast_llm_ssm import checkpoint
from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import converters
from fast_llm_ssm.convert.exporting import export_folder
from fast_llm_ssm.convert.importing import import_folder
from fast_llm_ssm.convert.load import load_model
from fast_llm_ssm.convert.source import HuggingFaceFolder
from fast_llm_ssm.model import HybridModel, ModelConfig, build_model

GOLDEN = Path(__file__).parent / "golden_hymba"
VALUES = load_file(GOLDEN / "golden.safetensors")
IDS, LOGITS = VALUES["input_ids"], VALUES["logits"]
SCALE = float(LOGITS.abs().max())


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return load_model(GOLDEN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The golden model as it would come from a hub: without the golden values, with code."""
    folder = tmp_path_factory.mktemp("hub") / "hymba"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    for name in ("modeling_hymba.py", "configuration_hymba.py"):
        (folder / name).write_text("raise SystemExit('this code must never run')\n")
    yield folder


def test_logits_of_the_original(model: HybridModel) -> None:
    with torch.no_grad():
        assert (model(IDS) - LOGITS).abs().max() <= 1e-5 * SCALE


def test_loss_and_gradients_of_the_original(model: HybridModel) -> None:
    model.zero_grad()
    loss = model.loss(IDS[:, :-1], IDS[:, 1:])
    torch.testing.assert_close(loss, VALUES["loss"][0], rtol=1e-6, atol=0)
    loss.backward()
    ours, checked = dict(model.named_parameters()), set()
    for rule in converters["hymba"]().tensor_rules(model.config):
        for name, gradient in zip(rule.files, rule.save(*(ours[p].grad for p in rule.params)), strict=True):
            expected = VALUES[f"grad.{name}"]
            assert (gradient - expected).norm() <= 1e-4 * expected.norm(), name
            checked.add(f"grad.{name}")
    assert checked == {name for name in VALUES if name.startswith("grad.")}


def changed(model: HybridModel, **attention: Any) -> HybridModel:
    """The same weights with other settings of attention, in the layers that have these settings at all."""
    config = model.config.model_dump()
    for block in config["blocks"].values():
        branch = block[0]["mixer"]["branches"][0]
        branch.update({key: value for key, value in attention.items() if branch[key]})
    other = build_model(ModelConfig.model_validate(config))
    other.load_state_dict(model.state_dict())
    return other


def without_meta_tokens(model: HybridModel) -> HybridModel:
    other = build_model(ModelConfig.model_validate({**model.config.model_dump(), "meta_tokens": 0}))
    other.load_state_dict({name: w for name, w in model.state_dict().items() if name != "meta_tokens"})
    return other


ROPE = {"type": "hymba_ntk", "theta": 10000.0, "max_positions": 64, "original_max_positions": 16}
MISTAKES = {
    "window one shorter": lambda model: changed(model, window=5),
    "window one longer": lambda model: changed(model, window=7),
    "meta tokens inside the window only": lambda model: changed(model, prefix=0),
    "plain rope": lambda model: changed(model, rope={"theta": 10000.0}),
    "other rope base": lambda model: changed(model, rope={**ROPE, "original_max_positions": 32}),
    "skipped meta tokens": without_meta_tokens,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_far_from_the_original(model: HybridModel, mistake: str) -> None:
    with torch.no_grad():
        assert (MISTAKES[mistake](model)(IDS) - LOGITS).abs().max() > 1e-2 * SCALE


@pytest.mark.parametrize("first", [1, 5, 20])
def test_steps_equal_the_original(model: HybridModel, first: int) -> None:
    with torch.no_grad():
        state = model.new_state(2, 33)
        logits = [model.prefill(IDS[:, :first], state)] + [model.step(IDS[:, t], state) for t in range(first, 33)]
        assert (torch.stack(logits, 1) - LOGITS[:, first - 1 :]).abs().max() <= 2e-5 * SCALE


def test_packed_documents_equal_separate_ones(model: HybridModel) -> None:
    bounds = [0, 9, 21, 33, 40, 66]
    with torch.no_grad():
        packed = model(IDS, torch.tensor(bounds)).flatten(0, 1)
        for first, last in zip(bounds, bounds[1:], strict=False):
            alone = model(IDS.flatten()[None, first:last])[0]
            assert (packed[first:last] - alone).abs().max() <= 2e-5 * SCALE


def test_export_gives_the_source_back(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    import_folder(folder, tmp_path / "checkpoint", say=said.append)
    out = export_folder(tmp_path / "checkpoint", tmp_path / "out", say=said.append)
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}
    for name in ("config.json", "modeling_hymba.py", "configuration_hymba.py"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert "conv_dim" in json.loads((out / "config.json").read_text())
    written, original = hf.read_tensors(out), hf.read_tensors(folder)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in written)
    code = "configuration_hymba.py, modeling_hymba.py"
    assert any("never run" in line and code in line for line in said[:3])
    assert any("never run" in line and code in line for line in said[-3:])


def test_a_trained_model_keeps_the_settings(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "checkpoint", say=lambda line: None)
    model = load_model(tmp_path / "checkpoint")
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    saved = checkpoint.find(tmp_path / "checkpoint")
    source = saved.folder("source")
    assert source is not None
    checkpoint.save(
        tmp_path / "trained",
        tensors=dict(model.named_parameters()),
        config_yaml=saved.config_yaml,
        source_files={path.name: path for path in source.iterdir()},
    )
    out = export_folder(tmp_path / "trained", tmp_path / "out", say=lambda line: None)
    assert hf.read_config(out) == hf.read_config(folder)
    with torch.no_grad():
        again = load_model(out)(IDS)
        assert torch.equal(again, model(IDS)) and (again - LOGITS).abs().max() > 1e-2


def test_fresh_settings_describe_the_same_model(model: HybridModel) -> None:
    converter = converters["hymba"]()
    settings = converter.export_config(model.config)
    again = converter.import_config(settings, model.config.name)
    assert again.blocks == model.config.blocks and again.layer_names == model.config.layer_names
    assert settings["kv_reuse_group"] == [[1, 2, 3], [4, 5]] and settings["sliding_window"] == 5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_reuse_group": [[0, 2], [4, 5]]}, "expected each group to reuse the nearest earlier layer's"),
        ({"kv_reuse_group": [[1, 2, 3], [4, 5, 6]]}, "has the global layer 6, which is not built"),
        ({"kq_norm": "rms"}, "kq_norm is 'rms', expected 'none'"),
        ({"num_experts": 4}, "num_experts is 4, expected 1"),
        ({"rope_type": "yarn"}, "rope_type is 'yarn', expected ntk or default"),
        ({"memory_tokens_interspersed_every": 8}, "memory_tokens_interspersed_every is 8, expected 0"),
        ({"layer_type": ["h", "m", "h", "h", "h", "h", "h"]}, "expected h for all"),
        ({"trick": 1}, "format hymba does not know trick: 1"),
    ],
)
def test_what_is_not_built_is_named(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    other = hf.write_folder(tmp_path / "hf", {**hf.read_config(folder), **change}, hf.read_tensors(folder))
    with pytest.raises(UserError, match=message):
        HuggingFaceFolder(other)
