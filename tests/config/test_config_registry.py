"""Names of classes, from the tree and from installed packages."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Literal

import pytest

import fast_llm_ssm.config.registry as registry_module
from fast_llm_ssm.config import Config, Registry, UserError, loads


class Base(Config):
    type: str


def make_registry() -> Registry[Base]:
    registry: Registry[Base] = Registry("thing", entry_points="toys.things")

    @registry.register("ball")
    class Ball(Base):
        """Round."""

        type: Literal["ball"] = "ball"
        size: int = 1

    @registry.register("cube")
    class Cube(Base):
        type: Literal["cube"] = "cube"

    return registry


def test_names_and_lookup() -> None:
    registry = make_registry()
    assert registry.names() == list(registry) == ["ball", "cube"]
    assert registry["ball"].__name__ == "Ball"
    assert "ball" in registry and "bell" not in registry
    with pytest.raises(UserError, match=r"^unknown thing `bal`, did you mean `ball`\? known: ball, cube$"):
        registry["bal"]
    with pytest.raises(UserError, match=r"^unknown thing `zzz`; known: ball, cube$"):
        registry["zzz"]


def test_a_name_is_taken_once() -> None:
    registry = make_registry()
    with pytest.raises(ValueError, match="thing `ball` of .* is already registered"):
        registry.register("ball")(Base)


def test_a_field_accepts_instances_and_mappings() -> None:
    registry = make_registry()

    class Box(Config):
        thing: Annotated[Base, registry]
        maybe: Annotated[Base, registry] | None = None

    ball = registry["ball"](size=3)
    assert Box(thing=ball).thing is ball
    assert loads("{thing: {type: ball, size: 3}, maybe: null}", Box) == Box(thing=ball)
    assert loads("{thing: {type: ball}, maybe: {type: cube}}", Box).maybe == registry["cube"]()
    with pytest.raises(UserError) as caught:
        loads("{thing: {type: cube, size: 3}, maybe: {type: bll}}", Box)
    assert str(caught.value).splitlines()[:-1] == [
        "<text>:1: thing.size: unknown key; known: type",
        "<text>:1: maybe.type: unknown thing `bll`, did you mean `ball`? known: ball, cube",
    ]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Entry points of the group, name -> value, over modules toys_good and toys_bad."""
    offered: dict[str, str] = {}
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "toys_good.py").write_text("class Good: pass\nnothing = 3\n")
    (tmp_path / "toys_bad.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setattr(
        registry_module,
        "entry_points",
        lambda group: [EntryPoint(name, value, group) for name, value in offered.items() if group == "toys.things"],
    )
    yield offered
    for name in ("toys_good", "toys_bad"):
        sys.modules.pop(name, None)


def test_packages_are_imported_when_their_name_is_asked_for(offer: dict[str, str]) -> None:
    offer["good"] = "toys_good:Good"
    registry = make_registry()
    assert registry["ball"] and "good" in registry
    assert "toys_good" not in sys.modules
    assert registry["good"].__module__ == "toys_good"
    assert registry.names() == ["ball", "cube", "good"]


def test_a_listing_goes_on_without_a_broken_package(offer: dict[str, str]) -> None:
    offer |= {"bad": "toys_bad", "good": "toys_good:Good"}
    registry = make_registry()
    with pytest.warns(UserWarning, match="thing `bad`: importing `toys_bad` failed: ImportError: broken"):
        assert registry.names() == ["ball", "cube", "good"]
    with pytest.raises(UserError, match="thing `bad`: importing `toys_bad` failed: ImportError: broken"):
        registry["bad"]
    offer["nothing"] = "toys_good:nothing"
    with pytest.raises(UserError, match="thing `nothing`: `toys_good:nothing` did not register it"):
        registry["nothing"]


def test_a_file_that_must_not_import_does_not_load_packages(offer: dict[str, str]) -> None:
    offer["good"] = "toys_good:Good"
    registry = make_registry()

    class Box(Config):
        thing: Annotated[Base, registry]

    for name, message in (("good", "comes from `toys_good:Good`, .* --allow-plugins permits it"), ("god", "unknown")):
        with pytest.raises(UserError, match=message):
            loads(f"thing: {{type: {name}}}", Box, allow_plugins=False)
    assert "toys_good" not in sys.modules
