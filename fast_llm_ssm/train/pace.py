"""How fast training goes, and the live line."""

from __future__ import annotations

from collections import deque
from statistics import median

import torch

from fast_llm_ssm.model import HybridModel
from fast_llm_ssm.train.card import count, duration
from fast_llm_ssm.train.config import RunConfig, require_trainable
from fast_llm_ssm.train.hardware import memory_used, peak_flops

_RECENT = 20
"""Steps whose median is the pace: a first step that compiles does not count for long."""
_GIB = 1 << 30


class Pace:
    """Times of the steps; validation, samples and saving are not among them."""

    def __init__(self, config: RunConfig, model: HybridModel, device: torch.device) -> None:
        data, train = require_trainable(config)
        self._steps, self._device = train.steps, device
        self._tokens = train.batch_size * data.sequence_length
        self._flops = model.flops_per_token(data.sequence_length)
        self._peak = peak_flops(device, model.dtype)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._val_loss: float | None = None

    def count(self, seconds: float, waited: float) -> dict[str, float]:
        """Take note of a step.

        Args:
            seconds: It took.
            waited: Of these, for data.

        Returns:
            What is logged of it.
        """
        self._recent.append(seconds)
        row = {
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds,
            "data_share": waited / seconds,
            "memory_gib": memory_used(self._device) / _GIB,
        }
        if self._peak is not None:
            row["mfu"] = row["tokens_per_second"] * self._flops / self._peak
        return row

    def line(self, step: int, row: dict[str, float]) -> str:
        """The live line."""
        usual = median(self._recent)
        self._val_loss = row.get("val_loss", self._val_loss)
        val = "" if self._val_loss is None else f"val {self._val_loss:.3f}  "
        mfu = f"{row['mfu']:.0%}" if "mfu" in row else "n/a"
        return (
            f"{step:,}/{self._steps:,}  loss {row['loss']:.3f}  {val}lr {row['lr']:.1e}  grad {row['grad_norm']:.2f}  "
            f"{count(self._tokens / usual)} tok/s  MFU {mfu}  {row['memory_gib']:.1f} GiB  "
            f"data {row['data_share']:.0%}  ETA {duration(usual * (self._steps - step))}"
        )
