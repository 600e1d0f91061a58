"""Whatever a file holds, it is a config or an error in plain words, never a traceback."""

from __future__ import annotations

import re

import yaml
from helpers.toy import ToyRun
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_llm_ssm.config import UserError, loads

JARGON = re.compile(
    r"pydantic|Input should|type=|function-|tagged-union|https?://|Traceback|got a mapping, expected a mapping",
    re.IGNORECASE,
)
WORDS = (
    "name folder plugins precision compile model optim schedule eval_every options hidden_size blocks pattern from "
    "mixer residual type mamba2 attention parallel cosine constant d_inner d_state dt_limit num_heads num_kv_heads "
    "window branches lr betas steps clip warmup extends m <<"
).split()

words = st.sampled_from(WORDS) | st.text("abm_.-:{[&*!", max_size=4)
scalars = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | words
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4), max_leaves=20
)
mixers = st.dictionaries(words, values, max_size=3).flatmap(
    lambda rest: st.sampled_from(["mamba2", "attention", "parallel"]).map(lambda name: {"type": name, **rest})
)
sublayers = st.fixed_dictionaries({"mixer": mixers | values}, optional={"residual": values})
models = st.fixed_dictionaries(
    {"blocks": st.dictionaries(words, sublayers | st.lists(sublayers, max_size=2), max_size=2)},
    optional={"pattern": values, "hidden_size": values},
)
runs = st.fixed_dictionaries({}, optional={word: values for word in WORDS[:10]} | {"model": models | values})


def lines_of(text: str, overrides: list[str]) -> list[str]:
    try:
        loads(text, ToyRun, overrides)
    except UserError as error:
        return str(error).splitlines()
    return []


@settings(max_examples=100, deadline=None)
@given(runs | values, st.lists(st.text("ab.=0[m{", max_size=8) | words, max_size=2))
def test_any_data(data: object, overrides: list[str]) -> None:
    lines = lines_of(yaml.safe_dump(data), overrides)
    assert not JARGON.search("\n".join(lines))
    if len(lines) > 1:
        assert lines[-1].startswith(f"{len(lines) - 1} error")
        assert all(re.match(r"<text>:\d+: |override '", line) for line in lines[:-1]), lines


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60) | st.text("ab:-[]{}&*!|>'\" \n\t#?<,%@`~.0", max_size=60))
def test_any_text(text: str) -> None:
    lines = lines_of(text, [])
    assert not JARGON.search("\n".join(lines))
