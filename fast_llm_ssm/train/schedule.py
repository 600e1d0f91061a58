"""Learning-rate schedules: pure functions of the step, so that a resumed run has those of an unbroken one."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fast_llm_ssm.config import Config, Registry


class ScheduleConfig(Config):
    """How the learning rate moves.

    Attributes:
        type: The registered name.
        warmup_steps: Steps over which it rises linearly from 0; the peak is reached at the last of them.
    """

    type: str
    warmup_steps: int = Field(default=0, ge=0)

    def factor(self, step: int, steps: int) -> float:
        """Share of the peak learning rate that update `step` uses.

        Args:
            step: Number of the update, from 1.
            steps: Number of all updates.
        """
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        return self.after_warmup(step, steps)

    def after_warmup(self, step: int, steps: int) -> float:
        """The same for steps beyond the warm-up."""
        raise NotImplementedError

    def progress(self, step: int, steps: int) -> float:
        """From 0 at the end of the warm-up to 1 at the last step; stays 1 beyond it."""
        return min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))


schedules: Registry[ScheduleConfig] = Registry("schedule", "fast_llm_ssm.schedules")
AnySchedule = Annotated[ScheduleConfig, schedules]

Ratio = Annotated[float, Field(ge=0, le=1)]


@schedules.register("constant")
class ConstantSchedule(ScheduleConfig):
    """Stays at the peak."""

    type: Literal["constant"] = "constant"

    def after_warmup(self, step: int, steps: int) -> float:
        return 1.0


@schedules.register("linear")
class LinearSchedule(ScheduleConfig):
    """Falls linearly.

    Attributes:
        min_ratio: Share of the peak at the last step.
    """

    type: Literal["linear"] = "linear"
    min_ratio: Ratio = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        return 1 + (self.min_ratio - 1) * self.progress(step, steps)


@schedules.register("cosine")
class CosineSchedule(ScheduleConfig):
    """Falls along half a cosine (Loshchilov, Hutter, arXiv 1608.03983, without restarts).

    Attributes:
        min_ratio: Share of the peak at the last step.
    """

    type: Literal["cosine"] = "cosine"
    min_ratio: Ratio = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        cosine = (1 + math.cos(math.pi * self.progress(step, steps))) / 2
        return self.min_ratio + (1 - self.min_ratio) * cosine


@schedules.register("wsd")
class WsdSchedule(ScheduleConfig):
    """Warm-up, stable, decay: stays at the peak and falls linearly at the end (Hu et al., arXiv 2404.06395).

    Attributes:
        decay_steps: Length of the fall, in steps.
        min_ratio: Share of the peak at the last step.
    """

    type: Literal["wsd"] = "wsd"
    decay_steps: int = Field(gt=0)
    min_ratio: Ratio = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        left = min(1.0, max(0, steps - step) / self.decay_steps)
        return self.min_ratio + (1 - self.min_ratio) * left
