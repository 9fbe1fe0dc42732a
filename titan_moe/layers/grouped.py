"""Matmuls of row groups with one weight each, in any dtype, and traceable in any.

R rows, D and F widths, E groups.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(rows_RD: Tensor, weights_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """out_RF: rows before offsets_E[0] times weights_EDF[0], those from there to the next ...

    offsets_E: int32, the last one R. Groups may be empty. torch refuses an expanded gradient of the
    result (`out.sum()` makes one; weighting the rows makes a whole one of it).
    """
    # torch wants rows of whole 16 bytes; zeros add nothing to a sum, and their columns are cut off.
    alignment = 16 // rows_RD.element_size()
    pad_D, pad_F = (-size % alignment for size in weights_EDF.shape[1:])
    if pad_D or pad_F:
        padded_RD = F.pad(rows_RD, (0, pad_D))
        padded_EDF = F.pad(weights_EDF, (0, pad_F, 0, pad_D))
        return grouped_mm(padded_RD, padded_EDF, offsets_E)[:, : weights_EDF.shape[2]]
    if rows_RD.dtype == torch.bfloat16:
        return F.grouped_mm(rows_RD, weights_EDF, offs=offsets_E)
    # torch computes the other dtypes too, but traces (compiler, meta device) bf16 alone.
    return _grouped_mm(rows_RD, weights_EDF, offsets_E)


@torch.library.custom_op("titan_moe::grouped_mm", mutates_args=())
def _grouped_mm(rows_RD: Tensor, weights_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    return F.grouped_mm(rows_RD, weights_EDF, offs=offsets_E)


@torch.library.custom_op("titan_moe::grouped_outer", mutates_args=())
def _grouped_outer(rows_RD: Tensor, grad_RF: Tensor, offsets_E: Tensor) -> Tensor:
    """[E, D, F]: each group's rows.T @ grad."""
    return F.grouped_mm(rows_RD.T, grad_RF, offs=offsets_E)


@_grouped_mm.register_fake
def _(rows_RD: Tensor, weights_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    return rows_RD.new_empty(rows_RD.shape[0], weights_EDF.shape[2])


@_grouped_outer.register_fake
def _(rows_RD: Tensor, grad_RF: Tensor, offsets_E: Tensor) -> Tensor:
    return rows_RD.new_empty(len(offsets_E), rows_RD.shape[1], grad_RF.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor, None]:
    rows_RD, weights_EDF, offsets_E = ctx.saved_tensors
    grad_rows_RD = _grouped_mm(grad_RF, weights_EDF.transpose(1, 2), offsets_E)
    return grad_rows_RD, _grouped_outer(rows_RD, grad_RF, offsets_E), None


_grouped_mm.register_autograd(_differentiate, setup_context=_save)
