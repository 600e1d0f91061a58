"""Rules run both ways, and say what they cannot do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.config_rules import Carried, Fixed, Value, get, mixer, norms, number, top
from fast_llm_ssm.convert.parts import Mamba2Heads, Rope, Vocabulary, mlp
from fast_llm_ssm.convert.rules import (
    Carry,
    Depthwise,
    Join,
    Rename,
    Split,
    TensorRule,
    Transpose,
    file_shapes,
    match,
)
from fast_llm_ssm.layers.mlp import MLPConfig

RULES: dict[str, tuple[TensorRule, list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "rename": (Rename("a", "x"), [(3, 4)], [(3, 4)]),
    "depthwise": (Depthwise("a", "x"), [(6, 1, 4)], [(6, 4)]),
    "transpose": (Transpose("a", "x"), [(3, 4)], [(4, 3)]),
    "join": (Join(["a", "b"], "x"), [(3, 4), (3, 4)], [(6, 4)]),
    "join of sizes": (Join(["a", "b", "c"], "x", [1, 4, 2]), [(1, 4), (4, 4), (2, 4)], [(7, 4)]),
    "split": (Split("a", ["x", "y"], [2, 3]), [(5, 4)], [(2, 4), (3, 4)]),
}


@pytest.mark.parametrize("kind", list(RULES))
def test_there_and_back(kind: str) -> None:
    rule, files, params = RULES[kind]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in files]
    loaded = rule.load(*tensors)
    assert [tuple(tensor.shape) for tensor in loaded] == params
    back = rule.save(*loaded)
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
    assert file_shapes(rule, dict(zip(rule.params, params, strict=True))) == files


def test_gate_and_up_are_joined_gate_first() -> None:
    (rule, _) = mlp("f", "p", MLPConfig(size=2))
    assert rule.files == ("f.gate_proj.weight", "f.up_proj.weight") and rule.params == ("p.gate_up_proj.weight",)
    (joined,) = rule.load(torch.zeros(2, 3), torch.ones(2, 3))
    assert joined[:, 0].tolist() == [0, 0, 1, 1]


def test_all_that_does_not_fit_is_listed() -> None:
    rules = [Rename("a", "x"), Rename("b", "y", ["b2"]), Join(["c", "d"], "z"), Carry("e")]
    with pytest.raises(UserError) as caught:
        match(rules, {"a", "c", "q", "r"}, "folder")
    assert str(caught.value).splitlines() == [
        "folder: no rule of the format claims q",
        "folder: no rule of the format claims r",
        "folder: b is missing",
        "folder: d is missing",
    ]


def test_any_of_the_names_of_a_shared_tensor_is_enough() -> None:
    rule = Rename("a", "x", ["a2", "a3"])
    assert [(item.files, item.repeats) for item in match([rule], {"a3"}, "")] == [(("a3",), ())]
    assert [(item.files, item.repeats) for item in match([rule], {"a2", "a", "a3"}, "")] == [(("a",), ("a2", "a3"))]


def model(**changes: Any) -> dict[str, Any]:
    blocks = {
        "m": [{"mixer": {"type": "mamba2", "d_state": 1}}],
        "p": [{"mixer": {"type": "parallel", "branches": [{"type": "mamba2", "d_state": 1}, {"type": "mlp"}]}}],
    }
    return {"hidden_size": 32, "blocks": blocks, **changes}


def test_a_value_goes_to_every_place_and_comes_back() -> None:
    rule, filled, written = Value("state_size", mixer("mamba2", "d_state")), model(), {}
    rule.read({"state_size": 16}, filled)
    assert filled["blocks"]["m"][0]["mixer"]["d_state"] == 16
    assert filled["blocks"]["p"][0]["mixer"]["branches"][0]["d_state"] == 16
    rule.write(filled, written)
    assert written == {"state_size": 16}
    filled["blocks"]["m"][0]["mixer"]["d_state"] = 8
    with pytest.raises(UserError, match="one state_size for all layers, got 8 and 16"):
        rule.write(filled, written)


def test_defaults_spellings_and_words() -> None:
    rule = Value("act", top("activation"), choices={"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"})
    for word, ours in (("gelu", "gelu"), ("gelu_fast", "gelu_tanh")):
        filled: dict[str, Any] = {}
        rule.read({"act": word}, filled)
        assert filled["activation"] == ours
    written: dict[str, Any] = {}
    rule.write({"activation": "gelu_tanh"}, written)
    assert written == {"act": "gelu_new"}
    for wrong in ("mish", 3, ["gelu"]):
        with pytest.raises(UserError, match="act is .*, expected one of gelu, gelu_new, gelu_fast"):
            rule.read({"act": wrong}, {})
    with pytest.raises(UserError, match="act cannot be 'relu2'"):
        rule.write({"activation": "relu2"}, {})
    with pytest.raises(UserError, match="the key act is missing"):
        rule.read({}, {})
    assert get({"new": 1, "old": 2}, ("old", "new")) == 2 and get({"d": 3}, ("x",), lambda source: 2 * source["d"]) == 6
    changed = {"before": 0, "old": 1, "after": 2}
    rule.update(changed, ("new", "old"), 5)
    assert list(changed.items()) == [("before", 0), ("old", 5), ("after", 2)]


def test_what_is_fixed_or_carried() -> None:
    written: dict[str, Any] = {}
    for rule in (Fixed("bias", False), Fixed("type", "x", fresh=True), Carried("y", name=["N"])):
        rule.read({}, {})
        rule.write({}, written)
    assert written == {"type": "x", "name": ["N"]}
    with pytest.raises(UserError, match="bias is True, expected False: anything else is not built"):
        Fixed("bias", False).read({"bias": True}, {})


def test_norms_include_the_final_one() -> None:
    filled = model()
    Value("eps", norms("eps")).read({"eps": 0.5}, filled)
    assert filled["final_norm"] == filled["blocks"]["m"][0]["norm"] == filled["blocks"]["p"][0]["norm"] == {"eps": 0.5}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.inf, math.inf), ("Infinity", math.inf), ({"__float__": "Infinity"}, math.inf), (3, 3.0), ("0.5", 0.5)],
)
def test_numbers_in_every_spelling(value: Any, expected: float) -> None:
    assert number(value) == expected


@pytest.mark.parametrize("value", [None, [], "much", {"__float__": "Infinity", "x": 1}])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(UserError, match="expected a number"):
        number(value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"heads": 4, "size": 8, "expand": 5}, (32, 8)),
        ({"heads": 4, "expand": 2}, (64, 16)),
        ({"size": 16, "expand": 2}, (64, 16)),
        ({}, (64, 8)),
    ],
)
def test_inner_width_of_mamba2(source: dict[str, int], expected: tuple[int, int]) -> None:
    rule, filled, written = Mamba2Heads(("heads",), ("size",), ("expand",), default_heads=8), model(), {}
    rule.read({"hidden_size": 32, **source}, filled)
    mamba = filled["blocks"]["m"][0]["mixer"]
    assert (mamba["d_inner"], mamba["head_dim"]) == expected
    rule.write(filled, written)
    assert written == {"heads": expected[0] // expected[1], "size": expected[1], "expand": expected[0] / 32}


def test_rope_in_both_spellings() -> None:
    attention = {"type": "attention", "rope": {}}
    filled = {"blocks": {"a": [{"mixer": attention}], "n": [{"mixer": {"type": "attention", "rope": None}}]}}
    for source in (
        {"rope_theta": 5.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 9},
    ):
        attention["rope"] = {}
        Rope().read(source, filled)
        assert attention["rope"] == {"theta": 5.0} and filled["blocks"]["n"][0]["mixer"]["rope"] is None
    for source in ({"rope_scaling": {"type": "linear"}}, {"rope_parameters": {"rope_type": "llama3"}}):
        with pytest.raises(UserError, match="rope scaling (linear|llama3) is not built"):
            Rope().read(source, filled)
    changed = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    Rope().update(changed, ("rope_theta",), 7.0)
    assert changed == {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}


def test_padded_rows_count_as_vocabulary() -> None:
    written: dict[str, Any] = {}
    Vocabulary().write({"vocab_size": 50277, "pad_vocab_multiple": 16}, written)
    assert written == {"vocab_size": 50288}
