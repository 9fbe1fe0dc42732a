"""Parquet files and Arrow files as `datasets` writes them: one document per row."""

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from titan_moe.data.readers.base import (
    Cursor,
    Document,
    FilesReader,
    Listing,
    checked_text,
    no_such_field,
)

# Rows decoded at a time: few, since documents may be large.
BATCH_ROWS = 64
READ_BUFFER_BYTES = 1 << 20


class ColumnsReader(FilesReader):
    """Place in a file: [row, from 0]."""

    def __init__(self, listing: Listing, text_field: str) -> None:
        super().__init__(listing)
        self._text_field = text_field

    @abstractmethod
    def columns(self, path: Path, first_row: int) -> Iterator[tuple[int, pa.Array]]:
        """(first row, values) of consecutive pieces of the text column; those that end before
        `first_row` are left out as far as that saves work."""

    def read_file(self, path: Path, place: Cursor) -> Iterator[Document]:
        [first_row] = place or [0]
        try:
            for start, values in self.columns(path, first_row):
                for i in range(max(first_row - start, 0), len(values)):
                    read = partial(self._text, values, i, f"{path}, row {start + i + 1}")
                    yield Document([start + i], read)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: cannot be read as {self.format}: {error}") from error

    def check_schema(self, path: Path, schema: pa.Schema) -> None:
        if self._text_field not in schema.names:
            raise ValueError(f"{path}: {no_such_field(self._text_field, schema.names)}")
        kind = schema.field(self._text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(f"{path}: field {self._text_field!r} is {kind}, not a string")

    def _text(self, values: pa.Array, index: int, where: str) -> str:
        try:
            text = values[index].as_py()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: broken UTF-8: {error.reason}") from error
        return checked_text(text, self._text_field, where)


class ParquetReader(ColumnsReader):
    format = "parquet"

    def columns(self, path: Path, first_row: int) -> Iterator[tuple[int, pa.Array]]:
        with pq.ParquetFile(path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False) as file:
            self.check_schema(path, file.schema_arrow)
            start = 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if start + num_rows <= first_row:
                    start += num_rows
                    continue
                for batch in file.iter_batches(
                    BATCH_ROWS, [group], columns=[self._text_field], use_threads=False
                ):
                    yield start, batch.column(0)
                    start += len(batch)


class ArrowReader(ColumnsReader):
    """IPC streams (what `datasets` caches) and IPC files, memory-mapped."""

    format = "arrow"

    def columns(self, path: Path, first_row: int) -> Iterator[tuple[int, pa.Array]]:
        with pa.memory_map(str(path)) as source:
            start = 0
            for batch in self._batches(path, source):
                if start + len(batch) > first_row:
                    yield start, batch.column(self._text_field)
                start += len(batch)

    def _batches(self, path: Path, source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            with pa.ipc.open_file(source) as file:
                self.check_schema(path, file.schema)
                for number in range(file.num_record_batches):
                    yield file.get_batch(number)
            return
        with pa.ipc.open_stream(source) as stream:
            self.check_schema(path, stream.schema)
            yield from stream
