"""Plain text: one file is one document. The standard library of this Python is such a corpus."""

import hashlib
import logging
import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from titan_moe.data.readers.base import Cursor, Document, FilesReader, Listing, decode_utf8

logger = logging.getLogger(__name__)


class TextReader(FilesReader):
    format = "text"

    def read_file(self, path: Path, place: Cursor) -> Iterator[Document]:
        yield Document([], partial(_text, path))


def _text(path: Path) -> str:
    return decode_utf8(path.read_bytes(), path)


@cache
def python_stdlib() -> TextReader:
    """The .py files of the running Python's standard library, in the order of their names' hashes.

    Neighbours in that order are unrelated, so every n-th file is a fair sample of the whole. Files
    in another encoding than UTF-8 (the library has a few, to test itself) are left out, and links,
    which some systems set from one of its files to another.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in root.rglob("*.py") if not path.is_symlink()]
    own = [n for n in names if not {"site-packages", "dist-packages"} & set(n.parts)]
    ordered = sorted((n.as_posix() for n in own), key=lambda n: hashlib.sha256(n.encode()).digest())
    readable = [name for name in ordered if _is_utf8(root / name)]
    if not readable:
        raise ValueError(f"builtin:python-stdlib: no .py files under {root}")
    logger.info(
        "builtin:python-stdlib: %d files under %s (%d not UTF-8, left out)",
        len(readable),
        root,
        len(ordered) - len(readable),
    )
    return TextReader(Listing.of(root, readable))


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
