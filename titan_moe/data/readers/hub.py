"""Data sets of the Hugging Face hub, streamed; also those laid out like it in a local folder."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from titan_moe.data.readers.base import (
    Cursor,
    Document,
    Listing,
    Reader,
    checked_text,
    files_below,
    no_such_field,
    resolved,
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
        folder = Path(path)
        self._path = str(folder) if folder.is_dir() else path
        self._files: Listing | None = None
        if folder.is_dir():
            files = files_below(folder, (".",), follow=False)
            names = sorted(file.relative_to(folder).as_posix() for file in files)
            self._files = Listing.of(folder, names)
        self._subset = subset
        self._split = split
        self._text_field = text_field

    def documents(self, cursor: Cursor | None) -> Iterator[Document]:
        from datasets import load_dataset  # takes seconds to import, and only a hub source needs it

        dataset = self._call(load_dataset, split=self._split, streaming=True)
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

    def _call(self, load: Callable[..., Any], **keys: Any) -> Any:
        try:
            return load(self._path, name=self._subset, **keys)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"{self._path} (subset {self._subset}, split {self._split}): {error}"
            ) from error

    def bytes_before(self, cursor: Cursor) -> int:
        return 0

    def fingerprint(self) -> dict[str, Any]:
        return self._files.fingerprint() if self._files else {"hub": self._path}

    def origins(self) -> list[str]:
        """Files of the splits; of a data set that is not local, its splits themselves."""
        splits = _names_of_splits(self._split, self._path)
        if self._files is None:
            subset = self._subset or "default"
            return [f"{self._path.lower()} ({subset}, {split})" for split in splits]
        from datasets import load_dataset_builder

        files = self._call(load_dataset_builder).config.data_files
        return resolved(Path(file) for split in splits for file in files.get(split, ()))


def _names_of_splits(expression: str, path: str) -> list[str]:
    """Splits that 'a+b[:50%]' reads; a slice of one stands for all of it.

    Raises ValueError for 'all', which names none.
    """
    names = [part.split("[")[0].strip() for part in expression.split("+")]
    if "all" in names:
        raise ValueError(
            f"{path}: split {expression!r} does not say which; name the splits, joined by '+'"
        )
    return names
