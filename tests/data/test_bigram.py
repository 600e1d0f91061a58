import math
import random

import pytest
from helpers.documents import make_dataset, write_jsonl

from fast_llm_ssm.data import bigram_baseline


def source(path, texts):
    return {"type": "jsonl", "paths": [str(write_jsonl(path, texts))]}


def naive(train: list[list[int]], pairs: list[tuple[int, int]], vocab_size: int) -> float:
    """Witten-Bell, by the book."""
    following: dict[int, list[int]] = {}
    for document in train:
        for a, b in zip(document, document[1:], strict=False):
            following.setdefault(a, []).append(b)
    targets = [b for successors in following.values() for b in successors]
    total = 0.0
    for a, b in pairs:
        unigram = (targets.count(b) + 1) / (len(targets) + vocab_size)
        successors = following.get(a, [])
        kinds = len(set(successors))
        total -= math.log((successors.count(b) + kinds * unigram) / (len(successors) + kinds) if kinds else unigram)
    return total / len(pairs)


def test_the_loss_is_the_formula_on_exactly_the_validation_targets(tmp_path):
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcd \n", [9, 5, 1, 1, 3, 1], k=40)) for _ in range(20)]
    unseen = ["abz", "qa"]
    validation = source(tmp_path / "validation.jsonl", texts[:3] + unseen)
    dataset = make_dataset(
        source(tmp_path / "a.jsonl", texts[3:10]),
        source(tmp_path / "b.jsonl", texts[10:]),
        validation={"sources": [validation]},
    )
    framed = [[256, *text.encode(), 257] for text in texts]
    held_out = [*framed[:3], *([256, *text.encode(), 257] for text in unseen)]
    pairs = [pair for document in held_out for pair in zip(document, document[1:], strict=False)]
    result = bigram_baseline(dataset)
    assert result.loss == pytest.approx(naive(framed[3:], pairs, 258), rel=1e-12)
    assert result.num_targets == len(pairs) == sum(batch.num_targets for batch in dataset.validation())
    assert result.train_tokens == 17 * 41


def test_a_predictable_text_costs_nothing_and_noise_costs_all(tmp_path):
    chance = random.Random(0)
    noise = ["".join(chance.choices("abcdefgh", k=500)) for _ in range(40)]
    order = ["abcdefgh" * 60] * 40
    noisy, ordered = (
        make_dataset(
            source(tmp_path / f"{name}.jsonl", texts[:30]),
            validation={"sources": [source(tmp_path / f"{name}-validation.jsonl", texts[30:])]},
        )
        for name, texts in (("noise", noise), ("order", order))
    )
    assert bigram_baseline(noisy).loss == pytest.approx(math.log(8), abs=0.03)
    assert bigram_baseline(ordered).loss < 0.05


def test_a_limit_of_training_tokens(tmp_path):
    dataset = make_dataset(
        source(tmp_path / "a.jsonl", ["ab" * 50] * 100), validation={"sources": [source(tmp_path / "v.jsonl", ["ab"])]}
    )
    assert 0 < bigram_baseline(dataset, max_tokens=1000).train_tokens <= 1000
    assert bigram_baseline(dataset, max_tokens=50).train_tokens == 49, "a part of one document"


def test_without_validation_there_is_no_baseline(tmp_path):
    assert bigram_baseline(make_dataset(source(tmp_path / "a.jsonl", ["ab" * 50]))) is None
