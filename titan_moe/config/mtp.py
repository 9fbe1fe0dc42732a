"""Multi-token prediction, for the families whose models have layers of it."""

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from titan_moe.config.model import ModelConfig

LOSS_WEIGHT = 0.3  # what DeepSeek-V3 was trained with for most of its tokens


class MultiTokenPrediction(ModelConfig):
    """Layers that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Layer k of M sees the k tokens after each position, and predicts the one after those. They come
    after the blocks, numbered on, and have experts. A list of one number per MoE layer has theirs
    last.
    """

    num_mtp_layers: NonNegativeInt = Field(
        0, description="layers that predict tokens further ahead, while training"
    )
    mtp_loss_weight: PositiveFloat = Field(
        LOSS_WEIGHT, description="factor on the mean of their losses, added to the loss"
    )

    @model_validator(mode="after")
    def _weight_is_heeded(self) -> Self:
        if self.num_mtp_layers == 0 and self.mtp_loss_weight != LOSS_WEIGHT:
            raise ValueError(
                f"mtp_loss_weight = {self.mtp_loss_weight} weighs nothing, as num_mtp_layers is 0: "
                "leave it out, or give num_mtp_layers"
            )
        return self

    def mtp_depth(self) -> int:
        return self.num_mtp_layers

    def mtp_weight(self) -> float:
        return self.mtp_loss_weight
