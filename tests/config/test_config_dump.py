"""What is dumped loads again to the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from helpers.toy import ToyAttention, ToyCosine, ToyMamba, ToyModel, ToyOptim, ToyParallel, ToyRun, ToySublayer
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_llm_ssm.config import Config, dump, loads, read_yaml


def test_a_dump_reads_like_a_run_file() -> None:
    run = ToyRun(model=ToyModel(blocks={"m": {"mixer": {"type": "mamba2", "d_inner": 8}}}), optim=ToyOptim(lr=3e-4))
    text = dump(run)
    assert (
        text
        == """\
name: toy
folder: runs
plugins: []
precision: fp32
compile: false
model:
  hidden_size: 64
  blocks:
    m:
    - mixer:
        type: mamba2
        d_inner: 8
        d_state: 128
        dt_limit: [0.0, .inf]
      residual: true
  pattern: m
optim:
  lr: 0.0003
  betas: [0.9, 0.95]
  steps: []
  clip: 1.0
schedule: {type: constant}
eval_every: never
options: {}
"""
    )
    assert loads(text, ToyRun) == run


def test_null_is_written_where_it_is_not_the_default() -> None:
    run = ToyRun(optim=ToyOptim(clip=None))
    assert "clip: null" in dump(run)
    assert loads(dump(run), ToyRun) == run


def test_aliased_keys_and_paths() -> None:
    run = ToyRun(folder=Path("a/b"), model=ToyModel(**{"blocks": {"m": [{"mixer": ToyMamba(d_inner=1)}]}, "from": "x"}))
    assert "from: x" in dump(run) and "folder: a/b" in dump(run)
    assert loads(dump(run), ToyRun) == run


counts = st.integers(1, 10**30)
floats = st.floats(allow_nan=False)
mambas = st.builds(ToyMamba, d_inner=counts, d_state=counts, dt_limit=st.tuples(floats.filter(math.isfinite), floats))
attentions = st.builds(ToyAttention, num_heads=counts, window=st.none() | counts)
mixers = st.recursive(
    mambas | attentions, lambda inner: st.builds(ToyParallel, branches=st.lists(inner, min_size=1, max_size=2))
)
blocks = st.lists(st.builds(ToySublayer, mixer=mixers, residual=st.booleans()), min_size=1, max_size=2)
texts = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    [
        "on",
        "off",
        "yes",
        "~",
        "null",
        "",
        "1e3",
        ".inf",
        "3",
        "<<",
        "=",
        "2026-01-01",
        "1_0",
        "0x1",
        "- a",
        "a: b",
        "#",
        "!a",
        "&a",
        "\t",
    ]
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
runs = st.builds(
    ToyRun,
    plugins=st.just([]),
    model=st.none()
    | st.builds(
        lambda **keys: ToyModel(pattern=list(keys["blocks"]), **keys),
        blocks=st.dictionaries(texts, blocks, min_size=1, max_size=2),
    ),
    optim=st.builds(
        ToyOptim,
        lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        clip=st.none() | st.integers(1, 10**300).map(float),
    ),
    schedule=st.builds(ToyCosine, warmup=counts),
    options=st.dictionaries(texts, plain, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(runs)
def test_round_trip(run: ToyRun) -> None:
    assert loads(dump(run), ToyRun) == run


class Anything(Config):
    value: Any


@settings(max_examples=100, deadline=None)
@given(plain)
def test_round_trip_of_plain_data(value: Any) -> None:
    assert read_yaml(dump(Anything(value=value))) == {"value": value}
