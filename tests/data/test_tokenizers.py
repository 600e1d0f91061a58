import json

import numpy as np
import pytest
from helpers.documents import make_tokenizer_folder
from hypothesis import given
from hypothesis import strategies as st

from fast_llm_ssm.config import UserError
from fast_llm_ssm.data import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer

TEXT = "the cat, naïve 猫 🐈\r\n\tand the hat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_bytes_decode_what_they_encode(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]) == text


def test_bytes_of_half_a_character_decode_to_a_replacement():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("a猫")[:-1]) == "a\ufffd"
    assert tokenizer.decode([0xFF, 0x41, 9999, -1]) == "\ufffdA"


def test_a_document_has_bos_text_and_eos():
    (ids,) = ByteTokenizer().encode_documents(["é"])
    assert ids.tolist() == [256, 0xC3, 0xA9, 257] and ids.dtype == np.uint16
    assert ByteTokenizer().encode_prompt("é") == [256, 0xC3, 0xA9]


def test_huggingface_folder(folder):
    tokenizer = HuggingFaceTokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert max(tokenizer.encode(TEXT)) < tokenizer.vocab_size <= 300
    assert len(tokenizer.encode("the cat")) < 7, "merges are used"
    assert tokenizer.encode_prompt("the") == [0, *tokenizer.encode("the")]
    documents = tokenizer.encode_documents([TEXT, "", "the"])
    assert [ids.tolist() for ids in documents] == [[0, *tokenizer.encode(text), 1] for text in (TEXT, "", "the")]


def test_bos_is_used_only_where_the_tokenizer_puts_it(tmp_path):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, bos=False))
    assert tokenizer.bos_id is None
    assert tokenizer.encode_documents(["the"])[0].tolist() == [*tokenizer.encode("the"), 1]


def test_without_eos_there_is_no_training_data(tmp_path):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, eos=False))
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    with pytest.raises(UserError, match="has no eos_token"):
        tokenizer.encode_documents(["the"])


@pytest.mark.parametrize("kind", ["bytes", "huggingface"])
def test_save_and_load(kind, folder, tmp_path):
    tokenizer = ByteTokenizer() if kind == "bytes" else HuggingFaceTokenizer(folder)
    tokenizer.save(tmp_path / "new" / "tokenizer")
    loaded = load_tokenizer(tmp_path / "new" / "tokenizer")
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.fingerprint() == tokenizer.fingerprint()


def test_fingerprints_differ(folder, tmp_path):
    other = make_tokenizer_folder(tmp_path, bos=False)
    fingerprints = {ByteTokenizer().fingerprint(), *(HuggingFaceTokenizer(f).fingerprint() for f in (folder, other))}
    assert len(fingerprints) == 3


def test_unreadable_folders_are_one_line(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in folder.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    (damaged / "tokenizer.json").write_text('{"version": "1.0"}')
    pointer = tmp_path / "pointer"
    pointer.mkdir()
    (pointer / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    for name, message in {
        "missing": "no such folder",
        "empty": "no tokenizer in",
        "file": "got the file",
        "pointer": "cannot read .*tokenizer.json: .*, expected JSON",
        "damaged": "cannot read the tokenizer",
    }.items():
        with pytest.raises(UserError, match=message) as error:
            load_tokenizer(tmp_path / name)
        assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)


def test_code_in_a_tokenizer_folder_never_runs(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Hostile", "auto_map": {"AutoTokenizer": ["hostile.Hostile", "hostile.Hostile"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Hostile: pass\n")
    with pytest.raises(UserError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
