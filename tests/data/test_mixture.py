"""Shares of a mixture, and the streams its sequences come from."""

import pytest

from tests.data.naive import sources_of
from titan_moe.data.mixture import Mixture, _hash64, stream_of

WEIGHTS = [
    [1.0],
    [1.0, 1.0],
    [0.3, 0.7],
    [0.5, 0.2, 0.3],
    [1e-3, 1.0, 2.5],
    [0.1] * 7,
    [0.8217, 0.11, 0.045, 0.025, 0.015, 0.0013],
    [12.0, 5.5, 3.25, 3.0, 2.0, 1.0, 0.5, 0.125, 0.01],
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_stay_within_one_sequence(weights: list[float]) -> None:
    mixture = Mixture(weights)
    total = sum(weights)
    for n in range(1, 20_001):
        mixture.next()
        assert sum(mixture.counts) == n
        for count, weight in zip(mixture.counts, weights, strict=True):
            assert abs(count - n * weight / total) < 1, f"{mixture.counts} after {n}"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_is_the_published_rule(weights: list[float]) -> None:
    mixture = Mixture(weights)
    assert [mixture.next() for _ in range(400)] == sources_of([str(w) for w in weights], 400)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_goes_on_from_its_counts(weights: list[float]) -> None:
    unbroken = Mixture(weights)
    expected = [unbroken.next() for _ in range(600)]
    first = Mixture(weights)
    for n in range(300):
        resumed = Mixture(weights, n, first.counts)
        assert [resumed.next() for _ in range(300)] == expected[n : n + 300]
        first.next()


def test_only_ratios_matter() -> None:
    a, b = Mixture([0.3, 0.7]), Mixture([3.0, 7.0])
    assert [a.next() for _ in range(100)] == [b.next() for _ in range(100)]


def test_rows_of_streams_are_rotated_whole() -> None:
    for num_sources in (1, 3):
        for row in range(50):
            streams = [stream_of(row * 12 + i, 12, num_sources) for i in range(12)]
            assert streams == [(streams[0] + i) % 12 for i in range(12)]
    assert [stream_of(n, 12, 1) for n in range(24)] == [*range(12), *range(12)]
    assert len({stream_of(row * 12, 12, 3) for row in range(200)}) == 12


def test_hash_is_splitmix64() -> None:
    """The generator's published first outputs for seed 0."""
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [_hash64(i) for i in range(4)] == outputs


@pytest.mark.parametrize("num_streams", [2, 4, 10])
def test_every_stream_of_every_source_is_read_alike(num_streams: int) -> None:
    """Also where the weights' pattern repeats after as many sequences as there are streams."""
    weights = [0.5, 0.2, 0.3]
    mixture = Mixture(weights)
    seen: dict[tuple[int, int], int] = {}
    total = 4000 * num_streams
    for n in range(total):
        key = mixture.next(), stream_of(n, num_streams, len(weights))
        seen[key] = seen.get(key, 0) + 1
    for source, weight in enumerate(weights):
        for stream in range(num_streams):
            expected = weight * total / num_streams
            assert abs(seen.get((source, stream), 0) - expected) < 0.1 * expected
