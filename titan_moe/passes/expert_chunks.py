"""Keep a hot rank within its memory: many rows go through the experts in chunks, recomputed later.

R rows, r of one chunk, D hidden, F inner width, E experts.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titan_moe.config.sections import Parallelism
from titan_moe.layers.experts import Experts, ExpertsFunction

logger = logging.getLogger(__name__)


def apply_expert_chunks(model: nn.Module, section: Parallelism) -> None:
    """Above `max_expert_tokens` rows, experts compute one chunk at a time, and keep nothing of it.

    Only the rows that come in are held for backward, which computes each chunk again; where a
    pipeline's schedule takes backward in parts, in each part. Nothing is dropped, and up to that
    many rows nothing changes. A stage of a pipeline may be without experts.

    Raises:
        ValueError: a model without experts.
    """
    limit = section.max_expert_tokens
    assert limit is not None
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    if not layers and section.pipeline_parallel_degree == 1:
        raise ValueError(
            f"parallelism.max_expert_tokens = {limit}, but no layer of the model has experts"
        )
    for experts in layers:
        experts.compute = InChunks(experts.compute, limit)
    logger.info("expert chunks: %d layers, %d rows at once", len(layers), limit)


class InChunks:
    """`compute`, called in the same way, on at most `limit` rows at a time."""

    def __init__(self, compute: ExpertsFunction, limit: int) -> None:
        self.compute, self.limit = compute, limit

    def __call__(self, *given: Tensor, **settings: Any) -> Tensor:
        rows_RD = given[0]
        if len(rows_RD) <= self.limit:
            return self.compute(*given, **settings)
        result: Tensor = _Chunked.apply(self, settings, *given)
        return result

    def chunks(
        self, rows_RD: Tensor, offsets_E: Tensor, row_weights_R: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Where a chunk lies, its rows, where each expert's end, their weights.

        It has the end of one expert's rows, the whole of others', and the beginning of one.
        """
        for begin in range(0, len(rows_RD), self.limit):
            here = slice(begin, min(begin + self.limit, len(rows_RD)))
            ends_E = (offsets_E - begin).clamp(0, here.stop - begin)
            yield here, rows_RD[here], ends_E, row_weights_R[here]


class _Chunked(torch.autograd.Function):
    """One node for all chunks, so that neither graph nor results of any outlive its own turn."""

    @staticmethod
    def forward(
        ctx: Any,
        how: InChunks,
        settings: dict[str, Any],
        rows_RD: Tensor,
        offsets_E: Tensor,
        row_weights_R: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.how, ctx.settings = how, settings
        ctx.save_for_backward(rows_RD, offsets_E, row_weights_R, *weights)
        out_RD = rows_RD.new_empty(rows_RD.shape, dtype=torch.float32)
        for here, *chunk in how.chunks(rows_RD, offsets_E, row_weights_R):
            out_RD[here] = how.compute(*chunk, *weights, **settings)
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        rows_RD, offsets_E, row_weights_R, *weights = ctx.saved_tensors
        leaves = [weight.detach().requires_grad_() for weight in weights]
        grad_rows_RD, grad_row_weights_R = (
            torch.empty_like(rows_RD),
            torch.empty_like(row_weights_R),
        )
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for here, rows_rD, ends_E, weights_r in ctx.how.chunks(rows_RD, offsets_E, row_weights_R):
            x_rD, w_r = rows_rD.detach().requires_grad_(), weights_r.detach().requires_grad_()
            with torch.enable_grad():
                out_rD = ctx.how.compute(x_rD, ends_E, w_r, *leaves, **ctx.settings)
            gradients = torch.autograd.grad(out_rD, (x_rD, w_r, *leaves), grad_RD[here])
            grad_rows_RD[here], grad_row_weights_R[here] = gradients[:2]
            for total, gradient in zip(sums, gradients[2:], strict=True):
                total += gradient
        of_weights = [total.to(w.dtype) for total, w in zip(sums, weights, strict=True)]
        return None, None, grad_rows_RD, None, grad_row_weights_R, *of_weights
