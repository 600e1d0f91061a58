import multiprocessing
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from fast_llm_ssm.config import UserError
from fast_llm_ssm.data import ByteTokenizer, Document
from fast_llm_ssm.data import prepare as prepare_module
from fast_llm_ssm.data.documents import read_prepared
from fast_llm_ssm.data.prepare import prepare, tokenize

TEXTS = ["", "first", "é" * 50, "", *(f"document {number} " * (number % 7 + 1) for number in range(60)), ""]
SOURCES = [{"type": "text", "paths": ["*.txt"]}]


def run(folder: Path, texts: list[str] = TEXTS, sources: list[dict] = SOURCES, **options):
    return prepare((Document(text) for text in texts), ByteTokenizer(), folder, sources, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(prepare_module, "_BATCH_DOCUMENTS", 5)


@pytest.fixture
def prepared(tmp_path):
    run(tmp_path / "prepared")
    return tmp_path / "prepared"


def in_a_child(action) -> int | None:
    """Runs it in a forked process; returns the exit code."""
    child = multiprocessing.get_context("fork").Process(target=action)
    child.start()
    child.join()
    return child.exitcode


def test_a_prepared_folder_holds_what_memory_holds(prepared):
    documents, expected = read_prepared(prepared), tokenize(map(Document, TEXTS), ByteTokenizer())
    assert isinstance(documents.tokens, np.memmap)
    assert np.array_equal(documents.tokens, expected.tokens) and np.array_equal(documents.table, expected.table)
    assert documents.digest == expected.digest
    assert [ByteTokenizer().decode(documents[index].tolist()) for index in range(len(documents))] == [
        text for text in TEXTS if text
    ]
    assert sorted(content(prepared)) == ["documents.bin", "meta.json", "tokenizer/byte_tokenizer.json", "tokens.bin"]
    assert not prepared.with_name("prepared.partial").exists()


def test_killed_at_every_write_it_goes_on_to_the_same_bytes(tmp_path, small_batches):
    run(tmp_path / "whole", flush_tokens=100)
    expected, folder = content(tmp_path / "whole"), tmp_path / "killed"

    def killed_at(number: int) -> None:
        calls = 0

        def count_down(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

        real = {name: getattr(prepare_module, name) for name in ("_flush", "_sync", "_replace")}
        for name, function in real.items():
            setattr(prepare_module, name, lambda *args, f=function: (count_down(), f(*args), count_down()))
        run(folder, flush_tokens=100)

    attempts = 0
    for number in range(1, 1000):
        attempts += 1
        # Each attempt gets further than the one before, so every kind of write is the last one once.
        if in_a_child(lambda number=number: killed_at(number)) == 0:
            break
        assert not folder.exists() or content(folder).items() >= expected.items(), "complete or not there"
    assert attempts > 5
    assert content(folder) == expected


def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(tmp_path, small_batches):
    run(tmp_path / "whole", flush_tokens=100)
    chance, folder = random.Random(0), tmp_path / "killed"
    codes = []
    while not codes or codes[-1] != 0:
        countdown = iter(range(chance.randint(0, 4), -1, -1))

        def count_down(_: object, countdown=countdown) -> None:
            if next(countdown) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        codes.append(in_a_child(lambda: run(folder, on_progress=count_down, flush_tokens=200)))  # noqa: B023
        assert len(codes) < 100
    assert codes.count(-signal.SIGKILL) >= 2
    assert content(folder) == content(tmp_path / "whole")


def test_two_at_once_make_one_folder(tmp_path, small_batches):
    children = [
        multiprocessing.get_context("fork").Process(target=run, args=(tmp_path / "prepared",)) for _ in range(4)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]
    assert read_prepared(tmp_path / "prepared").digest == tokenize(map(Document, TEXTS), ByteTokenizer()).digest


def test_a_complete_folder_is_not_written_again(prepared):
    before = (prepared / "tokens.bin").stat().st_mtime_ns
    run(prepared)
    assert (prepared / "tokens.bin").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["first", "other", *TEXTS[4:]], "document 2 of the sources differs"),
        (TEXTS[:-3], "document 61 of the sources differs"),
        ([*TEXTS, "new"], "the sources have more documents"),
    ],
)
def test_a_complete_folder_of_other_text_is_refused(prepared, texts, message):
    with pytest.raises(UserError, match=message):
        run(prepared, texts=texts)


def interrupt(folder: Path) -> None:
    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, on_progress=stop, flush_tokens=1)


def test_input_that_changed_between_two_attempts_is_refused(tmp_path, small_batches):
    interrupt(tmp_path / "prepared")
    with pytest.raises(UserError, match="document 2 of the sources differs from the one in .*prepared.partial"):
        run(tmp_path / "prepared", texts=["first", "other", *TEXTS[4:]])
    with pytest.raises(UserError, match="partial was begun from other sources or with another tokenizer"):
        run(tmp_path / "prepared", sources=[])
    run(tmp_path / "prepared")


def test_lost_bytes_of_an_unfinished_preparation_are_refused(tmp_path, small_batches):
    interrupt(tmp_path / "prepared")
    path = tmp_path / "prepared.partial" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="tokens.bin is shorter than progress.json says"):
        run(tmp_path / "prepared")


def test_a_folder_with_something_else_is_refused(tmp_path, prepared):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="other exists and is not a prepared folder"):
        run(tmp_path / "other")
    with pytest.raises(UserError, match="was prepared from other sources or with another tokenizer"):
        run(prepared, sources=[])
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty")


def test_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="the sources hold no text"):
        run(tmp_path / "prepared", texts=["", ""])
    assert not (tmp_path / "prepared").exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_one_line_that_names_the_file(prepared, name, damage):
    path = prepared / name
    if damage == "flip":
        flip(path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    if (damage, name) == ("cut", "meta.json"):
        read_prepared(prepared)  # only the last line break
        return
    with pytest.raises(UserError, match=name) as error:
        read_prepared(prepared)
    assert "\n" not in str(error.value)


def test_a_meta_file_with_wrong_counts_is_refused(prepared):
    path = prepared / "meta.json"
    path.write_text(path.read_text().replace('"num_documents": ', '"num_documents": 1'))
    with pytest.raises(UserError, match="meta.json is damaged, its counts"):
        read_prepared(prepared)


def test_verification_of_the_tokens_can_be_left_out(prepared):
    flip(prepared / "tokens.bin")
    read_prepared(prepared, verify=False)
