"""Bodies of requests: their fields, and how they become requests to the engine."""

from __future__ import annotations

import json
import secrets
from typing import Any, NoReturn, TypeVar

from pydantic import Field, model_validator

from fast_llm_ssm.config import Config, ConfigErrors, validate
from fast_llm_ssm.config.wording import shown
from fast_llm_ssm.generate.sampling import SamplingOptions

_MAX_STOP = 16
_MAX_TOP = 5
_MAX_DEPTH_ERROR = "the body is nested too deeply"

B = TypeVar("B", bound=Config)


class Refused(Exception):
    """A request that is not answered: status, and one sentence for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def parse(body: bytes, cls: type[B]) -> B:
    """Read a JSON body.

    Raises:
        Refused: no JSON (400), or fields that are unknown, missing or of another kind (422).
    """
    try:
        data = json.loads(body, parse_constant=_no_constant)
        json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise Refused(400, _MAX_DEPTH_ERROR) from None
    except UnicodeEncodeError:
        raise Refused(422, "the body holds half of a surrogate pair, expected Unicode text") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are such
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise Refused(422, f"the body: got {shown(data)}, expected an object")
    try:
        return validate(data, cls, name="body")
    except ConfigErrors as errors:
        first = errors.errors[0]
        raise Refused(422, ": ".join(part for part in (first.path, first.message) if part)) from None
    except RecursionError:
        raise Refused(400, _MAX_DEPTH_ERROR) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number there")


def _refuse_others(body: Config, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Fields of the protocol that would change the answer, and that this server cannot honour."""
    for name, values in neutral.items():
        if (value := getattr(body, name)) not in values:
            raise ValueError(f"{name}: got {value!r}, which is not supported here, expected {values[0]!r} or nothing")


class Parameters(Config):
    """text-generation-inference's parameters. Sampling is on with `do_sample` or any option of it."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    do_sample: bool = False
    temperature: float | None = Field(default=None, gt=0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    seed: int | None = Field(default=None, ge=0)
    stop: list[str] = Field(default_factory=list, max_length=_MAX_STOP)
    truncate: int | None = Field(default=None, ge=1)
    return_full_text: bool | None = None
    details: bool = False
    top_n_tokens: int | None = Field(default=None, ge=0, le=_MAX_TOP)
    decoder_input_details: bool | None = False
    best_of: int | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    watermark: bool | None = False
    grammar: Any = None
    adapter_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Parameters:
        neutral: dict[str, tuple[Any, ...]] = {"decoder_input_details": (False, None), "best_of": (1, None)}
        neutral |= {"frequency_penalty": (0.0, None), "typical_p": (1.0, None), "watermark": (False, None)}
        _refuse_others(self, neutral | {"grammar": (None,), "adapter_id": (None,)})
        return self

    def sampling(self) -> SamplingOptions:
        """A draw without a seed gets one, which the answer's details tell."""
        asked = (self.temperature, self.top_k, self.top_p)
        drawn = self.do_sample or any(value is not None for value in asked)
        return SamplingOptions(
            temperature=(self.temperature or 1.0) if drawn else 0.0,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            repetition_penalty=self.repetition_penalty or 1.0,
        )


class GenerateBody(Config):
    """Body of `/generate` and `/generate_stream`."""

    inputs: str = Field(min_length=1)
    parameters: Parameters = Parameters()
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _no_null(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("parameters", 0) is None:
            return {name: value for name, value in data.items() if name != "parameters"}
        return data


class StreamOptions(Config):
    include_usage: bool = False


class CompletionBody(Config):
    """Body of OpenAI's `/v1/completions`, with `top_k` and `repetition_penalty` besides."""

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    temperature: float | None = Field(default=1.0, ge=0)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, gt=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=_MAX_TOP)
    user: str | None = None
    n: int | None = 1
    best_of: int | None = 1
    echo: bool | None = False
    suffix: str | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        neutral: dict[str, tuple[Any, ...]] = {"n": (1, None), "best_of": (1, None), "echo": (False, None)}
        neutral |= {"presence_penalty": (0.0, None), "frequency_penalty": (0.0, None)}
        _refuse_others(self, neutral | {"suffix": (None, ""), "logit_bias": (None, {})})
        if len(self.stops) > _MAX_STOP:
            raise ValueError(f"stop: got {len(self.stops)} strings, expected at most {_MAX_STOP}")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several; one of ids is told from several texts by its items."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def sampling(self) -> SamplingOptions:
        return SamplingOptions(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            repetition_penalty=self.repetition_penalty or 1.0,
        )
