"""Without a pipeline: one part, the whole model, one pass forward and one back."""

from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


class WholeModel:
    """An engine's `Runner` on the rank's only part."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        loss = self._nats(batch) * scale
        torch.autograd.backward(loss)
        return loss.detach().double()

    def evaluate(self, batch: Batch, rows: int) -> Tensor:
        nats = torch.zeros((), dtype=torch.float64, device=batch["tokens"].device)
        for begin in range(0, len(batch["tokens"]), rows):
            nats += self._nats({key: value[begin : begin + rows] for key, value in batch.items()})
        return nats

    def _nats(self, batch: Batch) -> Tensor:
        """Cross-entropy summed over the batch's labels."""
        hidden_BSD = self._model(batch["tokens"], **keywords_of(batch))
        nats: Tensor = self._model.head.loss(hidden_BSD, batch["labels"])
        return nats


def keywords_of(batch: Batch) -> dict[str, Tensor]:
    """What every part of a model is told besides its input."""
    keywords = {
        "positions_BS": batch["positions"],
        "document_ids_BS": batch["document_ids"],
        "tokens_BS": batch["tokens"],
    }
    if "next_tokens" in batch:  # a step of a model that predicts further ahead
        keywords["next_tokens_BSM"] = batch["next_tokens"]
    return keywords
