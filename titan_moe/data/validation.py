"""Named validation sets: whole documents, packed like training's, the same on any layout.

S seq_len, R rows, F fields of a row (packing.FIELDS).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from titan_moe.data.packing import FIELDS, IGNORED_LABEL, PackingRules, pack
from titan_moe.data.readers import Document
from titan_moe.data.tokenizer import DocumentEncoder

PADDING_DOCUMENT = -1
# Text gathered before its byte pairs are counted: a count costs a pass over all 65,536 pairs.
PAIRS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class ValidationData:
    """One set, as one data rank sees it.

    bytes: UTF-8 bytes that predicted tokens spell, on all ranks: all of its documents', but what
        their first tokens spell where these are not predicted. Without BOS that is so in every
        document, or with loss_across_documents in the set's first only.
    bigram_nats_per_byte: H(next byte | byte) of those documents, what a table of byte pairs fitted
        to this very text would reach.
    """

    name: str
    bytes: int
    bigram_nats_per_byte: float
    tokens: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    rules: PackingRules
    rows_per_batch: int
    dp_rank: int
    dp_degree: int

    @property
    def num_batches(self) -> int:
        """The same on every rank."""
        # The last token only is a label, so it needs no row to itself.
        num_rows = max(1, math.ceil((len(self.tokens) - 1) / self.rules.seq_len))
        return math.ceil(num_rows / (self.rows_per_batch * self.dp_degree))

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """This rank's batches: dicts of FIELDS, int64 [rows_per_batch, S].

        Row n of the set is on rank n mod dp_degree. Padding, whole rows of it too, has
        document_ids -1 and labels -100.
        """
        for batch in range(self.num_batches):
            first = batch * self.rows_per_batch
            rows = [
                self._row((first + i) * self.dp_degree + self.dp_rank)
                for i in range(self.rows_per_batch)
            ]
            batch_FRS = torch.from_numpy(np.stack(rows, axis=1)).to(torch.int64)
            yield dict(zip(FIELDS, batch_FRS, strict=True))

    def _row(self, number: int) -> np.ndarray:
        first, last = (n * self.rules.seq_len for n in (number, number + 1))
        window = np.zeros(self.rules.seq_len + 1, dtype=np.int32)
        there = self.tokens[first : last + 1]
        window[: len(there)] = there
        begin, end = np.searchsorted(self.starts, [first, last + 1])
        row = pack(window, (self.starts[begin:end] - first).tolist(), self.rules)
        _tokens, labels, positions, document_ids = row
        labels[max(len(there) - 1, 0) :] = IGNORED_LABEL
        positions[len(there) :] = 0
        document_ids[len(there) :] = PADDING_DOCUMENT
        return row


def pack_documents(
    name: str,
    documents: Iterable[Document],
    encode: DocumentEncoder,
    rules: PackingRules,
    *,
    max_tokens: int,
    rows_per_batch: int,
    dp_rank: int,
    dp_degree: int,
) -> ValidationData:
    """Take whole documents in order until there are `max_tokens`.

    Raises ValueError on broken data, and if there is nothing to predict.
    """
    pieces: list[np.ndarray] = []
    starts: list[int] = []
    num_tokens = num_bytes = 0
    bigrams = _BigramCounts()
    for document in documents:
        text = document.read()
        tokens = encode(text)
        content = text.encode("utf-8")
        bigrams.add(content)
        if len(tokens):
            num_bytes += len(content)
            if not (starts and rules.loss_across_documents):
                num_bytes -= encode.first_token_bytes(text)
            pieces.append(tokens)
            starts.append(num_tokens)
            num_tokens += len(tokens)
        if num_tokens >= max_tokens:
            break
    num_labels = num_tokens - len(starts[:1] if rules.loss_across_documents else starts)
    if num_labels == 0 or num_bytes == 0:
        raise ValueError(
            f"validation set {name!r}: its documents make {num_tokens} tokens, of which "
            f"{num_labels} are predicted and spell {num_bytes} bytes; there is nothing to predict"
        )
    return ValidationData(
        name=name,
        bytes=num_bytes,
        bigram_nats_per_byte=bigrams.conditional_entropy_nats(),
        tokens=np.concatenate(pieces),
        starts=np.array(starts),
        rules=rules,
        rows_per_batch=rows_per_batch,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )


class _BigramCounts:
    """Counts of neighbouring bytes within documents."""

    def __init__(self) -> None:
        self._counts = np.zeros(1 << 16, dtype=np.int64)
        self._pending: list[np.ndarray] = []
        self._num_pending = 0

    def add(self, document: bytes) -> None:
        values = np.frombuffer(document, dtype=np.uint8).astype(np.int32)
        self._pending.append(values[:-1] << 8 | values[1:])
        self._num_pending += len(values)
        if self._num_pending >= PAIRS_AT_A_TIME:
            self._count()

    def _count(self) -> None:
        if self._pending:
            self._counts += np.bincount(np.concatenate(self._pending), minlength=1 << 16)
        self._pending, self._num_pending = [], 0

    def conditional_entropy_nats(self) -> float:
        """Plug-in estimate of H(next | byte): sum over pairs of -p(a, b) ln p(b | a)."""
        self._count()
        pairs = self._counts.reshape(256, 256)
        total = pairs.sum()
        if total == 0:
            return 0.0
        first, second = np.nonzero(pairs)
        seen = pairs[first, second]
        # ln of 1/p rather than -ln p: of pairs that are certain it is 0.0, not -0.0.
        return float((seen * np.log(pairs.sum(axis=1)[first] / seen)).sum() / total)
