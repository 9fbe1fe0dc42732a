"""Data sets of the Hugging Face hub, streamed; also those laid out like it in a local folder."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from titan_moe.data.readers.base import (
    Cursor,
    Document,
    Listing,
    Reader,
    checked_text,
    no_such_field,
)

# Rows between two snapshots of the library's own position; fewer than that are read again.
SNAPSHOT_ROWS = 64


def is_hub_folder(folder: Path) -> bool:
    """Whether a local folder is laid out like a repository of the hub: a card with configurations,
    or data/<split>-*.parquet."""
    card = folder / "README.md"
    if card.is_file():
        head = card.read_text(encoding="utf-8", errors="replace")
        if head.startswith("---") and "\nconfigs:" in head.split("\n---", 1)[0]:
            return True
    return any((folder / "data").glob("*-*.parquet"))


class HubReader(Reader):
    """Cursor: [position of `datasets` (its state_dict) at some earlier row, that row, the row].

    `datasets` says where a stream stands as a dict; taking it at every row would cost more than
    reading the row.
    """

    format = "hub"
    size_bytes = 0

    def __init__(self, path: str, subset: str | None, split: str, text_field: str) -> None:
        self._path = path
        self._subset = subset
        self._split = split
        self._text_field = text_field

    def documents(self, cursor: Cursor | None) -> Iterator[Document]:
        dataset = self._open()
        snapshot, snapshot_row, first_row = cursor or (None, 0, 0)
        if snapshot is not None:
            dataset.load_state_dict(snapshot)
        # By batches, since row by row `datasets` would leave out the shards that it takes to be
        # other loader processes'. Here streams are dealt to processes, not shards.
        for rows in dataset.iter(SNAPSHOT_ROWS):
            if self._text_field not in rows:
                raise ValueError(f"{self._where()}: {no_such_field(self._text_field, rows)}")
            texts = rows[self._text_field]
            for i in range(max(first_row - snapshot_row, 0), len(texts)):
                number = snapshot_row + i
                read = partial(self._text, texts[i], number)
                yield Document([snapshot, snapshot_row, number], read)
            snapshot, snapshot_row = dataset.state_dict(), snapshot_row + len(texts)

    def _text(self, text: Any, number: int) -> str:
        return checked_text(text, self._text_field, f"{self._where()}, row {number + 1}")

    def _where(self) -> str:
        return f"{self._path} ({self._split})"

    def _open(self) -> Any:
        from datasets import load_dataset  # takes seconds to import, and only a hub source needs it

        folder = Path(self._path).expanduser()
        path = str(folder) if folder.is_dir() else self._path
        try:
            return load_dataset(path, name=self._subset, split=self._split, streaming=True)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"{self._path} (subset {self._subset}, split {self._split}): {error}"
            ) from error

    def bytes_before(self, cursor: Cursor) -> int:
        return 0

    def fingerprint(self) -> dict[str, Any]:
        folder = Path(self._path).expanduser()
        if folder.is_dir():
            names = sorted(
                p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
            )
            return Listing.of(folder, names).fingerprint()
        return {"hub": self._path}
