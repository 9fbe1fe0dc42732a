"""Normally distributed numbers that are a function of (seed, name, index): the same bits anywhere.

Each element of a tensor is computed from its own index alone, so that a rank computes just the
slice it holds. Bits agree between devices, and between any two slices of one tensor, because only
integer operations and the correctly rounded + - × ÷ sqrt are used, one torch op each (no
fused multiply-add). torch's own log, cos and erfinv will not do: no standard says how they round,
and a CPU loop's vectorised body, its scalar tail and a GPU may each do it their way. Divisions are
never by a Python number, which CUDA turns into a multiplication by its rounded reciprocal.
"""

import hashlib
import struct
from dataclasses import dataclass
from math import log, sqrt
from statistics import NormalDist

import torch
from torch import Tensor

# Values lie within this many standard deviations, as an outlier among billions of weights helps no
# one. 0.27% of the normal distribution lies beyond; cutting it off leaves 0.987 of its deviation.
TRUNCATION_SIGMAS = 3.0

# AS 241, PPND16 (M. J. Wichura, Applied Statistics 37, 1988): relative error about 1e-16.
# Numerator and denominator, lowest power first: around the median (in 0.425² - q²) ...
_MIDDLE = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
# ... and in the tails (in sqrt(-log p) - 1.6). The far tails, p < exp(-25), are cut off above.
_TAIL = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
# log((1 + s) / (1 - s)) = 2s (1 + s²/3 + s⁴/5 + ...); for |s| < 0.172 the next term is below 1e-17.
_ATANH = tuple(2.0 / (2 * k + 1) for k in range(11))


@dataclass(frozen=True)
class Stream:
    """One name's random numbers: where its counter starts, and the odd step by which it counts.

    A step of its own (as in SplitMix, Steele et al., OOPSLA 2014) keeps two names from ever running
    through the same sequence at an offset.
    """

    start: int
    step: int

    @classmethod
    def of(cls, seed: int, name: str) -> "Stream":
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
        start, step = struct.unpack("<qq", digest)
        return cls(start, step | 1)

    def uniform(self, index_N: Tensor) -> Tensor:
        """int64 indices -> fp64 in (0, 1): odd multiples of 2^-53, symmetric about a half."""
        mixed_N = _mix(index_N * self.step + self.start)
        return (2 * _shift_right(mixed_N, 12) + 1).double() * 2.0**-53

    def normal(self, index_N: Tensor) -> Tensor:
        """int64 indices -> fp64, standard normal cut off at ±TRUNCATION_SIGMAS.

        Without rejection: the uniform is mapped into the probabilities that are kept.
        """
        kept = 1.0 - 2.0 * NormalDist().cdf(-TRUNCATION_SIGMAS)
        return inverse_normal_cdf((self.uniform(index_N) - 0.5) * kept)


def inverse_normal_cdf(q_N: Tensor) -> Tensor:
    """The z with P(Z < z) = 0.5 + q, for fp64 |q| < 0.5 - exp(-25)."""
    near_N = 0.180625 - q_N * q_N
    middle_N = q_N * (_polynomial(near_N, _MIDDLE[0]) / _polynomial(near_N, _MIDDLE[1]))
    far_N = torch.sqrt(-natural_log(0.5 - q_N.abs())) - 1.6
    tail_N = _polynomial(far_N, _TAIL[0]) / _polynomial(far_N, _TAIL[1])
    return torch.where(q_N.abs() <= 0.425, middle_N, torch.where(q_N < 0.0, -tail_N, tail_N))


def natural_log(x_N: Tensor) -> Tensor:
    """log of positive fp64 to within 2 units in the last place, the same on every device."""
    mantissa_N, exponent_N = torch.frexp(x_N)
    small_N = mantissa_N < sqrt(0.5)
    mantissa_N = torch.where(small_N, 2.0 * mantissa_N, mantissa_N)
    exponent_N = exponent_N.double() - small_N.double()
    s_N = (mantissa_N - 1.0) / (mantissa_N + 1.0)
    return s_N * _polynomial(s_N * s_N, _ATANH) + exponent_N * log(2.0)


def _polynomial(x_N: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value_N = torch.full_like(x_N, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value_N = value_N * x_N + coefficient
    return value_N


def _mix(z_N: Tensor) -> Tensor:
    """SplitMix64's finaliser: each bit in moves each bit out. int64 products wrap, as wanted."""
    z_N = (z_N ^ _shift_right(z_N, 30)) * _signed(0xBF58476D1CE4E5B9)
    z_N = (z_N ^ _shift_right(z_N, 27)) * _signed(0x94D049BB133111EB)
    return z_N ^ _shift_right(z_N, 31)


def _shift_right(z_N: Tensor, bits: int) -> Tensor:
    """Shift in zeros, where torch's >> repeats the sign."""
    return (z_N >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
