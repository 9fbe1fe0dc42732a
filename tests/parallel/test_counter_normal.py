"""The generator: against Python's integers, Python's inverse CDF, and the normal distribution."""

import math
from statistics import NormalDist

import pytest
import torch

from titan_moe.parallel.counter_normal import (
    TRUNCATION_SIGMAS,
    Stream,
    inverse_normal_cdf,
    natural_log,
)

WORD = (1 << 64) - 1
MILLION = torch.arange(1_000_000)


def uniform_by_hand(stream: Stream, index: int) -> float:
    """SplitMix64 in Python's unbounded integers."""
    z = (stream.start + index * stream.step) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    z ^= z >> 31
    return ((z >> 12) + 0.5) * 2.0**-52


def test_uniform_is_splitmix_in_wrapping_int64() -> None:
    stream = Stream.of(3, "layers.0.weight")
    indices = [0, 1, 2, 12345, (1 << 40) + 7, (1 << 62) + 3]
    expected = [uniform_by_hand(stream, index) for index in indices]
    assert stream.uniform(torch.tensor(indices)).tolist() == expected


def test_inverse_cdf_is_pythons() -> None:
    q = torch.linspace(-0.4986, 0.0, 20_001, dtype=torch.float64)  # 0.5 + q is exact here
    expected = torch.tensor([NormalDist().inv_cdf(0.5 + x) for x in q.tolist()], dtype=q.dtype)
    assert torch.equal(inverse_normal_cdf(-q), -inverse_normal_cdf(q))
    torch.testing.assert_close(inverse_normal_cdf(q), expected, rtol=2e-15, atol=2e-15)


def test_logarithm_is_the_libraries_to_two_units_in_the_last_place() -> None:
    x = torch.logspace(-30, 30, 40_001, base=2.0, dtype=torch.float64)
    expected = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(natural_log(x), expected, rtol=5e-16, atol=0.0)


def test_the_bits_do_not_depend_on_the_slice() -> None:
    """By offset and length, an element is in a vectorised loop's body here and its tail there."""
    stream = Stream.of(0, "x")
    whole = stream.normal(MILLION[:10_007])
    for begin, end in ((0, 1), (1, 8), (3, 1000), (997, 10_007), (10_006, 10_007)):
        assert torch.equal(stream.normal(MILLION[begin:end]), whole[begin:end])
    one_by_one = torch.cat([stream.normal(index.reshape(1)) for index in MILLION[:300]])
    assert torch.equal(one_by_one, whole[:300])


def test_the_distribution_is_a_truncated_normal() -> None:
    values = Stream.of(0, "x").normal(MILLION)
    # Standard errors of a million draws: 0.001 for the mean and 0.0007 for the deviation.
    mass = 1.0 - 2.0 * NormalDist().cdf(-TRUNCATION_SIGMAS)
    variance = 1.0 - 2.0 * TRUNCATION_SIGMAS * NormalDist().pdf(TRUNCATION_SIGMAS) / mass
    assert abs(float(values.mean())) < 4e-3
    assert abs(float(values.std()) - math.sqrt(variance)) < 3e-3
    assert float(values.abs().max()) < TRUNCATION_SIGMAS
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
    normal_cdf = 0.5 * (1.0 + torch.erf(values.sort().values / math.sqrt(2.0)))
    cdf = (normal_cdf - NormalDist().cdf(-TRUNCATION_SIGMAS)) / mass
    steps = (torch.arange(len(values)).double() + 0.5) / len(values)
    assert float((cdf - steps).abs().max()) < 1.95e-3


@pytest.mark.parametrize("lag", [1, 2, 128, 4096])
def test_neighbours_and_names_are_independent(lag: int) -> None:
    a, b, c = (
        Stream.of(seed, name).normal(MILLION[:200_000])
        for seed, name in ((0, "experts.w1"), (0, "experts.w2"), (1, "experts.w1"))
    )
    for x, y in ((a[:-lag], a[lag:]), (a[:-lag], b[lag:]), (a, b), (a, c)):
        # The correlation of independent draws has a standard error of 1 / sqrt(n) = 0.0022.
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 0.01
