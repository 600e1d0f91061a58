"""The `data:` section as users write it."""

import pytest
from helpers.documents import make_tokenizer_folder

from fast_llm_ssm.config import ConfigErrors, dump, loads
from fast_llm_ssm.data import DataConfig


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    make_tokenizer_folder(tmp_path / "tokenizer")


def test_the_whole_section_reads_and_dumps():
    text = """
        sources:
          - {type: text, paths: ["*.txt"], split: delimiter, delimiter: "\\n--\\n", weight: 2}
          - {type: jsonl, paths: [a.txt], field: body}
          - {type: python_stdlib}
        tokenizer: {type: huggingface, path: tokenizer}
        sequence_length: 128
        packing: false
        shuffle: false
        validation: {fraction: 0.1, max_rows: 64}
        cache: some/where
        """
    config = loads(text, DataConfig)
    assert config.sources[0].weight == 2.0 and config.sources[0].delimiter == "\n--\n"
    assert loads(dump(config), DataConfig) == config


def test_every_mistake_is_named_at_its_line():
    text = """sources:
  - {type: text, paths: [b.txt], split: blank_line, weight: 0}
  - {type: python_stdlb}
  - {type: tokens, path: nope}
  - {type: jsonl, paths: a.txt, feild: x}
  - {type: text, paths: [a.txt, "none*.txt"]}
  - {type: text, paths: []}
  - {type: text, paths: [.]}
tokenizer: {type: huggingface, path: nope}
sequence_length: 1.5
validation: {fraction: 0.1, sources: [{type: python_stdlib}]}
"""
    with pytest.raises(ConfigErrors) as errors:
        loads(text, DataConfig, name="run.yaml")
    assert str(errors.value).splitlines() == [
        "run.yaml:2: sources.0.weight: got 0, expected a number greater than 0",
        "run.yaml:2: sources.0.paths.0: no such file: b.txt",
        'run.yaml:2: sources.0.split: got "blank_line", expected one of file, blank_lines, delimiter',
        "run.yaml:3: sources.1.type: unknown data source `python_stdlb`, did you mean `python_stdlib`? "
        "known: jsonl, python_stdlib, text, tokens",
        "run.yaml:4: sources.2.path: no such folder: nope, expected one that `fast-llm prepare` wrote",
        'run.yaml:5: sources.3.paths: got "a.txt", expected a list of texts',
        "run.yaml:5: sources.3.feild: unknown key, did you mean `field`?",
        "run.yaml:6: sources.4.paths.1: no file matches none*.txt",
        "run.yaml:7: sources.5.paths: got an empty list, expected at least one item",
        "run.yaml:8: sources.6.paths.0: got the folder ., expected a file or a pattern such as **/*.txt",
        "run.yaml:9: tokenizer.path: no such folder: nope, expected one with tokenizer.json or tokenizer.model",
        "run.yaml:10: sequence_length: got 1.5, expected an integer greater than 0",
        "run.yaml:11: validation: got both of `fraction` and `sources`, expected one of them",
        "13 errors; nothing was started.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: []\nsequence_length: 4\ntokenizer: {type: bytes}", "t:1: sources: got an empty list"),
        ("sources: [{type: python_stdlib}]\nsequence_length: 4", "t:1: tokenizer: missing, expected one"),
        (
            "sources: [{type: text, paths: [a.txt], split: delimiter}]\nsequence_length: 4\ntokenizer: {type: bytes}",
            "t:1: sources.0.delimiter: got None with `split: delimiter`",
        ),
    ],
)
def test_sections_that_do_not_fit_together(text, message):
    with pytest.raises(ConfigErrors) as errors:
        loads(text, DataConfig, name="t")
    assert len(errors.value.errors) == 1 and str(errors.value).startswith(message)
