"""The whole way: a Zamba 2 comes in, trains, and leaves to continue a prompt as here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from helpers import huggingface as hf

from fast_llm_ssm.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The command's output."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert not caught.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_import_train_export_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    reference = hf.zamba2(
        vocab_size=258, num_mem_blocks=2, layers="mhmhh", bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    folder = hf.save(reference.to(dtype), tmp_path / "hf")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    config = {
        "name": "chain",
        "runs": str(tmp_path / "runs"),
        "model": {"from": str(tmp_path / "imported")},
        "data": {
            "tokenizer": {"type": "bytes"},
            "sequence_length": 32,
            "sources": [{"type": "text", "paths": [str(tmp_path / "text.txt")]}],
        },
        "train": {"steps": 3, "batch_size": 2, "precision": "fp32", "device": "cpu"},
        "optim": {"lr": 1e-2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))

    run(capsys, "import", folder, tmp_path / "imported")
    assert "imported" in run(capsys, "train", "--config", tmp_path / "run.yaml")
    run(capsys, "export", tmp_path / "runs" / "chain", tmp_path / "out")

    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    before, after = hf.read_tensors(folder), hf.read_tensors(tmp_path / "out")
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > 0.9 * len(before)

    # Both read the exported numbers in fp32: bf16 rounds every step, and greedy choices with it.
    prompt, length = [84, 104, 101, 32], 24
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False)[0, len(prompt) :].tolist()
    source = tmp_path / "out" if dtype == torch.float32 else rounded(tmp_path)
    options = ("--token-ids", "--prompt", " ".join(map(str, prompt)), "--max-new-tokens", length, "--device", "cpu")
    ours = run(capsys, "generate", "--checkpoint", source, *options)
    assert [int(word) for word in ours.split()] == theirs
    if dtype == torch.float32:
        assert run(capsys, "generate", "--checkpoint", tmp_path / "runs" / "chain", *options) == ours


def rounded(folder: Path) -> Path:
    """The exported bf16 numbers, stored as fp32."""
    tensors = {name: tensor.float() for name, tensor in hf.read_tensors(folder / "out").items()}
    return hf.write_folder(folder / "rounded", hf.read_config(folder / "out"), tensors)
