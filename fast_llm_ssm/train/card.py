"""The start-up card and the live line, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from fast_llm_ssm.data import Dataset
from fast_llm_ssm.model import HybridModel
from fast_llm_ssm.model.count import estimate
from fast_llm_ssm.ops import backend
from fast_llm_ssm.train.config import RunConfig, require_trainable
from fast_llm_ssm.train.hardware import device_name, memory_total

_GIB = 1 << 30


def card(config: RunConfig, model: HybridModel, dataset: Dataset, device: torch.device) -> Iterator[tuple[str, str]]:
    """(label, text) of each line at the start."""
    data, train = require_trainable(config)
    yield "model", model_line(model, data.sequence_length)
    tokens = train.batch_size * data.sequence_length
    yield (
        "batch",
        f"{tokens:,} tokens = {train.micro_batch} x {data.sequence_length:,} x {train.num_micro_batches} micro-batches"
        f"   {train.steps:,} steps for {count(train.steps * tokens)} tokens",
    )
    for line in dataset.summary():
        yield "data", line
    needs = estimate(
        model,
        data.sequence_length,
        train.micro_batch,
        activation_bytes=model.dtype.itemsize,
        recompute=train.activation_checkpointing == "full",
    )
    yield (
        "memory",
        f"about {needs.total / _GIB:.2g} GiB of {memory_total(device) / _GIB:.0f} on {device_name(device)}"
        f"   {str(model.dtype).removeprefix('torch.')}   {_backends(device)}",
    )
    if device.type == "cuda" and not train.deterministic:
        yield "note", "runs are not bit-reproducible; train.deterministic=true makes them so"


def _backends(device: torch.device) -> str:
    """Which ops run as kernels, and why the others do not."""
    if device.type == "cpu":
        return "ops: reference, on the CPU"
    ops = {status.name.partition(":")[0]: status for status in backend.status() if status.name.endswith(": triton")}
    return ", ".join(f"{name} {'triton' if op.available else f'reference ({op.reason})'}" for name, op in ops.items())


def model_line(model: HybridModel, sequence_length: int) -> str:
    """Layers, parameters (shared and tied ones once), work of a training step."""
    kinds = ", ".join(f"{number} {name}" for name, number in Counter(model.config.layer_names).items())
    shared = len(model.config.shared)
    blocks = f" ({shared} shared block{'s' * (shared > 1)})" if shared else ""
    return (
        f"{len(model.layers)} layers: {kinds}{blocks}   {count(model.num_parameters())} parameters   "
        f"{count(model.flops_per_token(sequence_length), 'G')}FLOP/token"
    )


def count(number: float, giga: str = "B") -> str:
    """Four digits and a letter: 352.4 M."""
    for size, letter in ((1e12, "T"), (1e9, giga), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """4h 58m, 3m 20s, 12s."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h {seconds % 3600 // 60:02}m"
    return f"{seconds // 60}m {seconds % 60:02}s" if seconds >= 60 else f"{seconds}s"
