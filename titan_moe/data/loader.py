"""The training batches of one data rank, brought in the background, with their exact state.

R rows of this rank in a step, S seq_len, F fields of a row (packing.FIELDS).
"""

import atexit
import logging
import signal
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_moe.config.sections import DataLoader
from titan_moe.data.mixture import stream_of
from titan_moe.data.packing import FIELDS
from titan_moe.data.shard import Failure, Item, Shard
from titan_moe.data.state import State
from titan_moe.world import STOP_SIGNALS

logger = logging.getLogger(__name__)


# Loaders whose processes may run. At exit Python asks such processes to terminate, which they take
# no notice of (see StepLoader._start), and waits for them; so they are told before.
_running: "weakref.WeakSet[StepLoader]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for loader in list(_running):
        loader.close()


class StepLoader:
    """Iterates over this rank's steps: dicts of FIELDS, int64 [R, S].

    Rows are in global order within their balance group, and groups, which are side by side, in an
    order of their own. A step's sequences are of one group if their streams leave the same
    remainder by the number of groups, which the data-parallel degree divides: so a group is on one
    rank, and the same, under any layout. As many groups as rows are no groups.

    Iterating again goes on where it stood. Broken data raises ValueError when its turn comes.
    """

    def __init__(
        self, shard: Shard, section: DataLoader, description: State, num_groups: int
    ) -> None:
        """num_groups: balance groups in a step, over all ranks."""
        self._shard = shard
        self._num_groups = num_groups
        self._description = description
        self._sequences: int = shard.state["sequences"]
        self._counts: list[int] = shard.state["counts"]
        self._records: dict[str, dict[str, Any]] = {
            name: {s: r for s, r in records.items() if self._is_mine(int(s))}
            for name, records in shard.state["streams"].items()
        }
        streams_here = shard.num_streams // shard.dp_degree
        self._num_items = max(1, min(section.num_workers, streams_here))
        if section.num_workers > streams_here:
            logger.warning(
                "training.dataloader.num_workers = %d: this rank has %d streams, so %d are started",
                section.num_workers,
                streams_here,
                streams_here,
            )
        self._section = section
        self._pin = section.pin_memory and torch.cuda.is_available()
        self._items: Iterator[Item | Failure] | None = None

    def _is_mine(self, stream: int) -> bool:
        return stream % self._shard.dp_degree == self._shard.dp_rank

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._items is None:
            self._items = self._start()
            _running.add(self)
        items = [self._receive() for _ in range(self._num_items)]
        self._sequences += self._shard.global_batch_size
        self._counts = items[0].counts
        for item in items:
            for (name, stream), record in item.records.items():
                self._records[name][str(stream)] = record
        return self._step(items)

    def _receive(self) -> Item:
        assert self._items is not None
        item = next(self._items)
        if isinstance(item, Failure):
            self.close()
            raise ValueError(item.message)
        return item

    def _step(self, items: list[Item]) -> dict[str, Tensor]:
        order = self._order([number for item in items for number in item.numbers])
        share = self._shard.global_batch_size // self._shard.dp_degree
        assert len(order) == share, f"{len(order)} of {share} sequences"
        rows_RFS = np.concatenate([item.rows.numpy() for item in items])[order]
        shape = (len(FIELDS), share, self._shard.rules.seq_len)
        step_FRS = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin)
        # By numpy: torch would wake all its threads for a copy that takes microseconds.
        step_FRS.numpy()[:] = rows_RFS.transpose(1, 0, 2)
        return dict(zip(FIELDS, step_FRS, strict=True))

    def _order(self, numbers: list[int]) -> list[int]:
        """Places of the rows, given by their global numbers, in the order in which they go out."""
        shard = self._shard
        if self._num_groups == shard.global_batch_size:
            return sorted(range(len(numbers)), key=numbers.__getitem__)

        def group_and_number(place: int) -> tuple[int, int]:
            stream = stream_of(numbers[place], shard.num_streams, len(shard.sources))
            return stream % self._num_groups, numbers[place]

        return sorted(range(len(numbers)), key=group_and_number)

    def state(self) -> State:
        """State after the last step yielded: JSON-able, of the streams that this rank serves."""
        return {
            **self._description,
            "part": [self._shard.dp_rank, self._shard.dp_degree],
            "sequences": self._sequences,
            "counts": list(self._counts),
            "streams": {name: dict(records) for name, records in self._records.items()},
        }

    def close(self) -> None:
        """Stop the loader processes. Iterating afterwards goes on from the last step yielded."""
        shut_down = getattr(self._items, "_shutdown_workers", None)
        self._items = None
        _running.discard(self)
        if shut_down is not None:  # absent where no process was started
            shut_down()

    def _start(self) -> Iterator[Item | Failure]:
        """Begin to load. Loader processes are spawned: forking a process in which communication
        threads run can deadlock, and a fork server would outlive a killed trainer."""
        workers = self._num_items if self._section.num_workers else 0
        # A stop signal goes to the whole process group, but the trainer still wants to finish its
        # step and save: children inherit the mask, so they never see it and end with the trainer.
        # (Python's resource tracker lifts the mask when it is started, hence before.)
        if workers:
            resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
                loader: StatefulDataLoader[Item | Failure] = StatefulDataLoader(
                    replace(self._shard, state=self.state()),
                    batch_size=None,
                    collate_fn=_as_is,
                    num_workers=workers,
                    prefetch_factor=self._section.prefetch_factor if workers else None,
                    multiprocessing_context="spawn" if workers else None,
                    persistent_workers=workers > 0,
                    generator=torch.Generator(),  # else a seed is drawn from the run's generator
                )
                return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_is(item: Item | Failure) -> Item | Failure:
    return item
