"""One data rank's share of every step, made in any number of loader processes.

R rows in a step, S seq_len, F fields of a row (packing.FIELDS).

Every loader process serves some of the rank's streams. Item i comes from process i mod W and holds
that process's rows of step i // W, with the records of the streams it touched; W items make a step.
Records are taken where rows are made and travel with them, so the state after a step does not
depend on what has been prepared ahead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from titan_moe.data.documents import DocumentStreams, Position
from titan_moe.data.mixture import Mixture, stream_of
from titan_moe.data.packing import FIELDS, Packer, PackingRules
from titan_moe.data.readers import Reader
from titan_moe.data.state import State
from titan_moe.data.tokenizer import DocumentEncoder

# Documents read ahead of their streams, in one process, over all sources.
WINDOW_BYTES = 64 << 20


@dataclass(frozen=True)
class OpenSource:
    """A source of the mixture, ready to be read in any process."""

    name: str
    weight: float
    holdout_every: int
    reader: Reader


@dataclass(frozen=True)
class Item:
    """One loader process's share of one step.

    rows: [R, F, S] int32. numbers: global sequence of each row.
    records: (source, stream) -> record after the step.
    counts: sequences taken from each source after the step, on all ranks.
    """

    rows: Tensor
    numbers: list[int]
    records: dict[tuple[str, int], dict[str, Any]]
    counts: list[int]


@dataclass(frozen=True)
class Failure:
    """A ValueError of a loader process, to be raised in the trainer as it was."""

    message: str


@dataclass(frozen=True)
class Shard(IterableDataset[Item | Failure]):
    """The items of one data rank; each loader process iterates over its own."""

    sources: list[OpenSource]
    encode: DocumentEncoder
    rules: PackingRules
    num_streams: int
    global_batch_size: int
    dp_rank: int
    dp_degree: int
    state: State
    window_bytes: int

    def __iter__(self) -> Iterator[Item | Failure]:
        try:
            yield from self._items()
        except ValueError as error:
            yield Failure(str(error))

    def _items(self) -> Iterator[Item]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        mine = [
            stream
            for stream in range(self.dp_rank, self.num_streams, self.dp_degree)
            if stream // self.dp_degree % num_workers == worker
        ]
        packers = [self._packers(source, mine) for source in self.sources]
        mixture = Mixture(
            [source.weight for source in self.sources],
            self.state["sequences"],
            self.state["counts"],
        )
        while True:
            yield self._item(mixture, packers)

    def _item(self, mixture: Mixture, packers: list[dict[int, Packer]]) -> Item:
        rows, numbers = [], []
        touched: dict[tuple[str, int], Packer] = {}
        for number in range(mixture.sequence, mixture.sequence + self.global_batch_size):
            source = mixture.next()
            stream = stream_of(number, self.num_streams, len(self.sources))
            packer = packers[source].get(stream)
            if packer is not None:
                rows.append(packer.row())
                numbers.append(number)
                touched[self.sources[source].name, stream] = packer
        shape = (len(rows), len(FIELDS), self.rules.seq_len)
        rows_RFS = np.stack(rows) if rows else np.empty(shape, dtype=np.int32)
        records = {key: packer.record() for key, packer in touched.items()}
        return Item(torch.from_numpy(rows_RFS), numbers, records, list(mixture.counts))

    def _packers(self, source: OpenSource, streams: list[int]) -> dict[int, Packer]:
        records = self.state["streams"][source.name]
        starts, tokens = {}, {}
        for stream in streams:
            record = dict(records.get(str(stream), {}))
            tokens[stream] = record.pop("tokens", 0)
            starts[stream] = Position(**record)
        documents = DocumentStreams(
            source.reader,
            name=source.name,
            holdout_every=source.holdout_every,
            num_streams=self.num_streams,
            streams=starts,
            window_bytes=self.window_bytes // len(self.sources),
        )
        return {
            stream: Packer(
                partial(documents.next, stream),
                self.encode,
                self.rules,
                name=f"source {source.name!r}, stream {stream}",
                patience_epochs=self.num_streams,
                skip_tokens=tokens[stream],
            )
            for stream in streams
        }
