"""The one vocabulary in which every recipe states its sizes. A recipe's ModelConfig extends it."""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from titan_moe.config.base import Section

PerMoELayer = NonNegativeFloat | list[NonNegativeFloat]
BalanceScope = Literal["sequence", "group", "global"]

# Keys of [model] that steer training, as a learning rate does. All others say what weights mean.
OF_TRAINING = {
    "balance_loss_weight",
    "balance_loss_scope",
    "balance_group_size",
    "z_loss_weight",
    "bias_update_rate",
    "mtp_loss_weight",
}


@dataclass(frozen=True)
class AttentionShape:
    """One block's attention, as far as its arithmetic goes.

    projection_params: weights of all its projections (each costs 2 FLOPs per token forward).
    qk_head_dim, v_head_dim: widths per head of queries and keys, and of values.
    window: keys that a query sees at most, itself among them; None: all before it.
    sinks: whether each head has a learned score that takes part in the softmax, and no value.
    """

    projection_params: int
    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Balance:
    """What keeps the experts of one MoE layer balanced; the keys of `[model]` by these names."""

    balance_loss_weight: float = 0.0
    balance_loss_scope: BalanceScope = "sequence"
    balance_group_size: int = 1
    z_loss_weight: float = 0.0
    bias_update_rate: float = 0.0


class RopeScaling(Section):
    """`[model.rope_scaling]`: stretch rotary positions beyond the length they were trained on."""

    type: Literal["yarn"] = Field(description="YaRN (arXiv 2309.00071)")
    factor: float = Field(ge=1.0, description="how many times the original length")
    original_max_seq_len: PositiveInt = Field(description="length before stretching, in tokens")
    beta_fast: PositiveFloat = Field(32.0, description="rotations above which nothing is stretched")
    beta_slow: PositiveFloat = Field(1.0, description="rotations below which all is stretched")
    truncate: bool = Field(
        True, description="the ramp between the two begins and ends at whole frequencies"
    )
    mscale: float = Field(1.0, ge=0.0, description="attention temperature, numerator")
    mscale_all_dim: float = Field(0.0, ge=0.0, description="attention temperature, denominator")

    @model_validator(mode="after")
    def _temperature_is_heeded(self) -> Self:
        if self.mscale != 1.0 and not self.mscale_all_dim:
            raise ValueError(
                f"mscale = {self.mscale} has no effect without mscale_all_dim, its denominator: "
                "give both, or leave it out"
            )
        return self


class ModelConfig(Section):
    """`[model]`: sizes have no defaults, so that the TOML states the whole model."""

    recipe: str = Field(description="dotted name of the recipe package, e.g. recipes.deepseek_v3")
    vocab_size: PositiveInt = Field(description="rows of the embedding, padding included")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_layers: PositiveInt = Field(description="transformer blocks, leading dense ones included")
    num_dense_layers: int = Field(0, ge=0, description="leading blocks without experts")
    num_heads: PositiveInt = Field(description="attention heads")
    intermediate_size: int = Field(
        0, ge=0, description="inner width of a dense block's MLP; 0 where no block is dense"
    )
    moe_intermediate_size: PositiveInt = Field(description="inner width of one expert")
    num_experts: PositiveInt = Field(description="routed experts per MoE layer")
    top_k: PositiveInt = Field(description="routed experts that each token visits")
    num_shared_experts: int = Field(0, ge=0, description="experts that every token visits")
    max_seq_len: PositiveInt = Field(description="longest sequence that the rotary table covers")
    rope_theta: float = Field(gt=1.0, description="base of the rotary frequencies")
    norm_eps: PositiveFloat = Field(description="epsilon of the RMS norms")
    initializer_range: PositiveFloat = Field(description="standard deviation of initial weights")
    rope_scaling: RopeScaling | None = Field(None, description="absent: plain rotary positions")
    balance_loss_weight: PerMoELayer = Field(
        0.0, description="balance loss; one number, or one per MoE layer"
    )
    balance_loss_scope: BalanceScope = Field(
        "sequence",
        description="tokens that are to be balanced: of a sequence, of a group of "
        "sequences of one step, or of the whole step before",
    )
    balance_group_size: PositiveInt | None = Field(
        None, description='sequences of a step in a balance group; for the scope "group"'
    )
    z_loss_weight: PerMoELayer = Field(
        0.0, description="loss on large router logits; one number, or one per MoE layer"
    )
    bias_update_rate: PerMoELayer = Field(
        0.0, description="selection bias moved per step; one number, or one per MoE layer"
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers = {self.num_dense_layers} is more than num_layers = "
                f"{self.num_layers}"
            )
        if self.num_dense_layers and not self.intermediate_size:
            raise ValueError(
                f"num_dense_layers = {self.num_dense_layers} needs intermediate_size, the inner "
                "width of a dense block's MLP"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k = {self.top_k} is more than num_experts = {self.num_experts}")
        for key in ("balance_loss_weight", "z_loss_weight", "bias_update_rate"):
            value = getattr(self, key)
            layers, ahead = self.num_moe_layers + self.mtp_depth(), self.mtp_depth()
            if isinstance(value, list) and len(value) != layers:
                raise ValueError(
                    f"{key} has {len(value)} values for {layers} MoE layers (num_layers - "
                    f"num_dense_layers{' + num_mtp_layers' if ahead else ''}): give one per MoE "
                    "layer, or a single number"
                )
        return self

    @model_validator(mode="after")
    def _scope_is_heeded(self) -> Self:
        scope, size = self.balance_loss_scope, self.balance_group_size
        if scope == "group" and size is None:
            raise ValueError(
                'balance_loss_scope = "group" needs balance_group_size, the sequences of a group'
            )
        if scope != "group" and size is not None:
            raise ValueError(
                f'balance_group_size = {size} is for balance_loss_scope = "group", but that is '
                f'"{scope}": leave it out, or give the scope'
            )
        weight = self.balance_loss_weight
        if scope != "sequence" and not (any(weight) if isinstance(weight, list) else weight):
            raise ValueError(
                f'balance_loss_scope = "{scope}" says of what, but balance_loss_weight is 0: '
                "give a weight, or leave the scope out"
            )
        return self

    @model_validator(mode="after")
    def _positions_are_covered(self) -> Self:
        scaling = self.rope_scaling
        if scaling and self.max_seq_len > scaling.factor * scaling.original_max_seq_len:
            raise ValueError(
                f"max_seq_len = {self.max_seq_len} is more than rope_scaling.factor x "
                f"original_max_seq_len = {scaling.factor * scaling.original_max_seq_len:.0f}"
            )
        return self

    @property
    def num_moe_layers(self) -> int:
        """Blocks with experts; layers of multi-token prediction come on top."""
        return self.num_layers - self.num_dense_layers

    def mtp_depth(self) -> int:
        """Layers of multi-token prediction; see config/mtp.py for families that have them."""
        return 0

    def mtp_weight(self) -> float:
        """Factor on the mean of their losses."""
        return 0.0

    def balance(self, layer: int) -> Balance:
        """Of block `layer`, counted over all blocks and on over those of multi-token prediction;
        it has experts.
        """

        def of_layer(value: float | list[float]) -> float:
            return value[layer - self.num_dense_layers] if isinstance(value, list) else value

        return Balance(
            balance_loss_weight=of_layer(self.balance_loss_weight),
            balance_loss_scope=self.balance_loss_scope,
            balance_group_size=self.balance_group_size or 1,
            z_loss_weight=of_layer(self.z_loss_weight),
            bias_update_rate=of_layer(self.bias_update_rate),
        )

    def attention_shape(self, layer: int) -> AttentionShape:
        """Attention of block `layer`. Each recipe states its own."""
        raise TypeError(f"{type(self).__name__} does not state its attention_shape")

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """What tensor parallelism splits, by the key or product of keys: its degree divides each.

        A recipe adds its own, e.g. num_kv_heads.
        """
        sizes = {"num_heads": self.num_heads, "vocab_size": self.vocab_size}
        if self.num_dense_layers:
            sizes["intermediate_size"] = self.intermediate_size
        if self.num_shared_experts and self.num_moe_layers + self.mtp_depth():
            width = self.moe_intermediate_size * self.num_shared_experts
            sizes["moe_intermediate_size * num_shared_experts"] = width
        return sizes
