from __future__ import annotations

import pytest
from helpers.documents import make_tokenizer_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_llm_ssm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from fast_llm_ssm.generate import TextStream

TEXTS = {
    "ascii": "Plain text, nothing else.",
    "emoji": "a 🦙 and 👩‍👩‍👧‍👦 and 🇨🇿!",
    "korean": "안녕하세요, 세계. 모든 글자가 온전합니다",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "replacement": "a real \ufffd in it",
}


@pytest.fixture(params=["bytes", "huggingface"])
def tokenizer(request, tmp_path) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else load_tokenizer(make_tokenizer_folder(tmp_path))


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: str = "The prompt: ", stop: tuple[str, ...] = ()) -> list:
    stream = TextStream(tokenizer, tokenizer.encode_prompt(prompt), stop)
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_join_to_the_text_and_hold_whole_characters(tokenizer, name):
    text = TEXTS[name]
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text and pieces[-1] == ""
    if name != "replacement":
        assert not any("\ufffd" in piece for piece in pieces)


def test_ascii_comes_token_by_token(tokenizer):
    ids = tokenizer.encode(TEXTS["ascii"])
    assert pieces_of(tokenizer, ids)[:-1] == [tokenizer.decode([token]) for token in ids]


def test_an_unfinished_character_comes_last():
    pieces = pieces_of(ByteTokenizer(), list("ab🦙".encode()[:-1]))
    assert pieces == ["a", "b", "", "", "", "\ufffd"]


@given(st.binary(max_size=100))
@settings(max_examples=200, deadline=None)
def test_any_bytes_join_to_their_text(content):
    # A character is waited for during 32 tokens; within them nothing is lost or doubled, whatever the bytes.
    tokenizer = ByteTokenizer()
    assert "".join(pieces_of(tokenizer, list(content[:32]))) == content[:32].decode(errors="replace")
    assert "".join(pieces_of(tokenizer, list(content.decode(errors="ignore").encode()))) == content.decode(
        errors="ignore"
    )


def test_a_run_of_broken_bytes_is_not_waited_for_forever():
    pieces = pieces_of(ByteTokenizer(), [0xFF] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    assert len(pieces[-1]) <= 3


@pytest.mark.parametrize("stop", ["END", "E", "žl", "🦙"])
def test_a_stop_string_is_cut_off_and_never_shown_in_part(tokenizer, stop):
    text = f"Příliš ENOUGH EN{stop} and more {stop}"
    pieces = pieces_of(tokenizer, tokenizer.encode(text), stop=("never", stop))
    assert "".join(pieces) == text[: text.index(stop)]


def test_what_only_looked_like_a_stop_string_is_shown():
    assert "".join(pieces_of(ByteTokenizer(), list(b"abcab"), stop=("abd", "abca!"))) == "abcab"
    assert pieces_of(ByteTokenizer(), list(b"aab"), stop=("aac",)) == ["", "", "aab", ""]


def test_the_prompt_keeps_the_first_blank(tmp_path):
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.WordLevel({"▁one": 0, "▁two": 1, "?": 2}, unk_token="?"))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([1]) == "two"
    assert pieces_of(tokenizer, tokenizer.encode("two one"), prompt="one") == [" two", " one", ""]
