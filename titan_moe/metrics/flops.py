"""Model FLOPs per token, counted by hand from the sizes. No torch.

The convention, the same for every model:
  - a matmul with P weights costs 2 P per token forward; backward costs twice that: a step is 3x;
  - only matmuls count: no norms, activations, rotary embedding, softmax, token lookup or router;
  - of the routed experts just the top_k that a token visits;
  - causal attention as if one document filled the sequence: a query sees seq_len / 2 keys on
    average (the continuous mean; with a window of W keys it is W - W^2 / (2 seq_len));
  - recomputation is the machine's work, not the model's, and never counted;
  - one multi-token-prediction layer is one more block of the last layer's kind, its 2D -> D
    projection, and the logits once more (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from dataclasses import dataclass, fields

from titan_moe.config.model import AttentionShape, ModelConfig

FORWARD_AND_BACKWARD = 3
FLOPS_PER_WEIGHT = 2  # one multiply, one add
MATRICES_PER_MLP = 3  # SwiGLU: gate, up, down


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per token, forward and backward, by kind of matmul."""

    attention_projections: float
    attention_scores: float
    dense_mlp: float
    experts: float
    shared_experts: float
    logits: float
    mtp: float

    @property
    def total(self) -> float:
        """FLOPs per token of one training step."""
        return sum(float(getattr(self, part.name)) for part in fields(self))


def model_flops_per_token(cfg: ModelConfig, seq_len: int, num_mtp_layers: int = 0) -> ModelFlops:
    """Count what one token costs in a training step.

    cfg: sizes; `cfg.attention_shape(layer)` states each block's attention.
    seq_len: tokens per sequence.
    num_mtp_layers: multi-token-prediction layers trained along.
    """
    shapes = [cfg.attention_shape(layer) for layer in range(cfg.num_layers)]
    num_moe_layers = cfg.num_layers - cfg.num_dense_layers
    expert_weights = MATRICES_PER_MLP * cfg.hidden_size * cfg.moe_intermediate_size
    dense_weights = MATRICES_PER_MLP * cfg.hidden_size * cfg.intermediate_size
    visited = _step(cfg.top_k * expert_weights)
    shared = _step(cfg.num_shared_experts * expert_weights)
    logits = _step(cfg.hidden_size * cfg.vocab_size)

    last = shapes[-1]
    mlp = visited + shared if num_moe_layers else _step(dense_weights)
    block = _step(last.projection_params) + _attention_scores(last, seq_len) + mlp
    mtp_layer = block + _step(2 * cfg.hidden_size * cfg.hidden_size) + logits
    return ModelFlops(
        attention_projections=sum(_step(shape.projection_params) for shape in shapes),
        attention_scores=sum(_attention_scores(shape, seq_len) for shape in shapes),
        dense_mlp=cfg.num_dense_layers * _step(dense_weights),
        experts=num_moe_layers * visited,
        shared_experts=num_moe_layers * shared,
        logits=logits,
        mtp=num_mtp_layers * mtp_layer,
    )


def _step(weights: int) -> float:
    """FLOPs per token, forward and backward, of matmuls with so many weights."""
    return float(FORWARD_AND_BACKWARD * FLOPS_PER_WEIGHT * weights)


def _attention_scores(shape: AttentionShape, seq_len: int) -> float:
    """FLOPs per token of queries times keys and probabilities times values."""
    window = seq_len if shape.window is None else min(shape.window, seq_len)
    mean_keys = window - window * window / (2 * seq_len)
    per_key = FLOPS_PER_WEIGHT * shape.num_heads * (shape.qk_head_dim + shape.v_head_dim)
    return FORWARD_AND_BACKWARD * per_key * mean_keys
