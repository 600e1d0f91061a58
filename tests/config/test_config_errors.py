"""The wording and the place of every kind of mistake."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.toy import ToyMamba, ToyRun
from pydantic import Field, ValidationError, field_validator, model_validator

from fast_llm_ssm.config import Config, ConfigErrors, UserError, loads, validate


def errors_of(text: str, cls: type[Config] = ToyRun, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        loads(text, cls, overrides, name="hybrid.yaml")
    lines = str(caught.value).splitlines()
    count = len(caught.value.errors)
    assert lines[-1] == f"{count} error{'s' if count > 1 else ''}; nothing was started."
    return lines[:-1]


def test_every_mistake_of_a_file_in_one_run() -> None:
    text = """\
model:
  blocks:
    m:
      mixer:
        type: mamba2
        d_inner: 128
        d_sate: 64
    a: [{mixer: {type: atention, num_heads: 8}}]
    h:
    - mixer: {type: attention, num_heads: 3, num_kv_heads: 2}
    - mixr: {type: attention}
  pattern: mmq
optim:
  lr: -0.1
  betas: 0.9
precision: fp23
schedule: {type: cosin}
"""
    known = "known: attention, mamba2, parallel"
    assert errors_of(text) == [
        "hybrid.yaml:7: model.blocks.m.mixer.d_sate: unknown key, did you mean `d_state`?",
        f"hybrid.yaml:8: model.blocks.a.0.mixer.type: unknown mixer `atention`, did you mean `attention`? {known}",
        "hybrid.yaml:10: model.blocks.h.0.mixer.num_kv_heads: got 2, expected a divisor of 3",
        "hybrid.yaml:11: model.blocks.h.1.mixr: unknown key, did you mean `mixer`?",
        "hybrid.yaml:14: optim.lr: got -0.1, expected a number greater than 0",
        "hybrid.yaml:15: optim.betas: got 0.9, expected a list of 2 numbers",
        'hybrid.yaml:16: precision: got "fp23", expected one of fp32, bf16',
        "hybrid.yaml:17: schedule.type: unknown type `cosin`, did you mean `cosine`? known: cosine, constant",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('optim: {lr: "3e-4"}', 'optim.lr: got "3e-4", expected a number greater than 0'),
        ("optim: {lr: true}", "optim.lr: got true, expected a number greater than 0"),
        ("optim: {lr: null}", "optim.lr: got null, expected a number greater than 0"),
        ("optim: {lr: [1]}", "optim.lr: got [1], expected a number greater than 0"),
        ("optim: {lr: .inf}", "optim.lr: got .inf, expected a finite number greater than 0"),
        ("optim: {clip: .nan}", "optim.clip: got .nan, expected a finite number greater than 0 or null"),
        ("optim: {clip: 0}", "optim.clip: got 0, expected a number greater than 0 or null"),
        ("optim: {betas: [0.9]}", "optim.betas: got [0.9], expected a list of 2 numbers"),
        ("optim: {betas: [1, 2, 3]}", "optim.betas: got [1, 2, 3], expected a list of 2 numbers"),
        ("optim: {betas: [1, b]}", 'optim.betas.1: got "b", expected a number'),
        ("optim: {steps: {a: 1}}", "optim.steps: got a mapping, expected a list of integers"),
        ("optim: {steps: [1, 2.0]}", "optim.steps.1: got 2.0, expected an integer"),
        ("optim: [lr]", 'optim: got ["lr"], expected a mapping'),
        ("optim:", "optim: got null, expected a mapping"),
        ("compile: 1", "compile: got 1, expected true or false"),
        ("compile: off", 'compile: got "off", expected true or false'),
        ("name: 3", "name: got 3, expected text matching ^[\\w.+-]+$"),
        ("name: a b", 'name: got "a b", expected text matching ^[\\w.+-]+$'),
        ("folder: 3", "folder: got 3, expected a path"),
        ("plugins: abc", 'plugins: got "abc", expected a list of texts'),
        ("eval_every: 1.5", "eval_every: got 1.5, expected an integer or never"),
        ("options: 3", "options: got 3, expected a mapping"),
        ("model: {blocks: {}}", "model.blocks: got an empty mapping, expected a mapping with at least 1 key"),
        ("model: {blocks: {m: []}}", "model.blocks.m: got [], expected a list of mappings with at least 1 item"),
        ("model: {blocks: {m: [{mixer: mamba2}]}}", 'model.blocks.m.0.mixer: got "mamba2", expected a mapping'),
        (
            "model: {blocks: {m: [{mixer: {d_inner: 3}}]}}",
            "model.blocks.m.0.mixer.type: missing key, expected one of attention, mamba2, parallel",
        ),
        (
            "model: {blocks: {m: [{mixer: {type: 3}}]}}",
            "model.blocks.m.0.mixer.type: got 3, expected one of attention, mamba2, parallel",
        ),
        (
            "model: {blocks: {m: {mixer: {type: mamba2}}}}",
            "model.blocks.m.mixer.d_inner: missing key, expected an integer greater than 0",
        ),
        (
            "model: {blocks: {m: {mixer: {type: parallel, branches: [{type: attention, num_heads: 0}]}}}}",
            "model.blocks.m.mixer.branches.0.num_heads: got 0, expected an integer greater than 0",
        ),
        ("schedule: {warmup: 3}", "schedule.type: missing key, expected one of cosine, constant"),
        ("schedule: {type: 3}", "schedule.type: got 3, expected one of cosine, constant"),
        ("schedule: {type: cosine, warmup: -1}", "schedule.warmup: got -1, expected an integer of at least 0"),
    ],
)
def test_got_and_expected(text: str, message: str) -> None:
    assert errors_of(text) == [f"hybrid.yaml:1: {message}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optm: {}", "optm: unknown key, did you mean `optim`?"),
        ("optim: {LR: 1}", "optim.LR: unknown key, did you mean `lr`?"),
        ("lr: 3e-4", "lr: unknown key, did you mean `optim.lr`?"),
        ("optim: {hidden_size: 3}", "optim.hidden_size: unknown key, did you mean `model.hidden_size`?"),
        ("optim: {compile: true}", "optim.compile: unknown key, did you mean `compile`?"),
        ("zzz: 1", "zzz: unknown key; known: name, folder, plugins, precision, compile, model, optim, schedule, eval"),
        (
            "model: {blocks: {m: {mixer: {type: attention, num_heads: 2}, window: 3}}}",
            "model.blocks.m.window: unknown key, did you mean `model.blocks.m.mixer.window`?",
        ),
        (
            "model: {blocks: {m: {mixer: {type: attention, num_heads: 2, residual: false}}}}",
            "model.blocks.m.mixer.residual: unknown key, did you mean `model.blocks.m.residual`?",
        ),
    ],
)
def test_unknown_keys(text: str, message: str) -> None:
    (line,) = errors_of(text)
    assert line.startswith(f"hybrid.yaml:1: {message}")


class Inner(Config):
    low: int = 0
    high: int = 1

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("low") == 13:
            raise UserError("thirteen brings bad luck")
        return data

    @model_validator(mode="after")
    def _after(self) -> Inner:
        if self.low > self.high:
            raise ValueError(f"low: got {self.low}, expected at most high ({self.high})\nthe section is upside down")
        return self


class Outer(Config):
    left: Inner = Inner()
    right: Inner = Inner()
    even: int = Field(default=0)

    @field_validator("even")
    @classmethod
    def _even(cls, even: int) -> int:
        if even % 2:
            raise ValueError(f"got {even}, expected an even number")
        return even

    @model_validator(mode="after")
    def _after(self) -> Outer:
        if self.left != self.right:
            raise ValueError("right.high: must mirror the left\nnote: left and right differ")
        return self


def test_validators_name_their_section_or_a_key_in_it() -> None:
    text = "left:\n  high: 1\n  low: 2\nright:\n  low: 13\neven: 3\n"
    assert errors_of(text, Outer) == [
        "hybrid.yaml:1: left: the section is upside down",
        "hybrid.yaml:3: left.low: got 2, expected at most high (1)",
        "hybrid.yaml:4: right: thirteen brings bad luck",
        "hybrid.yaml:6: even: got 3, expected an even number",
    ]


def test_a_validator_can_name_a_key_below() -> None:
    assert errors_of("left: {}\nright:\n  high: 2\n", Outer) == [
        "hybrid.yaml:1: note: left and right differ",
        "hybrid.yaml:3: right.high: must mirror the left",
    ]


def test_values_without_a_file() -> None:
    with pytest.raises(ConfigErrors) as caught:
        validate({"d_inner": 0, "dt_limit": [0, "x"]}, ToyMamba, name="--mixer")
    assert str(caught.value).splitlines()[:-1] == [
        "--mixer: d_inner: got 0, expected an integer greater than 0",
        '--mixer: dt_limit.1: got "x", expected a number',
    ]
    assert validate({"d_inner": 8, "dt_limit": (0, 1)}, ToyMamba, name="-") == ToyMamba(d_inner=8, dt_limit=[0, 1])


def test_configs_are_frozen_and_strict_in_python_too() -> None:
    config = ToyMamba(d_inner=8)
    with pytest.raises(ValidationError):
        config.d_inner = 9
    for wrong in ({"d_inner": "8"}, {"d_inner": True}, {"d_inner": 8, "other": 1}, {"d_inner": 8.0}):
        with pytest.raises(ValidationError):
            ToyMamba(**wrong)
