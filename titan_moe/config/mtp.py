"""Multi-token prediction, for the families whose models have layers of it."""

from pydantic import Field, NonNegativeInt, PositiveFloat

from titan_moe.config.model import ModelConfig


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
        0.3, description="factor on the mean of their losses, added to the loss"
    )

    def mtp_depth(self) -> int:
        return self.num_mtp_layers

    def mtp_weight(self) -> float:
        return self.mtp_loss_weight
