"""Readers of every format, behind one function."""

from titan_moe.data.readers.base import Cursor, Document, Reader
from titan_moe.data.readers.resolve import open_reader

__all__ = ["Cursor", "Document", "Reader", "open_reader"]
