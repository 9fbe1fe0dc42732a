"""Numbers of quantised tensors: DeepSeek's FP8 in blocks, and MXFP4, as gpt-oss is published.

R rows, C columns of the slice asked for; G groups of 32 entries; N = 16, bytes of a group.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Range = tuple[int, int]  # first, and one past the last
Read = Callable[[list[Range]], Tensor]
"""Of a stored tensor, what lies in those ranges, one for each dimension."""

BLOCK = (128, 128)  # rows and columns that share a scale, where config.json does not say
GROUP = 32  # entries that share a scale in MXFP4 (OCP Microscaling Formats, 1.0)
SCALE_BIAS = 127  # of an exponent in E8M0
# E2M1's sixteen values: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def from_fp8(
    ranges: list[Range], read_data: Read, read_scales: Read, block: tuple[int, int]
) -> Tensor:
    """fp32 [R, C] of a matrix with one scale for each block; those at the edges may be ragged."""
    whole = [(begin // n, -(-end // n)) for (begin, end), n in zip(ranges, block, strict=True)]
    scales_RC = read_scales(whole).float()
    for dim, ((begin, end), n) in enumerate(zip(ranges, block, strict=True)):
        index = torch.arange(begin, end) // n - begin // n
        scales_RC = scales_RC.index_select(dim, index)
    return read_data(ranges).float() * scales_RC


def from_mxfp4(ranges: list[Range], read_data: Read, read_scales: Read) -> Tensor:
    """fp32 [..., C, R]: stored as [..., R, G, N], two entries a byte, the lower half first."""
    *lead, (begin, end), rows = ranges
    groups = (begin // GROUP, -(-end // GROUP))
    bytes_RGN = read_data([*lead, rows, groups, (0, GROUP // 2)])
    exponents_RG = read_scales([*lead, rows, groups]).int() - SCALE_BIAS
    codes_RGNn = torch.stack([bytes_RGN & 15, bytes_RGN >> 4], dim=-1)
    values_RGn = torch.tensor(E2M1)[codes_RGNn.int()].flatten(-2)
    values_RC = torch.ldexp(values_RGn, exponents_RG.unsqueeze(-1)).flatten(-2)
    first = begin - groups[0] * GROUP
    return values_RC[..., first : first + end - begin].transpose(-1, -2)
