import sysconfig
from pathlib import Path

import pytest
from helpers.documents import write_jsonl
from pydantic import ValidationError

from fast_llm_ssm.config import UserError
from fast_llm_ssm.data import ByteTokenizer, data_sources
from fast_llm_ssm.data.sources import JsonlSource, PythonStdlibSource, TextSource


def texts(source):
    return [document.text for document in source.documents()]


def text_source(path, **options):
    return TextSource.model_validate({"paths": [str(path)], **options})


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_file_is_a_document_and_globs_are_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "d.md"):
        write(tmp_path / name, name.encode())
    assert texts(text_source(tmp_path / "*.txt")) == ["a.txt", "b.txt"]
    assert texts(text_source(tmp_path / "**" / "*.txt")) == ["a.txt", "b.txt", "deep/er/c.txt"]
    both = TextSource.model_validate({"paths": [str(tmp_path / "b.txt"), str(tmp_path / "*.txt")]})
    assert texts(both) == ["b.txt", "a.txt"], "in the order of the patterns, each once"


def test_text_is_kept_as_it_is(tmp_path):
    content = "line\r\n\r\n\tnaïve 猫\x00\n"
    assert texts(text_source(write(tmp_path / "a.txt", content.encode()))) == [content]
    assert texts(text_source(write(tmp_path / "bom.txt", b"\xef\xbb\xbf" + content.encode()))) == [content]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_split_at_blank_lines(tmp_path, newline):
    content = newline.join(["", "a", "b", "", "  ", "c", "", ""])
    source = text_source(write(tmp_path / "a.txt", content.encode()), split="blank_lines")
    assert [text for text in texts(source) if text] == [f"a{newline}b{newline}", f"c{newline}"]


def test_split_at_a_delimiter_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("fast_llm_ssm.data.sources._CHUNK", 3)
    path = write(tmp_path / "a.txt", "one<|é|>two<|é|><|é|>three".encode())
    assert texts(text_source(path, split="delimiter", delimiter="<|é|>")) == ["one", "two", "", "three"]


def test_positions_end_at_the_number_of_bytes(tmp_path):
    write(tmp_path / "a.txt", b"a\n\nb\n\n" * 1000)
    write(tmp_path / "b.txt", b"c")
    source = text_source(tmp_path / "*.txt", split="blank_lines")
    positions = [document.position for document in source.documents()]
    assert positions == sorted(positions) and positions[-1] == source.num_bytes() == 6001


def test_jsonl(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one\ntwo", "", "猫 \u2028 🐈"])
    path.write_text(path.read_text().replace("\n", "\r\n\r\n"))
    assert texts(JsonlSource(paths=(str(path),))) == ["one\ntwo", "", "猫 \u2028 🐈"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b'["text"]', "is a list; expected an object"),
        (b'{"body": "a", "id": 3}', "field `text` is no such field among body, id"),
        (b'{"text": 3}', "field `text` is int"),
        (b'{"text": null}', "field `text` is NoneType"),
        (b'{"text": "\\ud800"}', "field `text` is not Unicode"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=message) as error:
        texts(JsonlSource(paths=(str(path),)))
    assert str(error.value).startswith(f"{path}:3: ") and "\n" not in str(error.value)


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = write(tmp_path / "a.txt", b"fine\n\nnot \xff")
    with pytest.raises(UserError, match="is not UTF-8 at byte 10;"):
        texts(text_source(path))
    with pytest.raises(UserError, match="is not UTF-8 at byte 4 of document 2;"):
        texts(text_source(path, split="blank_lines"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"paths": ["{}/missing.txt"]}, "no such file: .*missing.txt"),
        ({"paths": ["{}/*.nothing"]}, "no file matches .*nothing"),
        ({"paths": ["{}"]}, "got the folder .*expected a file or a pattern"),
        ({"paths": []}, "paths"),
        ({"paths": ["{}/a.txt"], "split": "delimiter"}, "delimiter: got None with `split: delimiter`"),
        ({"paths": ["{}/a.txt"], "delimiter": "x"}, "delimiter: got 'x' with `split: file`"),
        ({"paths": ["{}/a.txt"], "weight": 0}, "weight"),
    ],
)
def test_bad_sources_are_refused_when_the_config_is_read(tmp_path, values, message):
    write(tmp_path / "a.txt", b"a")
    values["paths"] = [path.format(tmp_path) for path in values["paths"]]
    with pytest.raises(ValidationError, match=message):
        TextSource.model_validate(values)


def test_the_standard_library_without_tests_and_packages():
    source = PythonStdlibSource()
    files = [path.relative_to(sysconfig.get_path("stdlib")) for path in source._files()]
    assert Path("argparse.py") in files and len(files) > 300
    assert not {"site-packages", "dist-packages", "test", "tests"} & {part for path in files for part in path.parts}
    documents = texts(source)
    assert documents == texts(source)
    assert sum(map(len, documents)) > 4_000_000
    assert any(text.startswith('"""Concrete date/time') for text in documents)


def test_too_much_text_for_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fast_llm_ssm.data.sources._MEMORY_LIMIT", 10)
    source = text_source(write(tmp_path / "a.txt", b"more than ten bytes"))
    with pytest.raises(UserError, match="19 bytes of text are more .*`fast-llm prepare` .*data.cache"):
        source.load(ByteTokenizer(), None)
    assert len(source.load(ByteTokenizer(), tmp_path / "cache").tokens) == 21


def test_every_registered_source_has_a_name_and_a_docstring():
    assert {"text", "jsonl", "tokens", "python_stdlib"} <= set(data_sources.names())
    for name in data_sources.names():
        assert data_sources[name].model_fields["type"].default == name and data_sources[name].__doc__
