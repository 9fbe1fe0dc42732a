"""Model FLOPs per token, counted by hand from the sizes. No torch.

The convention, the same for every model:
  - a matmul with P weights costs 2 P per token forward; backward costs twice that: a step is 3x;
  - only matmuls count: no norms, activations, rotary embedding, softmax, token lookup or router;
  - of the routed experts just the top_k that a token visits;
  - causal attention as if one document filled the sequence: a query sees seq_len / 2 keys on
    average (the continuous mean; with a window of W keys it is W - W^2 / (2 seq_len));
  - recomputation is the machine's work, not the model's, and never counted;
  - one multi-token-prediction layer is one more block with experts, its 2D -> D projection, and
    the logits once more (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from dataclasses import dataclass, fields

from titan_moe.config.model import AttentionShape, ModelConfig

FORWARD_AND_BACKWARD = 3
FLOPS_PER_WEIGHT = 2  # one multiply, one add
MATRICES_PER_MLP = 3  # SwiGLU: gate, up, down


@dataclass(frozen=True)
class BlockFlops:
    """FLOPs per token of one block, forward and backward, by kind of matmul."""

    attention_projections: float
    attention_scores: float
    dense_mlp: float
    experts: float
    shared_experts: float

    @property
    def total(self) -> float:
        return _total(self)


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
        return _total(self)


def model_flops_per_token(cfg: ModelConfig, seq_len: int) -> ModelFlops:
    """Count what one token costs in a training step.

    cfg: sizes; `cfg.attention_shape(layer)` states each block's attention.
    seq_len: tokens per sequence.
    """
    blocks = [block_flops_per_token(cfg, layer, seq_len) for layer in range(cfg.num_layers)]
    logits = logits_flops_per_token(cfg)
    of_blocks = {
        part.name: sum(getattr(block, part.name) for block in blocks) for part in fields(BlockFlops)
    }
    return ModelFlops(**of_blocks, logits=logits, mtp=mtp_flops_per_token(cfg, seq_len))


def block_flops_per_token(cfg: ModelConfig, layer: int, seq_len: int) -> BlockFlops:
    """The same of block `layer` alone."""
    shape = cfg.attention_shape(layer)
    is_dense = layer < cfg.num_dense_layers
    expert = _step(MATRICES_PER_MLP * cfg.hidden_size * cfg.moe_intermediate_size)
    dense = _step(MATRICES_PER_MLP * cfg.hidden_size * cfg.intermediate_size)
    return BlockFlops(
        attention_projections=_step(shape.projection_params),
        attention_scores=_attention_scores(shape, seq_len),
        dense_mlp=dense if is_dense else 0.0,
        experts=0.0 if is_dense else cfg.top_k * expert,
        shared_experts=0.0 if is_dense else cfg.num_shared_experts * expert,
    )


def logits_flops_per_token(cfg: ModelConfig) -> float:
    """The same of the output projection alone."""
    return _step(cfg.hidden_size * cfg.vocab_size)


def mtp_flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """The same of all layers of multi-token prediction."""
    layers = range(cfg.num_layers, cfg.num_layers + cfg.mtp_depth())
    blocks = sum(block_flops_per_token(cfg, layer, seq_len).total for layer in layers)
    besides = _step(2 * cfg.hidden_size * cfg.hidden_size) + logits_flops_per_token(cfg)
    return blocks + len(layers) * besides


def _total(parts: BlockFlops | ModelFlops) -> float:
    return sum(float(getattr(parts, part.name)) for part in fields(parts))


def _step(weights: int) -> float:
    """FLOPs per token, forward and backward, of matmuls with so many weights."""
    return float(FORWARD_AND_BACKWARD * FLOPS_PER_WEIGHT * weights)


def _attention_scores(shape: AttentionShape, seq_len: int) -> float:
    """FLOPs per token of queries times keys and probabilities times values."""
    window = seq_len if shape.window is None else min(shape.window, seq_len)
    mean_keys = window - window * window / (2 * seq_len)
    per_key = FLOPS_PER_WEIGHT * shape.num_heads * (shape.qk_head_dim + shape.v_head_dim)
    return FORWARD_AND_BACKWARD * per_key * mean_keys
