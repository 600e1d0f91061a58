"""What is printed."""

import logging
import warnings

import pytest
from rich.console import Console

from fast_llm_ssm.train import console
from fast_llm_ssm.train.card import count, duration
from fast_llm_ssm.train.console import Reporter


def test_lines_stay_and_progress_is_throttled(tmp_path, capsys):
    path = tmp_path / "log.txt"
    with Reporter(path, 1000) as reporter:
        reporter.say("model", "36 layers")
        for step in range(1, 6):
            reporter.progress(f"{step}/5", force=step == 4)
        reporter.block("sample", "def f():\n    [bold]x[/bold]")
    expected = ["model   36 layers", "step    1/5", "step    4/5", "sample  ", "def f():", "    [bold]x[/bold]"]
    assert capsys.readouterr().out.splitlines() == expected
    assert path.read_text().splitlines() == expected


def test_long_lines_are_not_broken(tmp_path, capsys):
    with Reporter(tmp_path / "log.txt", 0) as reporter:
        reporter.say("note", "word " * 100)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_what_the_package_logs_and_warnings_are_lines(tmp_path, capsys):
    logger = logging.getLogger("fast_llm_ssm.some.room")
    with Reporter(tmp_path / "log.txt", 0):
        logger.info("an import was clamped")
        logger.warning("step-4 is broken")
        warnings.warn("ssd runs its slow reference on the GPU\nmore", stacklevel=1)
    logger.info("nobody listens")
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "note    an import was clamped",
        "warning step-4 is broken",
        "warning ssd runs its slow reference on the GPU",
    ]


def test_the_log_file_keeps_the_reason_of_an_end(tmp_path, capsys):
    with pytest.raises(ValueError):
        with Reporter(tmp_path / "log.txt", 0):
            raise ValueError("the gradient holds NaN")
    assert (tmp_path / "log.txt").read_text() == "error   ValueError: the gradient holds NaN\n"
    assert capsys.readouterr().out == ""  # whoever catches it prints it


def test_on_a_terminal_the_newest_step_is_one_line_that_changes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, "Console", lambda **options: Console(**options, force_terminal=True, width=80))
    with Reporter(tmp_path / "log.txt", 0) as reporter:
        for step in range(1, 4):
            reporter.progress(f"{step}/3")
        reporter.progress("3/3 val 1.0", force=True)
    assert (tmp_path / "log.txt").read_text() == "step    1/3\nstep    3/3 val 1.0\n"
    assert "\x1b[" in capsys.readouterr().out


def test_numbers_for_people():
    assert [count(x) for x in (7, 1234, 352_400_000, 1.2e10)] == ["7", "1.2 k", "352.4 M", "12.0 B"]
    assert count(2.41e9, "G") == "2.4 G"
    assert [duration(x) for x in (12.4, 200, 17_880)] == ["12s", "3m 20s", "4h 58m"]
