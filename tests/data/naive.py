"""The data contract written down the slow way: lists of documents to lists of rows, token by token.

Nothing here is shared with titan_moe.data but the hash that rotates a mixture's rows of streams.
"""

from dataclasses import dataclass
from fractions import Fraction

from titan_moe.data.mixture import stream_of

BOS, EOS = 256, 257


@dataclass
class Corpus:
    documents: list[str]
    weight: str = "1"
    holdout_every: int = 0

    def training_documents(self) -> list[str]:
        n = self.holdout_every
        return [d for i, d in enumerate(self.documents) if not n or i % n != n - 1]


@dataclass
class Settings:
    num_streams: int
    seq_len: int
    add_bos: bool = True
    add_eos: bool = True
    document_mask: bool = True
    loss_across_documents: bool = False


class Stream:
    """Documents s, s + N, s + 2N, ... of the endlessly repeated corpus, as (token, document)."""

    def __init__(self, documents: list[str], stream: int, settings: Settings) -> None:
        self.documents = documents
        self.next_document = stream
        self.settings = settings
        self.tokens: list[tuple[int, int]] = []
        self.rows_taken = 0

    def token(self, i: int) -> tuple[int, int]:
        while len(self.tokens) <= i:
            text = self.documents[self.next_document % len(self.documents)]
            ids = list(text.encode())
            if self.settings.add_bos:
                ids = [BOS, *ids]
            if self.settings.add_eos:
                ids = [*ids, EOS]
            self.tokens += [(token, self.next_document) for token in ids]
            self.next_document += self.settings.num_streams
        return self.tokens[i]

    def row(self) -> dict[str, list[int]]:
        first = self.rows_taken * self.settings.seq_len
        self.rows_taken += 1
        return row_of(
            [self.token(first + i) for i in range(self.settings.seq_len + 1)], self.settings
        )


def row_of(window: list[tuple[int, int]], settings: Settings) -> dict[str, list[int]]:
    row: dict[str, list[int]] = {"tokens": [], "labels": [], "positions": [], "document_ids": []}
    position = document_id = 0
    for i, (token, document) in enumerate(window[:-1]):
        if i and settings.document_mask and document != window[i - 1][1]:
            position, document_id = 0, document_id + 1
        label, label_document = window[i + 1]
        crosses = label_document != document and not settings.loss_across_documents
        row["tokens"].append(token)
        row["labels"].append(-100 if crosses else label)
        row["positions"].append(position)
        row["document_ids"].append(document_id)
        position += 1
    return row


def sources_of(weights: list[str], num_sequences: int) -> list[int]:
    """Among the sources whose turn is open, the one due first (Tijdeman 1980), by the formulas."""
    total = sum(map(Fraction, weights))
    w = [Fraction(weight) / total for weight in weights]
    if len(w) == 1:
        return [0] * num_sequences
    slack = Fraction(1, 2 * len(w) - 2)
    taken = [0] * len(w)
    chosen = []
    for n in range(1, num_sequences + 1):
        is_open = [i for i in range(len(w)) if w[i] * n - taken[i] >= slack]
        due = {i: (taken[i] + 1 - slack) / w[i] // 1 for i in is_open}
        best = min(is_open, key=lambda i: (due[i], i))
        taken[best] += 1
        chosen.append(best)
    return chosen


def sequences(
    corpora: list[Corpus], settings: Settings, num_sequences: int
) -> list[tuple[int, dict[str, list[int]]]]:
    """(stream, row) of global sequences 0, 1, ..."""
    N = settings.num_streams
    streams = [
        [Stream(corpus.training_documents(), s, settings) for s in range(N)] for corpus in corpora
    ]
    result = []
    for n, source in enumerate(sources_of([c.weight for c in corpora], num_sequences)):
        stream = n % N if len(corpora) == 1 else stream_of(n, N, len(corpora))
        result.append((stream, streams[source][stream].row()))
    return result
