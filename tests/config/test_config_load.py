"""Files, `extends`, overrides, sections based on another file, plugins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.toy import ToyConstant, ToyCosine, ToyRun, toy_mixers

from fast_llm_ssm.config import ConfigErrors, UserError, load, loads


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(path, ToyRun, overrides)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_extends_merges_mappings_and_replaces_the_rest(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="name: base\noptim: {lr: 1, clip: 2, betas: [0.1, 0.2]}\nplugins: [math, json]\n",
        other="optim: {clip: null}\noptions: {a: {b: 1}}\n",
        run="extends: [base.yaml, other.yaml]\noptim: {betas: [0.3, 0.4]}\nplugins: [re]\noptions: {a: {c: 2}}\n",
    )
    run = load(tmp_path / "run.yaml", ToyRun)
    assert (run.name, run.optim.lr, run.optim.clip, run.optim.betas) == ("base", 1.0, None, (0.3, 0.4))
    assert (run.plugins, run.options) == (["re"], {"a": {"b": 1, "c": 2}})


def test_extends_is_relative_to_the_file_and_chains(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, base="name: base\ncompile: true\n", run="extends: sub/middle.yaml\nprecision: bf16\n")
    write(tmp_path / "sub", middle="extends: ../base.yaml\nname: middle\n")
    run = load(tmp_path / "run.yaml", ToyRun)
    assert (run.name, run.compile, run.precision) == ("middle", True, "bf16")


def test_a_section_of_another_type_replaces_the_one_below(tmp_path: Path) -> None:
    write(tmp_path, base="schedule: {type: cosine, warmup: 3}\n")
    write(tmp_path, run="extends: base.yaml\nschedule: {type: constant}\n")
    assert load(tmp_path / "run.yaml", ToyRun).schedule == ToyConstant()
    write(tmp_path, run="extends: base.yaml\nschedule: {warmup: 4}\n")
    assert load(tmp_path / "run.yaml", ToyRun).schedule == ToyCosine(warmup=4)


def test_errors_name_the_file_that_holds_them(tmp_path: Path) -> None:
    write(tmp_path, base="\noptim: {lr: -1}\n", run="extends: base.yaml\ncompil: 3\n")
    assert message_of(tmp_path / "run.yaml").splitlines()[:-1] == [
        "base.yaml:2: optim.lr: got -1, expected a number greater than 0",
        "run.yaml:2: compil: unknown key, did you mean `compile`?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: run.yaml\n", "run.yaml:1: extends: files extend each other: run.yaml -> run.yaml"),
        ("a: 1\nextends: gone.yaml\n", "run.yaml:2: extends: gone.yaml: no such file"),
        ("extends: .\n", "run.yaml:1: extends: /"),
        ("extends: 3\n", "run.yaml:1: extends: got 3, expected a file name or a list of file names"),
        ("extends: bad.yaml\n", "bad.yaml:3: not valid YAML: "),
        ("extends: loop.yaml\n", "loop.yaml:1: extends: files extend each other: run.yaml -> loop.yaml -> run.yaml"),
    ],
)
def test_extends_that_leads_nowhere_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, run=text, bad="a: 1\nb: [\n", loop="extends: run.yaml\n")
    got = message_of(tmp_path / "run.yaml")
    assert got.startswith(message)
    assert "\n" not in got


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    assert message_of(tmp_path / "gone.yaml") == "gone.yaml: no such file"
    (tmp_path / "folder.yaml").mkdir()
    assert message_of(tmp_path / "folder.yaml") == "folder.yaml: a folder, expected a YAML file"
    (tmp_path / "binary.yaml").write_bytes(b"name: a\nx: \xff\xfe\x80")
    assert message_of(tmp_path / "binary.yaml") == "binary.yaml:2: not a text file in UTF-8"
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert message_of(tmp_path / "loop.yaml").startswith("loop.yaml: cannot be read: ")
    (tmp_path / "file.yaml").write_text("name: a\n")
    inside = tmp_path / "file.yaml" / "run.yaml"
    assert message_of(inside) == "run.yaml: cannot be read: Not a directory"


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfname: a\r\noptim:\r\n  lr: 2\r\n")
    assert load(tmp_path / "run.yaml", ToyRun).optim.lr == 2.0


MODEL = "model: {blocks: {m: [{mixer: {type: mamba2, d_inner: 8}}]}}\n"


def test_overrides() -> None:
    run = loads(
        MODEL,
        ToyRun,
        [
            "optim.lr=3e-4",
            "model.blocks.m.0.mixer.d_inner=16",
            "model.blocks.m.0.mixer.dt_limit=[0.1, .inf]",
            "name=on",
            "options.a.b={c: x=y}",
            "optim.clip=",
            "schedule={type: cosine}",
            "schedule.warmup=3",
        ],
    )
    assert (run.optim.lr, run.optim.clip, run.name) == (3e-4, None, "on")
    mixer = run.model.blocks["m"][0].mixer
    assert (mixer.d_inner, mixer.dt_limit) == (16, (0.1, float("inf")))
    assert run.options == {"a": {"b": {"c": "x=y"}}}
    assert run.schedule == ToyCosine(warmup=3)


def test_the_later_override_wins() -> None:
    assert loads("name: a", ToyRun, ["optim.lr=1", "optim.lr=2"]).optim.lr == 2.0


def test_overrides_fill_sections_that_are_missing_or_null() -> None:
    assert loads("optim:\n", ToyRun, ["optim.lr=1"]).optim.lr == 1.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "expected KEY=VALUE, the key dotted as in optim.lr=3e-4"),
        ("=3", "expected KEY=VALUE, the key dotted as in optim.lr=3e-4"),
        ("optim..lr=3", "expected KEY=VALUE, the key dotted as in optim.lr=3e-4"),
        ("optim.lr=[1", "not valid YAML: while parsing a flow sequence, expected ',' or ']'"),
        ("optim={lr: 1, lr: 2}", "optim.lr: duplicate key"),
        ("optim.lr=-1", "optim.lr: got -1, expected a number greater than 0"),
        ("optim.lrr=1", "optim.lrr: unknown key, did you mean `lr`?"),
        ("optimm.lr=1", "optimm: unknown key, did you mean `optim`?"),
        ("name.first=a", "name: is a single value, it has no keys"),
        ("model.blocks.m.1.mixer.d_inner=3", "model.blocks.m: got item `1`, expected an item from 0 to 0"),
        ("model.blocks.m.x.mixer=3", "model.blocks.m: got item `x`, expected an item from 0 to 0"),
        ("plugins.0=a", "plugins: got item `0`, the list is empty"),
    ],
)
def test_wrong_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        loads(f"name: a\nplugins: []\n{MODEL}", ToyRun, [override])
    line, last = str(caught.value).splitlines()
    assert line.startswith(f"override '{override}': {message}")
    assert last == "1 error; nothing was started."


def test_wrong_overrides_come_together_with_the_file_s_errors() -> None:
    with pytest.raises(ConfigErrors) as caught:
        loads("precision: fp8\n", ToyRun, ["a", "optim.lr=x", "optim.clip=0"])
    assert len(caught.value.errors) == 4


def test_a_section_can_be_based_on_another_file(tmp_path: Path) -> None:
    write(tmp_path, source=MODEL + "name: source\n", run="name: run\nmodel: {from: there, hidden_size: 32}\n")
    asked: list[str] = []

    def find(value: str) -> Path:
        asked.append(value)
        if value != "there":
            raise UserError(f"`{value}` holds no checkpoint")
        return tmp_path / "source.yaml"

    run = load(tmp_path / "run.yaml", ToyRun, bases={"model": find})
    assert (run.name, run.model.hidden_size, run.model.start_from) == ("run", 32, "there")
    assert run.model.blocks["m"][0].mixer.d_inner == 8

    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path / "run.yaml", ToyRun, ["model.from=gone"], bases={"model": find})
    assert caught.value.errors[0].path == "model.from"
    assert caught.value.errors[0].message == "`gone` holds no checkpoint"
    assert asked == ["there", "gone"]

    write(tmp_path, source="name: source\n")
    with pytest.raises(ConfigErrors, match=r"run.yaml:2: model.from: `there` has no `model`"):
        load(tmp_path / "run.yaml", ToyRun, bases={"model": find})


PLUGIN = """
from typing import Literal
from helpers.toy import ToyMixer, toy_mixers

@toy_mixers.register("{name}")
class Plugged(ToyMixer):
    type: Literal["{name}"] = "{name}"
    size: int = 3
"""


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(toy_mixers, "_classes", dict(toy_mixers._classes))
    return tmp_path


def test_plugins_are_imported_before_the_file_is_checked(plugin_folder: Path) -> None:
    (plugin_folder / "toy_plugin_a.py").write_text(PLUGIN.format(name="plugged"))
    run = loads("plugins: [toy_plugin_a]\nmodel: {blocks: {m: {mixer: {type: plugged, size: 4}}}}\n", ToyRun)
    assert run.model.blocks["m"][0].mixer.size == 4


def test_plugins_that_fail_are_errors_like_others(plugin_folder: Path) -> None:
    (plugin_folder / "toy_plugin_b.py").write_text("raise RuntimeError('no luck')\n")
    with pytest.raises(ConfigErrors) as caught:
        loads("name: 3\nplugins:\n- toy_plugin_b\n- toy_plugin_gone\n- 3\n", ToyRun, name="f")
    assert [str(error) for error in caught.value.errors] == [
        "f:1: name: got 3, expected text matching ^[\\w.+-]+$",
        "f:3: plugins.0: importing `toy_plugin_b` failed: RuntimeError: no luck",
        "f:4: plugins.1: importing `toy_plugin_gone` failed: ModuleNotFoundError: No module named 'toy_plugin_gone'",
        "f:5: plugins.2: got 3, expected text",
    ]


def test_plugins_are_not_imported_unless_allowed(plugin_folder: Path) -> None:
    (plugin_folder / "toy_plugin_c.py").write_text("raise SystemExit('imported')\n")
    text = "plugins: [toy_plugin_c]\nmodel: {blocks: {m: {mixer: {type: plugged}}}}\n"
    with pytest.raises(ConfigErrors) as caught:
        loads(text, ToyRun, allow_plugins=False)
    assert "plugins.0: `toy_plugin_c` was not imported, --allow-plugins permits it" in str(caught.value)
    assert "unknown mixer `plugged`" in str(caught.value)
    assert "toy_plugin_c" not in sys.modules
    assert loads("plugins: [toy_plugin_c]\n", ToyRun, allow_plugins=False).plugins == ["toy_plugin_c"]


def test_the_room_needs_no_torch() -> None:
    code = "import sys, fast_llm_ssm.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
