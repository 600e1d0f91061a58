import itertools
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.documents import make_dataset, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fast_llm_ssm.config import UserError
from fast_llm_ssm.data import Batch, ByteTokenizer, DataConfig, build_dataset, changed_parts, prepare

WORDS = ["def", "return", "猫", "é", "if", "x", "=", "\r\n", "\n", "1"]


def make_texts(number: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 40))) for _ in range(number)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two sources of a hundred documents."""
    folder = tmp_path_factory.mktemp("corpus")
    first = write_jsonl(folder / "first.jsonl", make_texts(100, 1))
    second = write_jsonl(folder / "second.jsonl", make_texts(100, 2))
    return [{"type": "jsonl", "paths": [str(first)], "weight": 3}, {"type": "jsonl", "paths": [str(second)]}]


@pytest.fixture(scope="module")
def dataset(corpus):
    return make_dataset(*corpus, validation={"fraction": 0.2})


def equal(a: Batch, b: Batch) -> bool:
    tensors = ((a.tokens, b.tokens), (a.targets, b.targets), (a.cu_seqlens, b.cu_seqlens))
    return all(torch.equal(x, y) for x, y in tensors) and a.num_targets == b.num_targets


def trained_on(dataset, stream) -> set[str]:
    return {dataset.tokenizer.decode(stream.documents[index].tolist()) for index in stream.selected.tolist()}


def test_a_batch_stacks_rows(dataset):
    batch = dataset.batch(5, 3)
    assert batch.tokens.shape == batch.targets.shape == (3, 16)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64 and batch.cu_seqlens.dtype == torch.int32
    assert batch.num_targets == int((batch.targets != -100).sum())
    for number in range(3):
        row = dataset.row(5 + number)
        assert np.array_equal(batch.tokens[number], row.tokens) and np.array_equal(batch.targets[number], row.targets)


def test_boundaries_cover_the_batch_and_targets_stay_inside_them(dataset):
    for first in range(0, 400, 4):
        batch = dataset.batch(first, 4)
        boundaries = batch.cu_seqlens.tolist()
        assert boundaries[0] == 0 and boundaries[-1] == 64 and boundaries == sorted(set(boundaries))
        assert set(range(0, 65, 16)) <= set(boundaries), "row ends are boundaries"
        tokens, targets = batch.tokens.flatten(), batch.targets.flatten()
        for start, end in pairwise(boundaries):
            padding = not tokens[start:end].any()
            assert padding or torch.equal(targets[start : end - 1], tokens[start + 1 : end])
            if padding:
                assert (targets[start:end] == -100).all()
                continue
            if tokens[end - 1] == ByteTokenizer.eos_id:
                assert targets[end - 1] == -100
            if start % 16:
                assert tokens[start] == ByteTokenizer.bos_id and tokens[start - 1] == ByteTokenizer.eos_id


@settings(max_examples=25)
@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(1, 4))
def test_ranks_and_batch_sizes_give_the_same_sequence(dataset, first, micro, ranks):
    total = micro * ranks
    whole = dataset.batch(first, total)
    parts = [dataset.batch(first + rank * micro, micro) for rank in range(ranks)]
    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(whole.targets, torch.cat([part.targets for part in parts]))
    assert whole.num_targets == sum(part.num_targets for part in parts)


def test_a_new_process_goes_on_anywhere(corpus, dataset):
    # The middle and the end of an epoch, and the middle of a document (most rows).
    ends = [stream.num_rows for stream in dataset.streams]
    for position in [0, 1, 7, *ends, *(end // 2 for end in ends), 12345]:
        assert equal(make_dataset(*corpus, validation={"fraction": 0.2}).batch(position, 4), dataset.batch(position, 4))


def test_sources_take_turns_by_weight(dataset, corpus):
    quarter = [dataset.mix.locate(index)[0] for index in range(400)]
    assert quarter.count(0) == 300 and quarter.count(1) == 100
    assert dataset.epochs(400) == [300 / dataset.streams[0].num_rows, 100 / dataset.streams[1].num_rows]


def test_held_out_documents_are_never_trained_on(dataset, corpus):
    trained = set.union(*(trained_on(dataset, stream) for stream in dataset.streams))
    held_out = set.union(*(trained_on(dataset, stream) for stream in dataset.validation_streams))
    assert 20 < len(held_out) < 60 and not trained & held_out
    assert trained | held_out == {*make_texts(100, 1), *make_texts(100, 2)}
    without = make_dataset(*corpus)
    assert sum(len(stream.selected) for stream in without.streams) == 200 and not list(without.validation())


def test_held_out_documents_do_not_depend_on_the_run(dataset, corpus):
    other = make_dataset(*reversed(corpus), seed=9, sequence_length=8, validation={"fraction": 0.2})
    assert [trained_on(dataset, stream) for stream in dataset.validation_streams] == [
        trained_on(other, stream) for stream in reversed(other.validation_streams)
    ]


def test_copies_of_a_document_stay_on_one_side(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(50, 3) * 4)
    dataset = make_dataset({"type": "jsonl", "paths": [str(path)]}, validation={"fraction": 0.5})
    trained, held_out = (trained_on(dataset, s) for s in (dataset.streams[0], dataset.validation_streams[0]))
    assert trained and held_out and not trained & held_out


def test_validation_is_every_held_out_target_once_and_always_the_same(dataset):
    batches = list(dataset.validation(batch_size=5))
    assert all(equal(a, b) for a, b in itertools.zip_longest(batches, dataset.validation(batch_size=5)))
    expected = sum(stream.num_tokens - len(stream.selected) for stream in dataset.validation_streams)
    assert sum(batch.num_targets for batch in batches) == expected
    assert sum(batch.num_targets for batch in dataset.validation(batch_size=64)) == expected


def test_validation_of_at_most_some_rows(corpus):
    dataset = make_dataset(*corpus, validation={"fraction": 0.2, "max_rows": 7})
    assert [len(batch.tokens) for batch in dataset.validation(batch_size=3)] == [3, 3, 1]


def test_validation_from_its_own_sources(corpus, tmp_path):
    path = write_jsonl(tmp_path / "validation.jsonl", ["one", "two"])
    dataset = make_dataset(*corpus, validation={"sources": [{"type": "jsonl", "paths": [str(path)]}]})
    assert sum(batch.num_targets for batch in dataset.validation()) == 8
    assert sum(len(stream.selected) for stream in dataset.streams) == 200


def test_fingerprint_names_what_changed(corpus, dataset, tmp_path):
    changed_text = {**corpus[0], "paths": [str(write_jsonl(tmp_path / "first.jsonl", [*make_texts(99, 1), "new"]))]}
    validation = {"validation": {"fraction": 0.2}}
    cases = {
        (): make_dataset(*corpus, **validation),
        ("seed",): make_dataset(*corpus, seed=1, **validation),
        ("data.sources.0",): make_dataset(changed_text, corpus[1], **validation),
        ("data.sources.1.weight",): make_dataset(corpus[0], {**corpus[1], "weight": 2.0}, **validation),
        ("data.sources.1", "data.sources.1.weight"): make_dataset(corpus[0], **validation),
        ("data.sequence_length",): make_dataset(*corpus, sequence_length=17, **validation),
        ("data.packing",): make_dataset(*corpus, packing=False, **validation),
        ("data.shuffle",): make_dataset(*corpus, shuffle=False, **validation),
        ("data.validation.fraction",): make_dataset(*corpus, validation={"fraction": 0.3}),
    }
    for keys, other in cases.items():
        assert changed_parts(dataset.parts, other.parts) == list(keys)
        assert (other.fingerprint() == dataset.fingerprint()) == (not keys)
    fewer_validation_rows = make_dataset(*corpus, validation={"fraction": 0.2, "max_rows": 1})
    assert fewer_validation_rows.fingerprint() == dataset.fingerprint()


def test_copied_files_keep_the_fingerprint(corpus, dataset, tmp_path):
    copies = []
    for number, source in enumerate(corpus):
        path = tmp_path / f"copy-{number}.jsonl"
        path.write_text(open(source["paths"][0]).read())
        copies.append({**source, "paths": [str(path)]})
    assert make_dataset(*copies, validation={"fraction": 0.2}).fingerprint() == dataset.fingerprint()


def test_cached_and_prepared_tokens_give_the_same_rows(corpus, dataset, tmp_path):
    validation = {"validation": {"fraction": 0.2}}
    cached = [make_dataset(*corpus, cache=str(tmp_path / "cache"), **validation) for _ in range(2)]
    assert len(list((tmp_path / "cache").iterdir())) == 2
    folders = []
    for number in (1, 2):
        documents = (prepare.Document(text) for text in make_texts(100, number))
        prepare.prepare(documents, ByteTokenizer(), tmp_path / str(number), [])
        folders.append({"type": "tokens", "path": str(tmp_path / str(number)), "weight": [3, 1][number - 1]})
    prepared = make_dataset(*folders, tokenizer=None, **validation)
    for other in (*cached, prepared):
        assert other.fingerprint() == dataset.fingerprint()
        assert equal(other.batch(100, 20), dataset.batch(100, 20))


def test_a_changed_file_is_tokenized_into_the_cache_again(tmp_path):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    source = {"type": "text", "paths": [str(path)]}
    for text in ("a" * 50, "b" * 50):
        path.write_text(text)
        dataset = make_dataset(source, cache=str(cache))
        assert trained_on(dataset, dataset.streams[0]) == {text}


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    prepare.prepare([prepare.Document("text " * 20)], ByteTokenizer(), tmp_path / "prepared", [])
    meta = tmp_path / "prepared" / "meta.json"
    meta.write_text(meta.read_text().replace("bytes-1", "another"))
    message = r"data\.sources\.0: .*prepared was prepared with tokenizer another; expected .* bytes-1"
    with pytest.raises(UserError, match=message):
        make_dataset({"type": "tokens", "path": str(tmp_path / "prepared")})


def test_damaged_tokens_are_one_line(tmp_path):
    prepare.prepare([prepare.Document("text " * 20)], ByteTokenizer(), tmp_path / "prepared", [])
    tokens = tmp_path / "prepared" / "tokens.bin"
    tokens.write_bytes(b"\0" * tokens.stat().st_size)
    with pytest.raises(UserError, match=r"^data\.sources\.0: .*tokens\.bin is damaged, its checksum [^\n]*$"):
        make_dataset({"type": "tokens", "path": str(tmp_path / "prepared")})


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, r"data\.sources\.0: holds no text"),
        (["", ""], {}, r"data\.sources\.0: holds no text"),
        (["short"], {}, r"data\.sources\.0: 1 documents, 7 tokens for training, expected more than one row"),
        (["a" * 99], {"validation": {"fraction": 0.001}}, "0.001 holds out no document of the 1, expected a larger"),
        (["a" * 99], {"validation": {"fraction": 0.999}}, "0 documents, 0 tokens for training"),
        (["a" * 99], {"validation": {"fraction": 0.999}, "packing": False}, "0 documents, 0 tokens for training"),
    ],
)
def test_too_little_data_is_one_line(tmp_path, texts, options, message):
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(UserError, match=message) as error:
        make_dataset({"type": "jsonl", "paths": [str(path)]}, **options)
    assert "\n" not in str(error.value)


def test_what_fails_while_reading_is_one_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a" * 99])
    (tmp_path / "file").write_text("")
    source = {"type": "jsonl", "paths": [str(path)]}
    with pytest.raises(UserError, match=r"^data\.sources\.0: .*Not a directory.*file"):
        make_dataset(source, cache=str(tmp_path / "file" / "cache"))
    config = DataConfig.model_validate({"sources": [source], "tokenizer": {"type": "bytes"}, "sequence_length": 4})
    path.unlink()
    with pytest.raises(UserError, match=r"^data\.sources\.0: no such file: .*a\.jsonl$"):
        build_dataset(config, 0)


def test_empty_documents_are_left_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", "a" * 30, "", "b" * 30])
    dataset = make_dataset({"type": "jsonl", "paths": [str(path)]})
    assert trained_on(dataset, dataset.streams[0]) == {"a" * 30, "b" * 30}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sequence_length": 0}, "sequence_length"),
        ({"tokenizer": None}, "tokenizer: missing"),
        ({"tokenizer": {"type": "huggingface", "path": "missing"}}, "no such folder: missing"),
        ({"validation": {}}, "got neither of"),
        ({"validation": {"fraction": 1.0}}, "fraction"),
        ({"validation": {"fraction": 0.1, "max_rows": 0}}, "max_rows"),
        ({"validation": {"sources": [{"type": "python_stdlib", "weight": 2.0}]}}, "sources.0.weight: got 2.0"),
        ({"validation": {"fraction": 0.1, "sources": [{"type": "python_stdlib"}]}}, "got both of"),
    ],
)
def test_bad_configs_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        make_dataset({"type": "python_stdlib"}, **values)


def test_no_sources_are_refused():
    with pytest.raises(ValidationError, match="sources"):
        make_dataset()


def test_summary_counts(dataset):
    lines = dataset.summary()
    assert len(lines) == 3 and "75.0% of the rows" in lines[0] and lines[2].startswith("validation ")
    assert f"{dataset.streams[0].num_tokens:,} tokens" in lines[0]
    assert dataset.num_tokens == sum(stream.num_tokens for stream in dataset.streams)
