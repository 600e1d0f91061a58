import threading

import pytest
import torch
from helpers.documents import make_dataset, write_jsonl

from fast_llm_ssm.config import UserError
from fast_llm_ssm.data import Loader


@pytest.fixture
def dataset(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number} " * 5 for number in range(20)])
    return make_dataset({"type": "jsonl", "paths": [str(path)]})


class Failing:
    """Rows that cannot be read from a certain one on."""

    def __init__(self, dataset, error: BaseException) -> None:
        self.dataset, self.error = dataset, error

    def batch(self, first: int, count: int):
        if first >= 4:
            raise self.error
        return self.dataset.batch(first, count)


@pytest.mark.parametrize(("first", "count", "stride"), [(0, 2, None), (7, 3, 12)])
def test_batches_come_in_order(dataset, first, count, stride):
    with Loader(dataset, first, count, stride, depth=2) as loader:
        for number in range(10):
            expected = dataset.batch(first + number * (stride or count), count)
            assert torch.equal(next(loader).tokens, expected.tokens)


def test_an_error_arrives_in_its_turn_and_ends_the_loader(dataset):
    with Loader(Failing(dataset, OSError("disk gone")), 0, 2) as loader:
        next(loader), next(loader)
        with pytest.raises(RuntimeError, match=r"^data loader: rows from 4 on failed, OSError: disk gone$"):
            next(loader)
        with pytest.raises(StopIteration):
            next(loader)


def test_a_user_error_stays_one(dataset):
    with Loader(Failing(dataset, UserError("tokens.bin is damaged")), 4, 2) as loader:
        with pytest.raises(UserError, match="^tokens.bin is damaged$"):
            next(loader)


def test_close_ends_the_thread_while_the_queue_is_full(dataset):
    before = threading.active_count()
    loader = Loader(dataset, 0, 1, depth=1)
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before
