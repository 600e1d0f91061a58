"""A checkpoint of the real Zamba2 1.2B shape: time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from fast_llm_ssm.checkpoint import LazyTensor
from fast_llm_ssm.convert.base import converters
from fast_llm_ssm.convert.rules import file_shapes
from fast_llm_ssm.convert.write import write_shards
from fast_llm_ssm.model import ModelConfig, build_meta

CONFIG = Path(__file__).parents[2] / "configs" / "models" / "zamba2-1.2b.yaml"
SECONDS = 90

# Imports what the command imports, notes the anonymous memory, runs, and reports the highest value seen.
PROBE = """
import json, sys, threading, time
from pathlib import Path
import torch
from fast_llm_ssm.convert.importing import import_folder
from fast_llm_ssm.convert.exporting import export_folder

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

base, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.005)
thread = threading.Thread(target=watch)
thread.start()
start = time.monotonic()
try:
    command = import_folder if sys.argv[1] == "import" else export_folder
    command(Path(sys.argv[2]), Path(sys.argv[3]), say=lambda line: None)
finally:
    done = True
    thread.join()
print(json.dumps({"seconds": time.monotonic() - start, "memory": peak - base}))
"""


def random_checkpoint(folder: Path) -> int:
    """bf16, three shards; returns the size of the largest."""
    config = ModelConfig.model_validate(yaml.safe_load(CONFIG.read_text())["model"])
    converter = converters["zamba2"]()
    shapes = {name: tuple(tensor.shape) for name, tensor in build_meta(config).state_dict().items()}
    tensors = {}
    for rule in converter.tensor_rules(config):
        (shape,) = file_shapes(rule, shapes)
        tensors[rule.files[0]] = LazyTensor(shape, torch.bfloat16, partial(torch.randn, shape, dtype=torch.bfloat16))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**converter.export_config(config), "torch_dtype": "bfloat16"}))
    total, files, size = sum(_size(tensor) for tensor in tensors.values()), {}, 0
    for name, tensor in tensors.items():
        files[name] = f"model-{1 + min(2, size * 3 // total):05}-of-00003.safetensors"
        size += _size(tensor)
    write_shards(folder, tensors, files)
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def _size(tensor: LazyTensor) -> int:
    return 2 * torch.Size(tensor.shape).numel()


@pytest.mark.slow
def test_import_and_export_of_the_real_size(tmp_path: Path) -> None:
    largest = random_checkpoint(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    for command, source, target in (("import", "hf", "checkpoint"), ("export", "checkpoint", "out")):
        arguments = [sys.executable, "-c", PROBE, command, str(tmp_path / source), str(tmp_path / target)]
        result = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
        print(
            f"{command}: {result['seconds']:.1f} s, {result['memory'] / 2**20:.0f} MiB, shard {largest / 2**20:.0f} MiB"
        )
        assert result["seconds"] < SECONDS
        assert result["memory"] < 2 * largest
    for path in (tmp_path / "hf").iterdir():
        if path.suffix == ".safetensors":
            assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
