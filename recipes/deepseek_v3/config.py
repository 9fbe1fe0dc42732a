"""`[model]` of the DeepSeek-V3 architecture. Torch-free."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from titan_moe.config.model import AttentionShape
from titan_moe.config.mtp import MultiTokenPrediction


class DeepseekV3Config(MultiTokenPrediction):
    """Multi-head latent attention, sigmoid routing in groups, balance without auxiliary loss."""

    q_lora_rank: int = Field(ge=0, description="width of the query latent; 0: queries have none")
    kv_lora_rank: PositiveInt = Field(description="width of the latent of keys and values")
    qk_nope_head_dim: PositiveInt = Field(description="query and key width without position")
    qk_rope_head_dim: PositiveInt = Field(
        multiple_of=2, description="query and key width with position"
    )
    v_head_dim: PositiveInt = Field(description="value width of a head")
    latent_norm_eps: PositiveFloat = Field(
        1e-6, description="epsilon of the latents' norms, which published models leave at 1e-6"
    )

    num_expert_groups: PositiveInt = Field(1, description="equal groups of experts")
    num_limited_groups: PositiveInt = Field(
        1, description="groups that a token's experts come from"
    )
    score_function: Literal["sigmoid", "softmax"] = Field(
        description="from router logits to scores"
    )
    normalize_weights: bool = Field(description="a token's expert weights sum to route_scale")
    route_scale: PositiveFloat = Field(description="factor on the experts' weights")

    @model_validator(mode="after")
    def _routing_is_possible(self) -> Self:
        experts, groups = self.num_experts, self.num_expert_groups
        if experts % groups:
            raise ValueError(
                f"num_experts = {experts} is not divisible by num_expert_groups = {groups}"
            )
        if self.num_limited_groups > groups:
            raise ValueError(
                f"num_limited_groups = {self.num_limited_groups} is more than "
                f"num_expert_groups = {groups}"
            )
        reachable = experts // groups * self.num_limited_groups
        if self.top_k > reachable:
            raise ValueError(
                f"top_k = {self.top_k} is more than the {reachable} experts of a token's "
                f"{self.num_limited_groups} groups: lower top_k or raise num_limited_groups"
            )
        return self

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def attention_shape(self, layer: int) -> AttentionShape:
        queries = self.num_heads * self.qk_head_dim
        if self.q_lora_rank:
            query = self.q_lora_rank * (self.hidden_size + queries)
        else:
            query = self.hidden_size * queries
        latent = self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
        expanded = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        output = self.num_heads * self.v_head_dim * self.hidden_size
        return AttentionShape(
            projection_params=query + latent + self.kv_lora_rank * expanded + output,
            num_heads=self.num_heads,
            qk_head_dim=self.qk_head_dim,
            v_head_dim=self.v_head_dim,
        )
