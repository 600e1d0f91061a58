"""A small tree of config classes with every kind of field that run files use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fast_llm_ssm.config import Config, Registry


class ToyMixer(Config):
    type: str


toy_mixers: Registry[ToyMixer] = Registry("mixer", entry_points="fast_llm_ssm_tests.toys")
AnyToyMixer = Annotated[ToyMixer, toy_mixers]


@toy_mixers.register("mamba2")
class ToyMamba(ToyMixer):
    type: Literal["mamba2"] = "mamba2"
    d_inner: int = Field(gt=0)
    d_state: int = Field(default=128, gt=0)
    dt_limit: tuple[float, Annotated[float, Field(allow_inf_nan=True)]] = (0.0, float("inf"))


@toy_mixers.register("attention")
class ToyAttention(ToyMixer):
    type: Literal["attention"] = "attention"
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(default=1, gt=0)
    window: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> ToyAttention:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {self.num_kv_heads}, expected a divisor of {self.num_heads}")
        return self


@toy_mixers.register("parallel")
class ToyParallel(ToyMixer):
    type: Literal["parallel"] = "parallel"
    branches: list[AnyToyMixer] = Field(min_length=1)


class ToySublayer(Config):
    mixer: AnyToyMixer
    residual: bool = True


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


ToyBlock = Annotated[list[ToySublayer], BeforeValidator(_as_list), Field(min_length=1)]


class ToyModel(Config):
    hidden_size: int = Field(default=64, gt=0)
    blocks: dict[str, ToyBlock] = Field(min_length=1)
    pattern: str | list[str] = "m"
    start_from: str | None = Field(default=None, alias="from")

    @model_validator(mode="after")
    def _check(self) -> ToyModel:
        unknown = [name for name in self.pattern if name not in self.blocks]
        if unknown:
            raise ValueError("\n".join(f"pattern: unknown block `{name}`" for name in unknown))
        return self


class ToyOptim(Config):
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    steps: tuple[int, ...] = ()
    clip: float | None = Field(default=1.0, gt=0)


class ToyCosine(Config):
    type: Literal["cosine"] = "cosine"
    warmup: int = Field(default=0, ge=0)


class ToyConstant(Config):
    type: Literal["constant"] = "constant"


class ToyRun(Config):
    name: str = Field(default="toy", pattern=r"^[\w.+-]+$")
    folder: Path = Path("runs")
    plugins: list[str] = Field(default_factory=list)
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    model: ToyModel | None = None
    optim: ToyOptim = ToyOptim()
    schedule: Annotated[ToyCosine | ToyConstant, Field(discriminator="type")] = ToyConstant()
    eval_every: int | Literal["never"] = "never"
    options: dict[str, Any] = Field(default_factory=dict)
