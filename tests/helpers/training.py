"""Tiny training runs."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import yaml

from fast_llm_ssm.train.config import RunConfig, load_config

MAMBA2 = {"type": "mamba2", "d_inner": 32, "d_state": 8, "head_dim": 8, "chunk_size": 16}
MODEL = {
    "hidden_size": 16,
    "vocab_size": 258,
    "shared": {
        "T": [
            {"input_size": 32, "residual": False, "mixer": {"type": "attention", "num_heads": 2, "head_dim": 8}},
            {"residual": False, "mixer": {"type": "mlp", "size": 24}},
        ]
    },
    "blocks": {"h": {"mixer": MAMBA2, "inject": {"shared": ["T"]}}},
    "pattern": "hh",
}


def write_text(path: Path, documents: int = 40, seed: int = 0) -> Path:
    """Short documents of words, separated by blank lines."""
    words = "the state of a model remembers what was read and forgets what was not needed".split()
    draw = random.Random(seed)
    path.write_text("\n\n".join(" ".join(draw.choices(words, k=draw.randint(3, 30))) for _ in range(documents)))
    return path


def run_tree(folder: Path) -> dict[str, Any]:
    """A run of six steps as the content of a run file; the text is written where it is missing."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    return {
        "name": "tiny",
        "runs": str(folder / "runs"),
        "model": copy.deepcopy(MODEL),
        "data": {
            "sources": [{"type": "text", "paths": [str(text)], "split": "blank_lines"}],
            "tokenizer": {"type": "bytes"},
            "sequence_length": 24,
            "validation": {"fraction": 0.2, "max_rows": 4},
        },
        "train": {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "precision": "fp32", "device": "cpu"},
        "optim": {"lr": 1e-2},
        "schedule": {"type": "cosine", "warmup_steps": 2},
        "checkpoint": {"every": 3},
        "log": {"seconds": 0, "tensorboard": False},
    }


def run_file(folder: Path) -> Path:
    """The same as a file."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(run_tree(folder)))
    return path


def tiny_run(folder: Path, *overrides: str) -> RunConfig:
    """The same, read."""
    return load_config(run_file(folder), *overrides)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def reproducible(run: Path) -> list[dict[str, Any]]:
    """The same without times and memory, which differ from run to run."""
    varying = ("seconds", "tokens_per_second", "data_share", "memory_gib")
    return [{key: value for key, value in row.items() if key not in varying} for row in metrics(run)]
