"""From a run file to a trainer: what is built, and where training begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fast_llm_ssm import checkpoint
from fast_llm_ssm.checkpoint import Checkpoint
from fast_llm_ssm.config import UserError
from fast_llm_ssm.data import Dataset, build_dataset
from fast_llm_ssm.model import HybridModel, build_model
from fast_llm_ssm.ops import backend
from fast_llm_ssm.train.config import RunConfig, require_trainable
from fast_llm_ssm.train.hardware import choose_device, choose_precision
from fast_llm_ssm.train.optimizer import build_optimizer, optimizer_tensors
from fast_llm_ssm.train.run_folder import RunFolder, changed_settings, refuse_other_data, refuse_other_model


@dataclass
class Start:
    """What training works on, and how far it had come.

    Attributes:
        step: Updates done.
        samples: Rows of the data consumed; the next step begins with this one.
        lines: What to tell about it, as (label, text).
        source_files: What the model's import kept of its origin, by name; every checkpoint passes it on, so that an
            export finds it.
    """

    device: torch.device
    model: HybridModel
    dataset: Dataset
    optimizer: torch.optim.AdamW
    step: int
    samples: int
    lines: list[tuple[str, str]]
    source_files: dict[str, bytes] | None = None


def prepare(config: RunConfig, folder: RunFolder) -> Start:
    """Build everything; go on from the run's newest complete checkpoint, from other weights, or from the beginning.

    Raises:
        UserError: The checkpoint is of another model or other data; the tokenizer does not fit the model.
    """
    data, train = require_trainable(config)
    saved = folder.newest()
    if saved is not None:
        refuse_other_model(saved, config)
    device = choose_device(train.device)
    _set_backend(train.backend, device)
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(train.deterministic)
    dataset = build_dataset(data, config.seed)
    if dataset.tokenizer.vocab_size > config.model.vocab_size:
        needed = dataset.tokenizer.vocab_size
        raise UserError(
            f"model.vocab_size: got {config.model.vocab_size:,}, expected at least the tokenizer's {needed:,}"
        )
    if saved is not None:
        refuse_other_data(saved, dataset)
    model = build_model(config.model, device, seed=config.seed)
    model.compute_dtype = choose_precision(train.precision, device)
    model.activation_checkpointing = train.activation_checkpointing
    optimizer = build_optimizer(model, config.optim)
    start = Start(device, model, dataset, optimizer, 0, 0, [])
    if saved is not None:
        _resume(start, saved, config)
    elif config.model.start_from is not None:
        _start_from(start, checkpoint.find(config.model.start_from))
    else:
        start.lines.append(("start", f"at step 0, initial weights drawn with seed {config.seed}"))
    return start


def _set_backend(name: Literal["auto", "triton", "reference"], device: torch.device) -> None:
    if name == "triton":
        missing = [status for status in backend.status() if status.name.endswith(": triton") and not status.available]
        reason = f"{missing[0].name.partition(':')[0]}: {missing[0].reason}" if missing else ""
        if device.type == "cpu":
            reason = "training runs on the CPU"
        if reason:
            raise UserError(f"train.backend: got triton, which cannot run here ({reason}); expected auto or reference")
    backend.set_default(name)


def _resume(start: Start, saved: Checkpoint, config: RunConfig) -> None:
    saved.load_into(start.model)
    saved.load_optimizer_into(optimizer_tensors(start.optimizer, start.model))
    start.step, start.samples = saved.state["step"], saved.state["samples"]
    start.source_files = _source_files(saved)
    start.lines.append(("resume", f"{saved.path} (complete; data at sample {start.samples:,})"))
    start.lines += [("changed", line) for line in changed_settings(saved, config)]


def _start_from(start: Start, saved: Checkpoint) -> None:
    saved.load_into(start.model)
    start.source_files = _source_files(saved)
    trained = "" if saved.step is None else f" (trained for {saved.step:,} steps)"
    line = f"at step 0 of a fresh schedule, weights of {saved.path}{trained}; fresh optimizer, data from the beginning"
    start.lines.append(("start", line))


def _source_files(saved: Checkpoint) -> dict[str, bytes] | None:
    folder = saved.folder("source")
    return None if folder is None else {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
