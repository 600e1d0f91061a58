"""Batches made ahead of time by a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Self

from fast_llm_ssm.config import UserError

from .batch import Batch
from .dataset import Dataset


class Loader:
    """Iterates over batches of rows first, first + stride, first + 2 * stride, ...

    Use it as a context manager, or call `close`: the thread ends with it.

    Args:
        dataset: Where the rows come from.
        first: The first row of the first batch.
        count: Rows of a batch.
        stride: Rows from one batch to the next; None is `count`. A rank of many passes its own `first`, and the rows of
            a batch of all ranks.
        depth: Batches to have ready.
        pin_memory: Put batches into pinned memory, for copies to a GPU that do not wait.
    """

    def __init__(
        self,
        dataset: Dataset,
        first: int,
        count: int,
        stride: int | None = None,
        depth: int = 4,
        pin_memory: bool = False,
    ) -> None:
        self._dataset, self._first, self._count = dataset, first, count
        self._stride = count if stride is None else stride
        self._pin_memory = pin_memory
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="data loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        first = self._first
        while not self._closed.is_set():
            item: Batch | BaseException
            try:
                item = self._dataset.batch(first, self._count)
                item = item.pin_memory() if self._pin_memory else item
            except UserError as error:
                item = error
            except BaseException as error:
                item = RuntimeError(f"data loader: rows from {first:,} on failed, {type(error).__name__}: {error}")
                item.__cause__ = error
            while not self._closed.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            first += self._stride
