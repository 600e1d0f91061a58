"""The run file: everything that a training run depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fast_llm_ssm import checkpoint
from fast_llm_ssm.config import Config, UserError, load
from fast_llm_ssm.data import DataConfig
from fast_llm_ssm.model import ModelConfig
from fast_llm_ssm.train.schedule import AnySchedule, CosineSchedule, WsdSchedule

Every = Annotated[int, Field(gt=0)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class RunModelConfig(ModelConfig):
    """The model, which may start from a checkpoint.

    Attributes:
        start_from: Written `from`: a checkpoint or run folder, relative to the working directory. Its weights are where
            training starts, its model section is what the other keys here are merged over.
    """

    start_from: Path | None = Field(default=None, alias="from")


class TrainConfig(Config):
    """How long, on what, in which precision.

    Attributes:
        steps: Optimizer updates of the whole run.
        batch_size: Rows of data.sequence_length tokens in an update.
        micro_batch_size: Rows in memory at a time; their gradients are accumulated. Null takes the whole batch.
        precision: Of activations and their gradients; parameters, gradients and optimizer are fp32 always. `auto` takes
            bf16 on a GPU and fp32 on a CPU, where bf16 is slower.
        activation_checkpointing: `full` keeps only each layer's input and computes the rest again in the backward pass.
        device: `auto` takes the GPU where there is one.
        backend: `reference` runs the ops in plain PyTorch, `auto` their kernels where they can run (the log says where
            they cannot), `triton` refuses to start where one cannot.
        deterministic: Refuse operations whose result varies from run to run. On the CPU runs repeat bit by bit anyway
            (with the same number of threads).
    """

    steps: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    micro_batch_size: int | None = Field(default=None, gt=0)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    activation_checkpointing: Literal["none", "full"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "triton", "reference"] = "auto"
    deterministic: bool = False

    @model_validator(mode="after")
    def _divides(self) -> TrainConfig:
        if self.batch_size % self.micro_batch:
            raise ValueError(
                f"micro_batch_size: got {self.micro_batch}, expected a divisor of batch_size ({self.batch_size})"
            )
        return self

    @property
    def micro_batch(self) -> int:
        """Rows in memory at a time."""
        return self.micro_batch_size or self.batch_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of an update."""
        return self.batch_size // self.micro_batch


class OptimConfig(Config):
    """AdamW (Loshchilov, Hutter, arXiv 1711.05101).

    Attributes:
        lr: Peak learning rate.
        betas: Decay of the averages of gradients and squared gradients.
        eps: Added to the denominator.
        weight_decay: Share of lr times the weight taken off matrices in an update; never off A_log, D, dt_bias, norms
            and biases.
        clip: Longer gradients are scaled to this norm; null for no clipping.
    """

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float | None = Field(default=1.0, gt=0)


class CheckpointConfig(Config):
    """What is saved besides the last step.

    Attributes:
        every: Steps between two checkpoints; null saves at the end, and when a signal stops the run.
        keep: Number of newest checkpoints that stay.
        permanent_every: Checkpoints of these steps stay for good.
    """

    every: Every | None = None
    keep: int = Field(default=2, gt=0)
    permanent_every: Every | None = None


class RunValidationConfig(Config):
    """When the validation loss is measured; on what is said in data.validation.

    Attributes:
        every: Steps between two measurements; null measures at the end only.
        batch_size: Rows at a time; null takes train.micro_batch_size.
    """

    every: Every | None = None
    batch_size: int | None = Field(default=None, gt=0)


class SamplesConfig(Config):
    """Texts that the model writes during training, the same draws each time.

    Attributes:
        prompts: What they begin with, one text each.
        every: Steps between two showings; null shows them at the end only.
        max_new_tokens: Length.
        temperature: 0 takes the likeliest token.
        top_k: Draw from so many likeliest tokens; null for all.
        top_p: Draw from the fewest tokens whose probabilities sum to this.
        seed: Of the draws.
    """

    prompts: list[str] = Field(min_length=1)
    every: Every | None = None
    max_new_tokens: int = Field(default=128, gt=0)
    temperature: float = Field(default=0.8, ge=0)
    top_k: int | None = Field(default=None, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = 0


class LogConfig(Config):
    """What is reported.

    Attributes:
        every: Steps between two rows of metrics.jsonl and tensorboard; steps with a validation have one anyway.
        seconds: Time between two printed lines where the output is no terminal.
        tensorboard: Also write metrics for tensorboard, into the run folder.
    """

    every: Every = 1
    seconds: float = Field(default=10.0, ge=0)
    tensorboard: bool = True


class RunConfig(Config):
    """A run file.

    Attributes:
        name: Of the run; the file's own name where it is missing.
        runs: Folder of the run folders: this run lives in runs/NAME.
        seed: Of initial weights and of the order of the data.
        plugins: Modules to import before the file is checked, which register mixers, sources and so on.
    """

    name: str | None = Field(default=None, pattern=r"^[\w.+-]+$")
    runs: Path = Path("runs")
    seed: int = Field(default=0, ge=0)
    plugins: list[str] = Field(default_factory=list)
    model: RunModelConfig
    data: DataConfig | None = None
    train: TrainConfig | None = None
    optim: OptimConfig = OptimConfig()
    schedule: AnySchedule = CosineSchedule()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: RunValidationConfig = RunValidationConfig()
    samples: SamplesConfig | None = None
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        problems = []
        steps = self.train.steps if self.train else None
        if steps is not None and self.schedule.warmup_steps > steps:
            problems.append(
                f"schedule.warmup_steps: got {self.schedule.warmup_steps}, expected at most train.steps ({steps})"
            )
        if steps is not None and isinstance(self.schedule, WsdSchedule):
            room = steps - self.schedule.warmup_steps
            if self.schedule.decay_steps > room >= 0:
                problems.append(
                    f"schedule.decay_steps: got {self.schedule.decay_steps}, expected at most the {room} after warm-up"
                )
        if self.validation.every is not None and self.data is not None and self.data.validation is None:
            problems.append("validation.every: got a number, but data.validation does not say on what to measure")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_config(path: str | Path, *overrides: str, allow_plugins: bool = True) -> RunConfig:
    """Read a run file.

    Args:
        path: The YAML file.
        overrides: `key=value` each, as in `optim.lr=3e-4`.
        allow_plugins: Import what `plugins:` lists.

    Returns:
        The run's configuration; its name is that of the file where it has none.

    Raises:
        ConfigErrors: Every mistake in it, each with its file and line.
        UserError: The file cannot be read.
    """

    def config_of(source: str) -> Path:
        return checkpoint.find(source).path / "config.yaml"

    config = load(path, RunConfig, overrides, bases={"model": config_of}, allow_plugins=allow_plugins)
    return config if config.name else config.model_copy(update={"name": Path(path).stem})


def require_trainable(config: RunConfig) -> tuple[DataConfig, TrainConfig]:
    """The sections without which there is nothing to train.

    Raises:
        UserError: Names those that are missing.
    """
    missing = [name for name in ("data", "train") if getattr(config, name) is None]
    if missing or config.data is None or config.train is None:
        raise UserError(
            f"the run file has no {' and no '.join(f'`{name}:`' for name in missing)} section, training needs both"
        )
    return config.data, config.train
