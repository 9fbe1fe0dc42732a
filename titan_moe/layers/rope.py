"""Rotary positions (arXiv 2104.09864), plain or stretched by YaRN (arXiv 2309.00071).

Frequency f turns a pair of a head's dimensions: 2f and 2f + 1 ("interleaved", as in the weights
that DeepSeek publishes), or f and f + D/2 ("halves", as in most others). A family has the layout
that its weights were published in, so that nothing is permuted when they come in or go out.

Nothing is stored: angles follow from the positions, once per model forward, in fp32. So casting a
model cannot touch them, and a pipeline stage needs no table.

B batch, S sequence, H heads, D rotary width of a head, F = D/2 frequencies.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_moe.config.model import RopeScaling

RopeLayout = Literal["interleaved", "halves"]


@dataclass(frozen=True)
class Rotation:
    """One angle per position and frequency. cos and sin are fp32.

    A dataclass on purpose: wrappers that cast a layer's tensor arguments do not see inside it.
    """

    cos_BSF: Tensor
    sin_BSF: Tensor
    layout: RopeLayout = "interleaved"

    def __call__(self, x_BSHD: Tensor) -> Tensor:
        """Turn each pair of dimensions by its angle; in fp32, returned in x's dtype.

        Dimensions beyond the rotary width stay as they are.
        """
        width = 2 * self.cos_BSF.shape[-1]
        if x_BSHD.shape[-1] > width:
            rotary, rest = x_BSHD[..., :width], x_BSHD[..., width:]
            return torch.cat([self(rotary), rest], dim=-1)
        pair = -1 if self.layout == "interleaved" else -2
        sizes = (-1, 2) if self.layout == "interleaved" else (2, -1)
        first, second = x_BSHD.float().unflatten(-1, sizes).unbind(pair)
        cos, sin = self.cos_BSF.unsqueeze(2), self.sin_BSF.unsqueeze(2)
        turned = (first * cos - second * sin, first * sin + second * cos)
        return torch.stack(turned, dim=pair).flatten(-2).to(x_BSHD.dtype)


@dataclass(frozen=True)
class Rope:
    """Rotary positions of one model.

    dim: rotary width of a head, even. theta: base of the frequencies.
    max_seq_len: first position that is refused.
    """

    dim: int
    theta: float
    max_seq_len: int
    scaling: RopeScaling | None = None
    layout: RopeLayout = "interleaved"

    def __call__(self, positions_BS: Tensor) -> Rotation:
        """Angles at the given positions.

        Raises ValueError where a sequence is longer than max_seq_len, and RuntimeError where a
        position lies beyond it (on CUDA asynchronously: the values are never read back).
        """
        if positions_BS.shape[1] > self.max_seq_len:
            raise ValueError(
                f"a sequence of {positions_BS.shape[1]} tokens is longer than model.max_seq_len = "
                f"{self.max_seq_len}: shorten training.seq_len, or raise model.max_seq_len"
            )
        torch._assert_async(
            (positions_BS < self.max_seq_len).all(),
            f"a position lies beyond model.max_seq_len = {self.max_seq_len}",
        )
        angles_BSF = positions_BS.float().unsqueeze(-1) * self.frequencies(positions_BS.device)
        magnitude = self.magnitude()
        return Rotation(angles_BSF.cos() * magnitude, angles_BSF.sin() * magnitude, self.layout)

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per position, fp32 [F]. YaRN: arXiv 2309.00071, section 3.2.

        Frequencies that turn more than beta_fast times within the original length stay; those
        that turn less than beta_slow times are divided by the factor; a linear ramp over the
        frequency's index joins them, between whole indices where the scaling says truncate.
        """
        index_F = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        frequency_F = 1.0 / self.theta ** (index_F / self.dim)
        if self.scaling is None:
            return frequency_F
        low = self._index_that_turns(self.scaling.beta_fast)
        high = self._index_that_turns(self.scaling.beta_slow)
        if self.scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        # Where both ends are one index the ramp is a step, not a division by zero.
        stretched_F = ((index_F / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequency_F * (1 - stretched_F + stretched_F / self.scaling.factor)

    def _index_that_turns(self, rotations: float) -> float:
        """Fractional index of the frequency that turns so many times in the original length."""
        assert self.scaling is not None
        positions_per_radian = self.scaling.original_max_seq_len / (rotations * 2 * math.pi)
        return self.dim * math.log(positions_per_radian) / (2 * math.log(self.theta))

    def magnitude(self) -> float:
        """Factor on cos and sin: mscale over mscale_all_dim, or YaRN's own where one is 0."""
        if self.scaling is None:
            return 1.0
        factor, mscale = self.scaling.factor, self.scaling.mscale
        if mscale and self.scaling.mscale_all_dim:
            return temperature(factor, mscale) / temperature(factor, self.scaling.mscale_all_dim)
        return temperature(factor, 1.0)

    def attention_scale(self, qk_head_dim: int) -> float:
        """Factor on q·k: 1/sqrt(qk_head_dim), times the squared temperature over all dimensions."""
        scale = qk_head_dim**-0.5
        if self.scaling is None or not self.scaling.mscale_all_dim:
            return scale
        return scale * temperature(self.scaling.factor, self.scaling.mscale_all_dim) ** 2


def temperature(factor: float, mscale: float) -> float:
    """How much longer contexts sharpen attention: `0.1 * mscale * ln(factor) + 1` (section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0
