"""JSON lines: one object per line; plain files are read from any byte on, .gz and .zst from 0."""

import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

import pyarrow as pa

from titan_moe.data.readers.base import (
    Cursor,
    Document,
    FilesReader,
    Listing,
    decode_utf8,
    text_of,
)

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
BUFFER_BYTES = 1 << 20


class JsonlReader(FilesReader):
    """Place in a file: [byte of the (decompressed) file where the line begins, lines before it]."""

    format = "jsonl"

    def __init__(self, listing: Listing, text_field: str) -> None:
        super().__init__(listing)
        self._text_field = text_field

    def read_file(self, path: Path, place: Cursor) -> Iterator[Document]:
        offset, lines_before = place or (0, 0)
        with _open_at(path, offset) as stream:
            for line in _lines(stream, path):
                lines_before += 1
                if not line.isspace():
                    read = partial(_text, line, self._text_field, path, lines_before)
                    yield Document([offset, lines_before - 1], read)
                offset += len(line)

    def bytes_before(self, cursor: Cursor) -> int:
        number, offset, _lines_before = cursor
        inside: int = min(offset, self.listing.sizes_bytes[number])  # offset: after decompression
        return super().bytes_before(cursor) + inside


def _text(line: bytes, text_field: str, path: Path, line_number: int) -> str:
    content = decode_utf8(line, path, line_number)
    where = f"{path}, line {line_number}"
    try:
        row = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: broken JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        raise ValueError(f"{where}: JSON beyond what can be read: {error}") from error
    text = text_of(row, text_field, where)
    if "\\u" in content and not _is_unicode(text):
        raise ValueError(f"{where}: field {text_field!r} holds half of a surrogate pair")
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _open_at(path: Path, offset: int) -> IO[bytes]:
    """The decompressed file from byte `offset` on."""
    codec = COMPRESSION.get(path.suffix.lower())
    if codec is None:
        plain = path.open("rb", buffering=BUFFER_BYTES)
        plain.seek(offset)
        return plain
    raw = pa.CompressedInputStream(pa.OSFile(str(path)), codec)
    stream = io.BufferedReader(raw, BUFFER_BYTES)
    while offset > 0:
        passed = len(stream.read(min(offset, BUFFER_BYTES)))
        if passed == 0:
            raise ValueError(f"{path} is shorter than when the checkpoint was written")
        offset -= passed
    return stream


def _lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """Lines with their ends. A compressed file that is cut or damaged raises ValueError."""
    if path.suffix.lower() not in COMPRESSION:
        yield from stream
        return
    while True:
        try:
            line = stream.readline()
        except OSError as error:
            raise ValueError(f"{path}: cannot be decompressed: {error}") from error
        if not line:
            return
        yield line
