"""A stream of documents cut into rows of seq_len tokens.

S seq_len; 4 the fields of FIELDS, in that order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_moe.data.documents import Position
from titan_moe.layers.head import IGNORED_LABEL

FIELDS = ("tokens", "labels", "positions", "document_ids")


@dataclass(frozen=True)
class PackingRules:
    """The keys of `[training]` that say what a row looks like."""

    seq_len: int
    document_mask: bool
    loss_across_documents: bool


def pack(window: np.ndarray, starts: list[int], rules: PackingRules) -> np.ndarray:
    """Row [4, S] int32 of a window of S + 1 tokens in which documents begin at `starts`.

    A label is the next token of the window, and ignored where that token begins another document,
    unless the loss is to cross documents. With document_mask, document_ids count from 0 within the
    row and positions restart at each document; without, the row is one document.
    """
    begins = np.zeros(rules.seq_len + 1, dtype=bool)
    begins[starts] = True
    row = np.empty((len(FIELDS), rules.seq_len), dtype=np.int32)
    tokens, labels, positions, document_ids = row
    tokens[:] = window[:-1]
    labels[:] = window[1:]
    if not rules.loss_across_documents:
        labels[begins[1:]] = IGNORED_LABEL
    positions[:] = np.arange(rules.seq_len)
    document_ids[:] = 0
    if rules.document_mask:
        begins[0] = False
        np.cumsum(begins[:-1], out=document_ids)
        positions -= np.maximum.accumulate(np.where(begins[:-1], positions, 0))
    return row


class Packer:
    """One stream of one source, row by row.

    Rows overlap in a token: a row's last label is the next row's first input, so every token of the
    stream is an input exactly once.

    next_document: the stream's next document, for ever. encode: its text to its tokens.
    skip_tokens: tokens of the first document that earlier rows have used as inputs.
    name: of the stream, for errors. patience_epochs: passes without any token before giving up.
    """

    def __init__(
        self,
        next_document: Callable[[], tuple[Position, str]],
        encode: Callable[[str], np.ndarray],
        rules: PackingRules,
        *,
        name: str,
        patience_epochs: int,
        skip_tokens: int = 0,
    ) -> None:
        self._next_document = next_document
        self._encode = encode
        self._rules = rules
        self._name = name
        self._patience_epochs = patience_epochs
        self._skip_tokens = skip_tokens
        self._position: Position | None = None
        self._tokens = np.empty(0, dtype=np.uint16)
        self._used = 0

    def row(self) -> np.ndarray:
        """The stream's next row, [4, S]. Raises ValueError on broken data."""
        window = np.empty(self._rules.seq_len + 1, dtype=np.int32)
        starts: list[int] = []
        filled = 0
        while filled < len(window):
            if self._used == len(self._tokens):
                self._open_document()
            if self._used == 0:
                starts.append(filled)
            taken = self._tokens[self._used : self._used + len(window) - filled]
            window[filled : filled + len(taken)] = taken
            filled += len(taken)
            self._used += len(taken)
        self._used -= 1
        return pack(window, starts, self._rules)

    def record(self) -> dict[str, Any]:
        """Where the next row begins; JSON-able."""
        assert self._position is not None, "no row has been taken yet"
        return {**self._position.to_json(), "tokens": self._used}

    def _open_document(self) -> None:
        """Go on to the next document that has any token."""
        first_epoch: int | None = None
        while True:
            self._position, text = self._next_document()
            self._tokens = self._encode(text)
            if len(self._tokens):
                break
            if first_epoch is None:
                first_epoch = self._position.epoch
            elif self._position.epoch - first_epoch > self._patience_epochs:
                raise ValueError(
                    f"{self._name}: only empty documents in {self._patience_epochs} passes over "
                    "the data; add text, or add_bos or add_eos"
                )
        self._used, self._skip_tokens = self._skip_tokens, 0
        if self._used >= len(self._tokens):
            raise ValueError(
                f"{self._name}: the checkpoint stands at token {self._used} of a document that "
                f"has {len(self._tokens)} tokens now; the data has changed"
            )
