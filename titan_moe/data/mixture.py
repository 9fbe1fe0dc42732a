"""Which source and which stream global sequence n comes from: pure functions of the recipe and n.

Notation: k sources of weights w_i (summing to 1), of which v_i sequences have been taken after n.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import lcm

_MASK64 = (1 << 64) - 1


class Mixture:
    """The sources of sequences `sequence`, `sequence + 1`, ...

    Shares stay as close to the weights as is possible at all: |v_i - w_i n| <= 1 - 1/(2k - 2) at
    every n, so never a whole sequence off (R. Tijdeman, "The chairman assignment problem", Discrete
    Mathematics 32, 1980). A source's next turn opens when it is 1/(2k - 2) behind its share and is
    due when it would otherwise fall behind by more than the bound; of the open turns the one due
    first is taken, ties by index. All in integers, so every machine computes the same.

    counts: v_i at `sequence`; together they are the whole state. None: at sequence 0.
    """

    def __init__(
        self, weights: Sequence[float], sequence: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        # A weight is the decimal that a person wrote: 0.3 is 3/10, not the nearest binary fraction.
        fractions = [Fraction(repr(weight)) for weight in weights]
        scale = lcm(*(f.denominator for f in fractions))
        self._shares = [int(f * scale) for f in fractions]
        self._total = sum(self._shares)
        self._grain = max(2 * len(weights) - 2, 1)
        self.sequence = sequence
        self.counts = list(counts) if counts is not None else [0] * len(weights)
        assert sum(self.counts) == sequence, f"{self.counts} do not make {sequence} sequences"
        self._waiting = [(self._opens(i), i) for i in range(len(weights))]
        self._open: list[tuple[int, int]] = []
        heapify(self._waiting)

    def _opens(self, source: int) -> int:
        """First n + 1 at which the source's next turn may be taken."""
        numerator = (self.counts[source] * self._grain + 1) * self._total
        return -(-numerator // (self._grain * self._shares[source]))

    def _due(self, source: int) -> int:
        """Last n + 1 at which the source may take its next turn without falling too far behind."""
        numerator = ((self.counts[source] + 1) * self._grain - 1) * self._total
        return numerator // (self._grain * self._shares[source]) + 1

    def next(self) -> int:
        """Index of the source of the next sequence."""
        self.sequence += 1
        if len(self.counts) == 1:
            self.counts[0] += 1
            return 0
        while self._waiting and self._waiting[0][0] <= self.sequence:
            _, source = heappop(self._waiting)
            heappush(self._open, (self._due(source), source))
        due, source = heappop(self._open)
        assert due >= self.sequence, "earliest deadline first always meets feasible deadlines"
        self.counts[source] += 1
        heappush(self._waiting, (self._opens(source), source))
        return source


def stream_of(sequence: int, num_streams: int, num_sources: int) -> int:
    """Stream of global sequence n: n mod N, and in a mixture each row of N is rotated by a hash.

    Without the rotation a mixture whose pattern repeats after N sequences would read a few streams
    of a source and never the others. Rows stay whole and consecutive, so every rank gets its share.
    """
    row, place = divmod(sequence, num_streams)
    offset = _hash64(row) if num_sources > 1 else 0
    return (place + offset) % num_streams


def _hash64(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (value + 1) * 0x9E3779B97F4A7C15 & _MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
    return z ^ z >> 31
