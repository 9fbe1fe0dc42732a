"""What every format gives: an epoch's documents in a fixed order, from any place on.

A cursor is a JSON-able list that says where a document begins. What stands in it is the reader's
own affair, but in a reader of files its first entry is the file's number.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

Cursor = list[Any]


class Document(NamedTuple):
    """cursor: where it begins. read: its text; costs nothing until called, may raise ValueError."""

    cursor: Cursor
    read: Callable[[], str]


class Reader(ABC):
    """One corpus. Holds no open file, so that it can be sent to another process.

    format: as in `[[data.sources]] format`.
    size_bytes: of an epoch as stored; 0 where unknown.
    """

    format: str
    size_bytes: int

    @abstractmethod
    def documents(self, cursor: Cursor | None) -> Iterator[Document]:
        """The epoch's documents from `cursor` on (None: all). Raises ValueError on broken data."""

    @abstractmethod
    def bytes_before(self, cursor: Cursor) -> int:
        """Stored bytes before `cursor`, roughly: how much a reader has to pass to get there."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """JSON-able; equal as long as cursors mean the same places."""

    @abstractmethod
    def origins(self) -> list[str]:
        """Where its documents come from: readers without a common name share no document.

        Raises ValueError where that cannot be told.
        """


@dataclass(frozen=True)
class Listing:
    """Files in the order in which they are read.

    names: relative to root. sizes_bytes: as stored.
    """

    root: Path
    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]

    @classmethod
    def of(cls, root: Path, names: list[str]) -> "Listing":
        return cls(root, tuple(names), tuple((root / name).stat().st_size for name in names))

    def paths(self) -> tuple[Path, ...]:
        return tuple(self.root / name for name in self.names)

    def fingerprint(self) -> dict[str, Any]:
        content = json.dumps([self.names, self.sizes_bytes]).encode()
        return {
            "files": len(self.names),
            "bytes": sum(self.sizes_bytes),
            "digest": hashlib.sha256(content).hexdigest()[:32],
        }


class FilesReader(Reader):
    """Documents of a list of files, one file after the other."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.size_bytes = sum(listing.sizes_bytes)

    @abstractmethod
    def read_file(self, path: Path, place: Cursor) -> Iterator[Document]:
        """One file's documents from `place` on ([]: all); cursors are places inside the file."""

    def documents(self, cursor: Cursor | None) -> Iterator[Document]:
        first, *place = cursor or [0]
        for number in range(first, len(self.listing.names)):
            path = self.listing.root / self.listing.names[number]
            for inside, read in self.read_file(path, place):
                yield Document([number, *inside], read)
            place = []

    @cached_property
    def _bytes_before_file(self) -> list[int]:
        return list(accumulate(self.listing.sizes_bytes, initial=0))

    def bytes_before(self, cursor: Cursor) -> int:
        return self._bytes_before_file[cursor[0]]

    def fingerprint(self) -> dict[str, Any]:
        return self.listing.fingerprint()

    def origins(self) -> list[str]:
        return resolved(self.listing.paths())


def resolved(paths: Iterable[Path]) -> list[str]:
    """One name for a file, however it is spelled or linked."""
    return [str(path.resolve()) for path in paths]


def files_below(
    folder: Path, hidden: tuple[str, ...], *, follow: bool, above: frozenset[Path] = frozenset()
) -> Iterator[Path]:
    """All files below a folder, but what lies under a name that begins with one of `hidden`.

    follow: go into linked folders. above: folders on the way here, links resolved.
    Raises ValueError for a link that leads nowhere, to a folder above it or, unless `follow`, to a
    folder: what it should give would be missing without a word.
    """
    above |= {folder.resolve()}
    for path in folder.iterdir():
        if path.name.startswith(hidden):
            continue
        if path.is_dir():
            if path.is_symlink() and not follow:
                raise ValueError(f"{path}: `datasets` leaves out linked folders; link its files")
            if path.resolve() in above:
                raise ValueError(f"{path} leads back to a folder above it; remove the link")
            yield from files_below(path, hidden, follow=follow, above=above)
        elif path.is_file():
            yield path
        elif path.is_symlink():
            raise ValueError(f"{path} is a broken link: there is no {path.readlink()}")


def text_of(row: Any, field: str, where: str) -> str:
    """`row[field]`. Raises ValueError, naming the place, if it is not there or is not a string."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with fields, found {type(row).__name__}")
    if field not in row:
        raise ValueError(f"{where}: {no_such_field(field, row)}")
    return checked_text(row[field], field, where)


def checked_text(value: Any, field: str, where: str) -> str:
    """`value`. Raises ValueError, naming field and place, if it is not a string."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise ValueError(f"{where}: field {field!r} is {kind}, not a string")
    return value


def no_such_field(field: str, fields: Any) -> str:
    there = ", ".join(map(repr, fields)) or "none"
    return f"no field {field!r} (text_field); the fields are {there}"


def decode_utf8(content: bytes, path: Path, first_line: int = 1) -> str:
    """Raises ValueError with file and line (`first_line` is that of content's first) if broken."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise ValueError(f"{path}, line {line}: broken UTF-8: {error.reason}") from error
