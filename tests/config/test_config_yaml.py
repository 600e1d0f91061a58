"""Reading YAML: scalars, duplicate keys, aliases, merges, and what is not YAML."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.toy import ToyRun

from fast_llm_ssm.config import ConfigErrors, UserError, loads, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e3", 1000.0),
        ("1E+3", 1000.0),
        ("-2.5e2", -250.0),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("12", 12),
        ("-7", -7),
        ("010", 10),
        ("1_000_000", 1_000_000),
        ("true", True),
        ("False", False),
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'3'", "3"),
        ('"true"', "true"),
        ("12:30:45", "12:30:45"),
        ("2026-01-31", "2026-01-31"),
        ("0x1F", "0x1F"),
        ("e3", "e3"),
        ("1e", "1e"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("[a, 1, [2.0]]", ["a", 1, [2.0]]),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    got = read_yaml(f"key: {text}\n")["key"]
    assert got == value
    assert type(got) is type(value)


def test_nan() -> None:
    assert math.isnan(read_yaml("a: .nan")["a"])


def test_keys_are_text_as_written() -> None:
    assert read_yaml("{on: 1, 1: 2, null: 3, 1e3: 4}") == {"on": 1, "1": 2, "null": 3, "1e3": 4}


def test_duplicate_keys_are_refused_with_both_lines() -> None:
    with pytest.raises(ConfigErrors) as caught:
        loads("optim:\n  lr: 1\n  clip: 1\n  lr: 2\nname: a\nname: b\n", ToyRun, name="run.yaml")
    assert str(caught.value).splitlines() == [
        "run.yaml:4: optim.lr: duplicate key, first written in line 2",
        "run.yaml:6: name: duplicate key, first written in line 5",
        "2 errors; nothing was started.",
    ]


def test_an_explicit_key_overrides_a_merged_one() -> None:
    tree = read_yaml("a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: *a, y: 3}\nd: {y: 4, <<: [*a, *b]}\n")
    assert tree["c"] == {"x": 1, "y": 3}
    assert tree["d"] == {"x": 1, "y": 4, "z": 2}


def test_of_two_merged_mappings_the_first_wins() -> None:
    assert read_yaml("a: &a {x: 1}\nb: &b {x: 2}\nc: {<<: [*a, *b]}\n")["c"] == {"x": 1}


def test_two_uses_of_an_alias_share_nothing() -> None:
    tree = read_yaml("a: &a {x: [1]}\nb: *a\n")
    tree["a"]["x"].append(2)
    assert tree["b"] == {"x": [1]}


def test_an_override_of_one_use_of_an_alias_leaves_the_other() -> None:
    text = "model: {blocks: {m: {mixer: &x {type: mamba2, d_inner: 8}}, a: {mixer: *x}}}"
    blocks = loads(text, ToyRun, ["model.blocks.a.mixer.d_inner=16"]).model.blocks
    assert (blocks["m"][0].mixer.d_inner, blocks["a"][0].mixer.d_inner) == (8, 16)


def test_an_error_inside_an_alias_is_reported_once_where_it_was_written() -> None:
    text = """
model:
  blocks:
    m:
      mixer: &x
        type: mamba2
        d_iner: 8
        d_inner: 8
    a:
    - mixer: *x
    - mixer:
        <<: *x
        d_state: 3
"""
    with pytest.raises(ConfigErrors) as caught:
        loads(text, ToyRun, name="run.yaml")
    assert str(caught.value).splitlines() == [
        "run.yaml:7: model.blocks.m.mixer.d_iner: unknown key, did you mean `d_inner`?",
        "1 error; nothing was started.",
    ]


def test_what_an_alias_lacks_is_reported_at_its_anchor() -> None:
    text = "optim:\n  betas: &b [1]\nmodel:\n  blocks:\n    m: {mixer: &x {type: mamba2}}\n    a: {mixer: *x}\n"
    with pytest.raises(ConfigErrors) as caught:
        loads(text, ToyRun)
    assert [error.line for error in caught.value.errors] == [2, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\nb: 3\n", "f:2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'"),
        (
            "a: 1\n\tb: 2\n",
            "f:2: not valid YAML: while scanning for the next token, found character '\\t' that cannot start any token",
        ),
        ("a: 1\nb: c: d\n", "f:2: not valid YAML: mapping values are not allowed here"),
        (
            "a: 1\n--- \nb: 2\n",
            "f:2: not valid YAML: expected a single document in the stream, but found another document",
        ),
        ("a: 1\nb: *c\n", "f:2: not valid YAML: found undefined alias 'c'"),
        ("a: 1\nb: &c [*c]\n", "f:2: not valid YAML: an alias contains itself"),
        ("a: &c\n  <<: *c\n", "f:1: not valid YAML: an alias contains itself"),
        ("a: 1\nb: {<<: 3}\n", "f:2: not valid YAML: `<<` merges mappings only"),
        ("a: 1\n? [b]\n: 3\n", "f:2: not valid YAML: a key must be text"),
        ("a: 1\nb: !!python/object:os.system 3\n", "f:2: not valid YAML: unsupported tag tag:yaml.org"),
        ("a: 1\nb: !!int x\n", "f:2: not valid YAML: `x` cannot be read as int"),
        ("a: 1\nb: " + "9" * 5000, "f:2: not valid YAML: `9999"),
        ("a: 1\nb: \x00\n", "f:2: not valid YAML: unprintable character #x0000"),
        ("a:\n" + "[" * 500, "f:2: not valid YAML: nested too deeply"),
        ("".join(f"{' ' * i}a:\n" for i in range(300)), "f:100: not valid YAML: nested too deeply"),
    ],
)
def test_what_is_not_yaml_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        loads(text, ToyRun, name="f")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("item", ["[*{0}, *{0}, *{0}]", "{{<<: [*{0}, *{0}, *{0}]}}"])
def test_aliases_that_explode_are_refused(item: str) -> None:
    lines = ["a: &a0 {}"] + [f"b{i}: &a{i + 1} {item.format(f'a{i}')}" for i in range(30)]
    with pytest.raises(UserError, match="aliases expand to more than 100,000 values"):
        read_yaml("\n".join(lines))


@pytest.mark.parametrize(("text", "message"), [("", "f: the file is empty"), ("# a\n", "f: the file is empty")])
def test_an_empty_file(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        loads(text, ToyRun, name="f")


@pytest.mark.parametrize("text", ["- a\n- b\n", "\nword\n", "3"])
def test_a_file_that_is_no_mapping(text: str) -> None:
    with pytest.raises(UserError, match=r"^f:\d: expected a mapping of keys to values$"):
        loads(text, ToyRun, name="f")
