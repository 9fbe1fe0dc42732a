"""Which bytes live on a rank, what for, and when they were most.

A storage counts from the operator that makes it until the last tensor on it is gone, at the size
that it has at the time: FSDP empties and refills the storages of gathered weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args
from weakref import KeyedRef

import torch
from torch import Tensor, UntypedStorage

Part = Literal["weights", "gradients", "optimizer", "activations", "buffers"]
PARTS: tuple[Part, ...] = get_args(Part)


class Ledger:
    """live: bytes by part. peak: the same when their sum was highest since `forget_peak`.

    part: of what is made from now on. when: of now, for people. peak_when: of the peak.
    """

    def __init__(self) -> None:
        self.live: dict[Part, int] = dict.fromkeys(PARTS, 0)
        self.part: Part = "activations"
        self.when: Callable[[], str] = str
        self._total = 0
        self._parts: dict[int, Part] = {}
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, KeyedRef[int, UntypedStorage]] = {}
        self.forget_peak()

    def forget_peak(self) -> None:
        self.peak = dict(self.live)
        self.peak_when = ""
        self._highest = self._total

    def count(self, tensor: Tensor) -> None:
        """Unless it is known already, be it by another tensor; on meta there are no bytes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or tensor.device.type == "meta":
            return
        self._parts[key], self._sizes[key] = self.part, 0
        self._alive[key] = KeyedRef(storage, self._gone, key)
        self._resize(key, storage.nbytes())

    def relabel(self, tensor: Tensor, part: Part) -> None:
        """What it turned out to be for. A tensor that nobody counted is not counted now either."""
        key = tensor.untyped_storage()._cdata
        if (old := self._parts.get(key)) is not None and old != part:
            self.live[old] -= self._sizes[key]
            self.live[part] += self._sizes[key]
            self._parts[key] = part

    @contextmanager
    def making(self, part: Part) -> Iterator[None]:
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Storages that change their size are no operators' doing: they are told here."""
        resize = UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (key := storage._cdata) in self._sizes:
                self._resize(key, storage.nbytes())
            return result

        setattr(torch.UntypedStorage, "resize_", resized)  # noqa: B010
        try:
            yield
        finally:
            setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010

    def _resize(self, key: int, size: int) -> None:
        more = size - self._sizes[key]
        self._sizes[key] = size
        self.live[self._parts[key]] += more
        self._total += more
        if self._total > self._highest:
            self._highest, self.peak, self.peak_when = self._total, dict(self.live), self.when()

    def _gone(self, reference: KeyedRef[int, UntypedStorage]) -> None:
        key = reference.key
        self._resize(key, 0)
        del self._parts[key], self._sizes[key], self._alive[key]
