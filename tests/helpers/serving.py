"""A small checkpoint, and a real server over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from helpers.models import ATTENTION, MAMBA2, build, stack

from fast_llm_ssm import checkpoint
from fast_llm_ssm.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[2]
TALKER = stack(MAMBA2, {**ATTENTION, "window": 20}, MAMBA2, vocab_size=258, tie_embeddings=False)
"""A hybrid over bytes."""


def save_checkpoint(folder: Path, config: dict[str, Any] = TALKER, tokenizer: bool = True) -> Path:
    """A checkpoint of random weights, with the byte tokenizer."""
    return checkpoint.save(
        folder,
        tensors=build(config).state_dict(),
        config_yaml=json.dumps({"model": config}),
        tokenizer=ByteTokenizer() if tokenizer else None,
    )


@contextmanager
def server(folder: Path, *options: str, **environment: str) -> Iterator[httpx.Client]:
    """`fast-llm serve` on a free port of loopback, in a process of its own; yields a client once it is ready."""
    command = [sys.executable, "-c", "from fast_llm_ssm.cli import main; main()", "serve", "--checkpoint", str(folder)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--device", "cpu", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = next((line.split()[1] for line in process.stdout if line.startswith("ready")), None)
        assert address is not None, "the server ended before it was ready"
        with httpx.Client(base_url=address, timeout=60) as client:
            client.headers["x-process"] = str(process.pid)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=20)
