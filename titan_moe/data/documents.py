"""A source's training documents, dealt to its streams, in bounded memory.

Training documents are numbered 0, 1, 2, ... over all epochs; number d belongs to stream d mod N.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from titan_moe.data.readers.base import Cursor, Reader


class Position(NamedTuple):
    """Where a document is.

    number: of the document among all training documents of all epochs.
    epoch, place: the pass over the data, and the document's place in it, held-out ones included.
    cursor: the reader's; None at the start of an epoch.
    """

    number: int = 0
    epoch: int = 0
    place: int = 0
    cursor: Cursor | None = None

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


def is_held_out(place: int, holdout_every: int) -> bool:
    """Whether the epoch's document `place` belongs to validation: the last of every n."""
    return holdout_every > 0 and place % holdout_every == holdout_every - 1


def training_documents(
    reader: Reader, holdout_every: int, start: Position, name: str
) -> Iterator[tuple[Position, Callable[[], str]]]:
    """Training documents from `start` on, epoch after epoch, for ever.

    Raises ValueError naming the source if an epoch has none.
    """
    number, epoch, place, cursor = start
    while True:
        number_before = number
        for document in reader.documents(cursor):
            if not is_held_out(place, holdout_every):
                yield Position(number, epoch, place, document.cursor), document.read
                number += 1
            place += 1
        if number == number_before:
            why = (
                f"all {place} are held out (holdout_every = {holdout_every})" if place else "empty"
            )
            raise ValueError(f"source {name!r} has no training document: {why}")
        epoch, place, cursor = epoch + 1, 0, None


class _Scan:
    """One pass through the documents on behalf of some streams."""

    def __init__(self, start: Position, documents: Iterator[tuple[Position, Any]]) -> None:
        self.last = start
        self.next_number = start.number
        self.streams: set[int] = set()
        self._documents = documents

    def advance(self) -> tuple[Position, Callable[[], str]]:
        self.last, read = next(self._documents)
        self.next_number = self.last.number + 1
        return self.last, read


class DocumentStreams:
    """The next document of any of this process's streams of one source.

    Streams share a sequential scan: documents that a scan meets before their stream asks for them
    wait in memory. When they exceed `window_bytes`, the stream that holds most of it loses them and
    gets a scan of its own from where it stands; it returns to an earlier scan that it overtakes.
    So memory stays bounded however unequal the streams' documents are, and a source is read as few
    times as that allows. What is read by whom never changes what comes out.

    streams: stream -> where to start; its first document is its first at or after that place.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        name: str,
        holdout_every: int,
        num_streams: int,
        streams: dict[int, Position],
        window_bytes: int,
    ) -> None:
        self._reader = reader
        self._name = name
        self._holdout_every = holdout_every
        self._num_streams = num_streams
        self._window_bytes = window_bytes
        self._last = dict(streams)
        self._next_number = {
            s: at.number + (s - at.number) % num_streams for s, at in streams.items()
        }
        self._waiting: dict[int, deque[tuple[Position, str]]] = {s: deque() for s in streams}
        self._waiting_bytes = dict.fromkeys(streams, 0)
        self._total_bytes = 0
        self._scans: list[_Scan] = []
        self._scan_of: dict[int, _Scan] = {}
        # The hindmost first, so that those within a window of it share its scan.
        for stream in sorted(streams, key=self._next_number.__getitem__):
            self._place(stream)

    @property
    def num_scans(self) -> int:
        return len(self._scans)

    @property
    def waiting_bytes(self) -> int:
        """Memory of documents read ahead of their streams."""
        return self._total_bytes

    def next(self, stream: int) -> tuple[Position, str]:
        """The stream's next document. Raises ValueError on broken data."""
        if not self._waiting[stream]:
            self._place(stream)
            self._scan_until(stream)
        position, text = self._waiting[stream].popleft()
        self._account(stream, -sys.getsizeof(text))
        self._last[stream] = position
        self._next_number[stream] += self._num_streams
        return position, text

    def _scan_until(self, stream: int) -> None:
        """Advance the stream's scan to the stream's next document."""
        scan = self._scan_of[stream]
        while not self._waiting[stream]:
            position, read = scan.advance()
            owner = position.number % self._num_streams
            if owner in scan.streams and position.number >= self._next_number[owner]:
                text = read()
                self._waiting[owner].append((position, text))
                self._account(owner, sys.getsizeof(text))
                self._shed(keep=stream)

    def _account(self, stream: int, num_bytes: int) -> None:
        self._waiting_bytes[stream] += num_bytes
        self._total_bytes += num_bytes

    def _shed(self, keep: int) -> None:
        """Drop the documents of the fullest streams until the rest fits the window."""
        while self._total_bytes > self._window_bytes:
            rest: Iterable[int] = (s for s in self._waiting if s != keep and self._waiting[s])
            fullest = max(rest, key=self._waiting_bytes.__getitem__, default=None)
            if fullest is None:
                return
            self._account(fullest, -self._waiting_bytes[fullest])
            self._waiting[fullest].clear()
            self._leave(fullest)

    def _place(self, stream: int) -> None:
        """Give the stream the earliest opened scan that can serve it, else a new one."""
        here = self._offset_bytes(self._last[stream])
        for scan in self._scans:
            is_ahead = scan.next_number > self._next_number[stream]
            if not is_ahead and here - self._offset_bytes(scan.last) <= self._window_bytes:
                break
        else:
            start = self._last[stream]
            documents = training_documents(self._reader, self._holdout_every, start, self._name)
            scan = _Scan(start, documents)
            self._scans.append(scan)
        if scan is not self._scan_of.get(stream):
            self._leave(stream)
            self._scan_of[stream] = scan
            scan.streams.add(stream)

    def _leave(self, stream: int) -> None:
        scan = self._scan_of.pop(stream, None)
        if scan is not None:
            scan.streams.remove(stream)
            if not scan.streams:
                self._scans.remove(scan)

    def _offset_bytes(self, position: Position) -> int:
        inside = self._reader.bytes_before(position.cursor) if position.cursor else 0
        return position.epoch * self._reader.size_bytes + inside
