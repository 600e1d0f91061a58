"""Zamba 2: shared blocks in turn, what belongs to which use, the layouts and spellings found in the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import huggingface as hf
from helpers.zamba2_blocks import blocks_config, blocks_tensors, save_blocks_layout
from safetensors.torch import save_file

from fast_llm_ssm.checkpoint import Checkpoint
from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.exporting import export_folder
from fast_llm_ssm.convert.importing import import_folder
from fast_llm_ssm.convert.load import load_model, model_config
from fast_llm_ssm.convert.source import HuggingFaceFolder
from fast_llm_ssm.layers.layout import plain_layout
from fast_llm_ssm.model import HybridModel

LAYERS_27B = [6, 12, 18, 24, 30, 36, 42, 47, 51]
SILENT = {"say": lambda line: None}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.zamba2(num_mem_blocks=2, layers="mhmhh"), tmp_path_factory.mktemp("zamba2") / "hf")


def changed(small: Path, folder: Path, **changes: Any) -> Path:
    """A copy with other settings; None takes a key away."""
    config = {key: value for key, value in {**hf.read_config(small), **changes}.items() if value is not None}
    return hf.write_folder(folder, config, hf.read_tensors(small))


def transformers_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(ids).logits


def ours(model: HybridModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids)


def shared_outputs(model: HybridModel) -> dict[int, torch.Tensor]:
    """What each hybrid layer's shared block gives for the same input."""
    generator = torch.Generator().manual_seed(3)
    x, e = (torch.randn(1, 5, model.config.hidden_size, generator=generator) for _ in range(2))
    layout = plain_layout(1, 5, x.dtype, x.device)
    with torch.no_grad():
        return {
            i: layer[0].inject(x, e, layout, "forward", None)
            for i, layer in enumerate(model.layers)
            if layer[0].inject is not None
        }


def changes(before: dict[int, torch.Tensor], after: dict[int, torch.Tensor]) -> list[int]:
    return [i for i in before if not torch.equal(before[i], after[i])]


def test_two_shared_blocks_take_turns_over_hybrid_layers(tmp_path: Path) -> None:
    layers = "".join("h" if i in LAYERS_27B else "m" for i in range(54))
    folder = hf.save(hf.zamba2(layers=layers, num_mem_blocks=2, use_mem_rope=False), tmp_path / "hf")
    model = load_model(folder)
    before = shared_outputs(model)
    assert list(before) == LAYERS_27B
    for name, users in (("A", LAYERS_27B[0::2]), ("B", LAYERS_27B[1::2])):
        weight = model.shared[name][0].mixer.o_proj.weight
        with torch.no_grad():
            weight.add_(1.0)
            assert changes(before, shared_outputs(model)) == users
            weight.sub_(1.0)
            before = shared_outputs(model)
    tensors = hf.read_tensors(folder)
    for use, layer in enumerate(LAYERS_27B):
        home = f"model.layers.{LAYERS_27B[use % 2]}.shared_transformer.feed_forward"
        adapter = model.layers[layer][0].inject.adapters[1]["gate_up"].up.weight
        assert torch.equal(adapter, tensors[f"{home}.gate_up_proj_adapter_list.{use}.1.weight"])
    with torch.no_grad():
        model.layers[LAYERS_27B[3]][0].inject.adapters[1]["gate_up"].up.weight.add_(1.0)
    assert changes(before, shared_outputs(model)) == [LAYERS_27B[3]]


def test_ties_do_not_depend_on_the_digits_of_layer_numbers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    layers = "".join("h" if i in (1, 11, 21) else "m" for i in range(23))
    folder = hf.save(hf.zamba2(layers=layers, num_mem_blocks=2), tmp_path / "hf")
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    model = load_model(saved)
    blocks = {i: model.layers[i][0].inject.block for i in (1, 11, 21)}
    assert blocks[1] is blocks[21] and blocks[1] is not blocks[11]
    exported = export_folder(saved, tmp_path / "out", **SILENT)
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    for part in ("self_attn.q_proj", "feed_forward.down_proj", "input_layernorm"):
        where = {
            i: loaded.get_submodule(f"model.layers.{i}.shared_transformer.{part}").weight.data_ptr() for i in blocks
        }
        assert where[1] == where[21] and where[1] != where[11]


def test_hybrid_layers_only_hold_a_shared_block_once(small: Path, tmp_path: Path) -> None:
    saved = import_folder(small, tmp_path / "checkpoint", **SILENT)
    out = hf.read_tensors(export_folder(saved, tmp_path / "out", **SILENT))
    homes = {name.split(".")[2] for name in out if ".shared_transformer." in name}
    assert homes == {"1", "3"} and "lm_head.weight" not in out


def test_older_files_repeat_shared_blocks(tmp_path: Path) -> None:
    model = hf.zamba2(num_mem_blocks=2, layers="mhmhhh")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # every name, tied or not
    config = model.config.to_dict() | {"architectures": ["Zamba2ForCausalLM"]}
    folder = hf.write_folder(tmp_path / "hf", config, tensors)
    assert "lm_head.weight" in tensors and "model.layers.5.shared_transformer.self_attn.q_proj.weight" in tensors
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    ids = hf.tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(ours(load_model(saved), ids), model(ids).logits, rtol=0, atol=1e-5)
    out = hf.read_tensors(export_folder(saved, tmp_path / "out", **SILENT))
    assert out.keys() == tensors.keys() and all(torch.equal(out[name], tensors[name]) for name in tensors)

    name = "model.layers.5.shared_transformer.self_attn.q_proj.weight"
    hf.write_folder(tmp_path / "bad", config, {**tensors, name: tensors[name] + 1})
    with pytest.raises(UserError, match="layers.5.* and .*layers.3.* differ"):
        import_folder(tmp_path / "bad", tmp_path / "not there", **SILENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "checkpoint", "hf", "out"]


def test_the_blocks_layout_equals_the_same_model_in_the_other(tmp_path: Path) -> None:
    model = hf.zamba2(num_mem_blocks=2, layers="mhmhh", time_step_min=1e-30)
    folder = save_blocks_layout(model, tmp_path / "hf")
    source = HuggingFaceFolder(folder)
    assert source.converter.name == "zamba2_blocks"
    assert len(source.carried) == 3 * 4 * 2  # uses times targets times factors: one block has none of the others
    assert all(limit == (0.0, float("inf")) for limit in limits(source.config))
    ids = hf.tokens(2, 29)
    with torch.no_grad():
        torch.testing.assert_close(ours(load_model(folder), ids), model(ids).logits, rtol=0, atol=1e-5)


def test_the_blocks_layout_can_leave_as_the_other_one(tmp_path: Path) -> None:
    model = hf.zamba2(num_mem_blocks=2, layers="mhmhh", time_step_min=1e-30)
    saved = import_folder(save_blocks_layout(model, tmp_path / "hf"), tmp_path / "checkpoint", **SILENT)
    out = export_folder(saved, tmp_path / "out", format="zamba2", **SILENT)
    ids = hf.tokens(2, 29)
    torch.testing.assert_close(transformers_logits(out, ids), ours(load_model(saved), ids), rtol=0, atol=1e-5)


def test_of_two_layouts_side_by_side_the_newer_counts(small: Path, tmp_path: Path) -> None:
    model = hf.zamba2(num_mem_blocks=2, layers="mhmhh")
    older = {name: tensor for name, tensor in blocks_tensors(model).items() if name.startswith("model.blocks.")}
    folder = hf.write_folder(tmp_path / "hf", hf.read_config(small), {**hf.read_tensors(small), **older})
    said: list[str] = []
    saved = import_folder(folder, tmp_path / "checkpoint", say=said.append)
    assert any(f"left out: {len(older)} tensors of an older layout" in line for line in said)
    out = hf.read_tensors(export_folder(saved, tmp_path / "out", **SILENT))
    assert out.keys() == hf.read_tensors(small).keys()


def limits(config: Any) -> list[tuple[float, float]]:
    return [sublayer.mixer.dt_limit for block in config.blocks.values() for sublayer in block]


def test_the_step_size_limit_of_transformers_is_taken_and_said(small: Path, tmp_path: Path) -> None:
    said: list[str] = []
    saved = import_folder(small, tmp_path / "checkpoint", say=said.append)
    assert limits(model_config(Checkpoint(saved))) == [(0.001, float("inf"))] * 2
    (line,) = [line for line in said if "dt_limit" in line]
    assert "[0.001, inf]" in line and "mamba2.dt_limit=[0.0,.inf]" in line
    model = load_model(saved)
    with torch.no_grad():
        for layer in model.layers:
            layer[0].mixer.dt_bias.fill_(-20.0)  # every step size at the limit
        ids = hf.tokens(2, 12)
        full = model(ids)
        state = model.new_state(2, 12)
        model.prefill(ids[:, :5], state)
        steps = torch.stack([model.step(ids[:, i], state) for i in range(5, 12)], dim=1)
    torch.testing.assert_close(steps, full[:, 5:], rtol=0, atol=1e-5)


def test_another_step_size_limit_can_be_set_and_leaves_with_the_model(small: Path, tmp_path: Path) -> None:
    saved = import_folder(small, tmp_path / "checkpoint", ["mamba2.dt_limit=[0.0,.inf]", "model.name=mine"], **SILENT)
    config = model_config(Checkpoint(saved))
    assert limits(config) == [(0.0, float("inf"))] * 2 and config.name == "mine"
    out = export_folder(saved, tmp_path / "out", **SILENT)
    before, after = hf.read_config(small), hf.read_config(out)
    assert {key for key in before if before[key] != after[key]} == {"time_step_min"} and list(before) == list(after)
    ids = hf.tokens(2, 29)
    torch.testing.assert_close(transformers_logits(out, ids), ours(load_model(saved), ids), rtol=0, atol=1e-5)
    assert limits(model_config(Checkpoint(import_folder(out, tmp_path / "again", **SILENT)))) == limits(config)


@pytest.mark.parametrize(
    "override", ["mamba2.d_sate=3", "mlpp.size=3", "attention.num_heads=many", "model.hidden_size=33"]
)
def test_a_wrong_override_is_named(small: Path, tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="override|input_size: got 64, expected 66"):
        import_folder(small, tmp_path / "checkpoint", [override], **SILENT)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("words", [("mamba", "hybrid"), ("linear_attention", "hybrid")])
@pytest.mark.parametrize("infinity", ["Infinity", '"Infinity"', '{"__float__": "Infinity"}'])
def test_every_spelling_is_read_and_repeated(
    small: Path, tmp_path: Path, words: tuple[str, str], infinity: str
) -> None:
    plain, hybrid = words
    config = hf.read_config(small)
    config["layers_block_type"] = [plain if kind != "hybrid" else hybrid for kind in config["layers_block_type"]]
    text = json.dumps(config, indent=4).removesuffix("\n}") + f',\n    "time_step_limit": [0.0, {infinity}]\n}}'
    folder = hf.write_folder(tmp_path / "hf", config, hf.read_tensors(small))
    (folder / "config.json").write_text(text)
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    out = export_folder(saved, tmp_path / "out", **SILENT)
    assert (out / "config.json").read_text() == text
    changed = import_folder(folder, tmp_path / "other", ["model.final_norm.eps=1e-3"], **SILENT)
    with pytest.raises(UserError, match="one rms_norm_eps for all"):
        export_folder(changed, tmp_path / "no", **SILENT)


def test_rope_and_sizes_of_older_files(small: Path, tmp_path: Path) -> None:
    folder = changed(
        small,
        tmp_path / "hf",
        rope_parameters=None,
        rope_theta=123.0,
        hybrid_layer_ids=None,
        attention_head_dim=None,
        mamba_headdim=None,
        num_key_value_heads=None,
        kv_channels=8,
        use_shared_mlp_adapter=True,
        sliding_window=4096,
    )
    ids = hf.tokens(2, 9)
    torch.testing.assert_close(ours(load_model(folder), ids), transformers_logits(folder, ids), rtol=0, atol=1e-5)
    other = changed(small, tmp_path / "other", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert (ours(load_model(folder), ids) - ours(load_model(other), ids)).abs().max() > 1e-3


def test_the_inner_width_is_heads_times_head_size(small: Path, tmp_path: Path) -> None:
    model = hf.zamba2(n_mamba_heads=4, mamba_headdim=16)
    folder = hf.save(model, tmp_path / "hf")
    config = hf.read_config(folder)
    config["mamba_expand"] = 6  # says 192, while the tensors have 4 x 16
    (folder / "config.json").write_text(json.dumps(config))
    mixer = HuggingFaceFolder(folder).config.blocks["m"][0].mixer
    assert (mixer.d_inner, mixer.num_heads, mixer.head_dim) == (64, 4, 16)
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    assert hf.read_config(export_folder(saved, tmp_path / "out", **SILENT)) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "mish"}, "hidden_act is 'mish', expected one of gelu"),
        ({"gated_linear_unit": False}, "gated_linear_unit is False, expected True: anything else is not built"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling yarn is not built"),
        ({"layers_block_type": ["mamba"] * 4 + ["attention"]}, "layers_block_type has attention, expected mamba"),
        ({"num_hidden_layers": 7}, "num_hidden_layers is 7, but layers_block_type gives 5"),
        ({"hybrid_layer_ids": [0]}, "hybrid_layer_ids is"),
        ({"layers_block_type": None}, "the key layers_block_type is missing"),
        ({"mamba_ngroups": 3}, "n_groups"),
        ({"hidden_size": "32"}, "a value of the wrong kind|hidden_size"),
        ({"num_attention_heads": 0}, "a value of the wrong kind|num_heads"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ],
)
def test_settings_that_are_not_built_are_refused(small: Path, tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=rf"config\.json: .*({words})"):
        HuggingFaceFolder(changed(small, tmp_path / "hf", **changes))


def test_a_bf16_source_in_shards_comes_back_as_it_was(tmp_path: Path) -> None:
    model = hf.zamba2(num_mem_blocks=2, layers="mhmhh").to(torch.bfloat16)
    folder = hf.save(model, tmp_path / "hf", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "README.md").write_text("a model card")
    (folder / "modeling_zamba2.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization.Nothing", null]}}')
    said: list[str] = []
    saved = import_folder(folder, tmp_path / "checkpoint", say=said.append)
    assert any("never run: modeling_zamba2.py" in line for line in said) and any(
        "no tokenizer" in line for line in said
    )
    loaded = load_model(saved)
    dtypes = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert all(
        dtype == (torch.float32 if name in loaded.fp32_names() else torch.bfloat16) for name, dtype in dtypes.items()
    )
    assert {p.dtype for p in load_model(saved, dtype=torch.float32).parameters()} == {torch.float32}
    out = export_folder(saved, tmp_path / "out", say=said.append)
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names:
        if name != "model.safetensors.index.json":
            assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    index = [json.loads((where / "model.safetensors.index.json").read_text()) for where in (folder, out)]
    assert index[0]["weight_map"] == index[1]["weight_map"]
    assert not (tmp_path / "ran").exists()


def test_a_bin_source_leaves_as_safetensors(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_bytes((small / "config.json").read_bytes())
    torch.save(hf.read_tensors(small), folder / "pytorch_model.bin")
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    out = export_folder(saved, tmp_path / "out", **SILENT)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    written = hf.read_tensors(out)
    assert all(torch.equal(written[name], tensor) for name, tensor in hf.read_tensors(small).items())


def test_the_config_without_hybrid_layers(tmp_path: Path) -> None:
    folder = hf.save(hf.zamba2(layers="mmm"), tmp_path / "hf")
    saved = import_folder(folder, tmp_path / "checkpoint", **SILENT)
    assert model_config(Checkpoint(saved)).shared == {}
    assert hf.read_config(export_folder(saved, tmp_path / "out", **SILENT)) == hf.read_config(folder)


def test_blocks_config_has_the_keys_of_the_first_uploads(tmp_path: Path) -> None:
    model = hf.zamba2(layers="mh")
    config = blocks_config(model.config)
    del config["mamba_ngroups"], config["chunk_size"]
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in blocks_tensors(model).items()}, folder / "model.safetensors"
    )
    mixer = HuggingFaceFolder(folder).config.blocks["m"][0].mixer
    assert (mixer.n_groups, mixer.chunk_size, mixer.num_heads) == (1, 256, 8)
