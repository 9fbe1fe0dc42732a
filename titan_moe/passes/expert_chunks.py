"""Keep a hot rank within its memory: many rows go through the experts in chunks, recomputed later.

R rows, D hidden, E experts.
"""

import logging

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titan_moe.config.sections import Parallelism
from titan_moe.layers.experts import Experts

logger = logging.getLogger(__name__)


def apply_expert_chunks(model: nn.Module, section: Parallelism) -> None:
    """Above `max_expert_tokens` rows, experts keep what they computed of one chunk at a time.

    What an expert computes grows with the chunk then, and only the rows that come in with R.
    Nothing is dropped, and up to that many rows nothing changes. A stage of a pipeline may be
    without experts.

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
        _compute_in_chunks(experts, limit)
    logger.info("expert chunks: %d layers, %d rows at once", len(layers), limit)


def _compute_in_chunks(experts: Experts, limit: int) -> None:
    forward = experts.forward

    def in_chunks(rows_RD: Tensor, offsets_E: Tensor, row_weights_R: Tensor) -> Tensor:
        if len(rows_RD) <= limit:
            return forward(rows_RD, offsets_E, row_weights_R)
        outputs = []
        chunks = zip(rows_RD.split(limit), row_weights_R.split(limit), strict=True)
        for chunk, (rows_rD, weights_r) in enumerate(chunks):
            # A chunk has the end of one expert's rows, the whole of others', the beginning of one.
            ends_E = (offsets_E - chunk * limit).clamp(0, len(rows_rD))
            outputs.append(
                checkpoint(
                    forward,
                    rows_rD,
                    ends_E,
                    weights_r,
                    use_reentrant=False,
                    preserve_rng_state=False,  # nothing in it is random
                )
            )
        return torch.cat(outputs)

    experts.forward = in_chunks  # type: ignore[method-assign]
