from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from helpers.documents import tokenized
from hypothesis import given
from hypothesis import strategies as st

from fast_llm_ssm.data.rows import Mix, Row, Stream, permutation

# Documents of every length around a row's, as ids that are all different.
lengths = st.lists(st.integers(1, 23), min_size=1, max_size=12)
sizes = st.integers(1, 9)


def make_documents(lengths: list[int]) -> list[list[int]]:
    ends = np.cumsum(lengths)
    return [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]


def make_stream(lengths: list[int], size: int, **options) -> Stream:
    return Stream(tokenized(make_documents(lengths)), np.arange(len(lengths)), size, seed="0", **options)


def pairs(rows: list[Row]) -> Counter:
    """(token, target) wherever there is a target."""
    return Counter(
        (int(token), int(target)) for row in rows for token, target in zip(row.tokens, row.targets, strict=True)
        if target != -100
    )  # fmt: skip


@given(lengths, sizes, st.booleans(), st.booleans(), st.integers(0, 3))
def test_every_epoch_has_every_target_exactly_once(lengths, size, shuffle, packing, epoch):
    stream = make_stream(lengths, size, shuffle=shuffle, packing=packing)
    rows = [stream.row(epoch * stream.num_rows + index) for index in range(stream.num_rows)]
    assert pairs(rows) == Counter(pair for document in make_documents(lengths) for pair in pairwise(document))


@given(lengths, sizes, st.integers(0, 2))
def test_every_epoch_has_every_token_exactly_once(lengths, size, epoch):
    stream = make_stream(lengths, size)
    seen: Counter = Counter()
    for index in range(stream.num_rows):
        row = stream.row(epoch * stream.num_rows + index)
        seen.update(row.tokens.tolist())
    padding = stream.num_rows * size - sum(lengths)
    seen[0] -= max(0, padding)
    missing = Counter(range(sum(lengths))) - seen
    # Only the very last token of an epoch, which has no next one, may have found no room.
    assert sum(missing.values()) == max(0, -padding) <= 1
    assert all(count == 1 for token, count in seen.items() if token not in missing and count)


@given(lengths, sizes, st.booleans(), st.integers(0, 200))
def test_ends_and_targets_mark_the_documents(lengths, size, packing, index):
    documents = make_documents(lengths)
    document_of = {token: number for number, document in enumerate(documents) for token in document}
    row = make_stream(lengths, size, packing=packing).row(index)
    assert row.ends == sorted(set(row.ends)) and row.ends[-1] == size
    for start, end in pairwise([0, *row.ends]):
        tokens, targets = row.tokens[start:end], row.targets[start:end]
        assert (targets[:-1] == tokens[1:]).all() or (tokens == 0).all()
        assert len({document_of[int(token)] for token in tokens}) == 1
        if end < size and (targets != -100).any():
            assert targets[-1] == -100 and int(tokens[-1]) == documents[document_of[int(tokens[0])]][-1]
    for token, target in zip(row.tokens.tolist(), row.targets.tolist(), strict=True):
        assert target == -100 or document_of[token] == document_of[target]


@given(lengths, sizes, st.integers(0, 200))
def test_without_packing_a_row_holds_one_document(lengths, size, index):
    row = make_stream(lengths, size, packing=False).row(index)
    assert len(row.ends) <= 2
    real = row.tokens[: row.ends[0]]
    assert (np.diff(real) == 1).all()
    assert (row.targets[row.ends[0] :] == -100).all()


@given(lengths, sizes, st.lists(st.integers(0, 300), min_size=1, max_size=8), st.booleans())
def test_a_row_depends_on_its_number_alone(lengths, size, indices, packing):
    used = make_stream(lengths, size, packing=packing)
    for index in indices:
        for mine, fresh in zip(used.row(index), make_stream(lengths, size, packing=packing).row(index), strict=True):
            assert np.array_equal(mine, fresh)


def test_epochs_and_seeds_differ_in_order():
    stream = make_stream([10] * 20, 7)
    other = Stream(stream.documents, stream.selected, 7, seed="1")
    first, second, elsewhere = (
        [tuple(source.row(index).tokens.tolist()) for index in indices]
        for source, indices in ((stream, range(20)), (stream, range(29, 49)), (other, range(20)))
    )
    assert stream.num_rows == 29 and first != second and first != elsewhere


def test_neighbouring_rows_come_from_different_documents():
    stream = make_stream([1000] * 10, 10)
    starts = [int(stream.row(index).tokens[0]) // 1000 for index in range(500)]
    assert sum(a == b for a, b in pairwise(starts)) < 100


def test_unshuffled_rows_are_the_text_in_order():
    stream = make_stream([5, 4, 3], 4, shuffle=False)
    assert [stream.row(index).tokens.tolist() for index in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [stream.row(index).targets.tolist() for index in range(3)] == [
        [1, 2, 3, 4], [-100, 6, 7, 8], [-100, 10, 11, -100]
    ]  # fmt: skip
    assert [stream.row(index).ends for index in range(3)] == [[4], [1, 4], [1, 4]]


def test_a_document_of_many_rows_continues_without_a_gap():
    stream = make_stream([60_001], 10, shuffle=False)
    assert stream.num_rows == 6_000
    assert stream.row(5_999).tokens.tolist() == list(range(59_990, 60_000))
    assert stream.row(5_999).targets[-1] == 60_000


@given(st.integers(0, 300), st.sampled_from(["", "0", "rows 1 2"]))
def test_permutation_is_one(count, seed):
    assert sorted(permutation(count, seed).tolist()) == list(range(count))


def test_permutation_stays_the_same_for_ever():
    # A change here changes the data order of every run that is resumed.
    assert permutation(10, "documents 0 0").tolist() == [1, 0, 8, 5, 7, 4, 9, 2, 6, 3]


@given(st.lists(st.one_of(st.integers(1, 9), st.sampled_from([0.1, 0.25, 0.7, 2.5])), min_size=1, max_size=5))
def test_mix_counts_are_exact_and_even(weights):
    mix = Mix(weights)
    cycle = sum(mix.quotas)
    seen: Counter = Counter()
    for index in range(min(cycle, 400) + 50):
        source, number = mix.locate(index)
        assert number == seen[source] == mix.count(source, index)
        seen[source] += 1
        for other, weight in enumerate(weights):
            assert abs(seen[other] - (index + 1) * weight / sum(weights)) < len(weights)
    assert mix.quotas == pytest.approx([cycle * weight / sum(weights) for weight in weights])
    assert [mix.count(source, 1000 * cycle) for source in range(len(weights))] == [1000 * quota for quota in mix.quotas]


def test_mix_rounds_odd_weights_and_starves_nobody():
    mix = Mix([1.0, 0.333333333, 1e-9])
    assert mix.quotas == [49152, 16384, 1]
    assert mix.locate(10**15)[1] > 0
