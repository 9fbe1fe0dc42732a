"""Families that train in milliseconds, and the batches of a step.

B rows of a step, S sequence, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.deepseek_v3.config import DeepseekV3Config
from tests.families.grouped_query.config import GroupedQueryConfig
from titan_moe.config.model import ModelConfig

ROWS, SEQ_LEN, VOCAB = 16, 16, 48


@dataclass(frozen=True)
class Family:
    """A tiny model, and its routing as the reference reads it, without asking the model.

    balance, z_loss, bias_rate: one per MoE layer.
    rows_balanced: rows whose tokens are balanced together; None: against the step before.
    mtp_layers, mtp_weight: layers that predict further ahead, and the factor on their mean loss.
    seed: of the initial weights, one on which no choice of experts is nearly a tie.
    """

    model: ModelConfig
    seed: int
    score_function: str
    groups: int
    limited_groups: int
    balance: tuple[float, ...]
    z_loss: tuple[float, ...]
    bias_rate: tuple[float, ...]
    rows_balanced: int | None = 1
    mtp_layers: int = 0
    mtp_weight: float = 0.0


MODEL = DeepseekV3Config(
    recipe="recipes.deepseek_v3",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=4,
    num_dense_layers=1,
    num_heads=4,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    intermediate_size=40,
    moe_intermediate_size=12,
    num_experts=8,
    top_k=2,
    num_shared_experts=1,
    num_expert_groups=4,
    num_limited_groups=2,
    score_function="sigmoid",
    normalize_weights=True,
    route_scale=1.5,
    balance_loss_weight=[0.05, 0.1, 0.07],
    z_loss_weight=[0.02, 0.01, 0.03],
    bias_update_rate=[0.003, 0.001, 0.002],
    max_seq_len=SEQ_LEN,
    rope_theta=10000.0,
    norm_eps=1e-6,
    initializer_range=0.2,
)

MTP = DeepseekV3Config.model_validate(
    MODEL.model_dump(exclude_none=True)
    | {
        "num_mtp_layers": 2,
        "mtp_loss_weight": 0.4,
        "balance_loss_weight": [0.05, 0.1, 0.07, 0.06, 0.04],
        "z_loss_weight": [0.02, 0.01, 0.03, 0.02, 0.01],
        "bias_update_rate": [0.003, 0.001, 0.002, 0.001, 0.003],
    }
)

GROUPED_QUERY = GroupedQueryConfig(
    recipe="tests.families.grouped_query",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    moe_intermediate_size=12,
    num_experts=8,
    top_k=3,
    balance_loss_weight=0.1,
    max_seq_len=SEQ_LEN,
    rope_theta=10000.0,
    norm_eps=1e-6,
    initializer_range=0.2,
)

GROUPS = GroupedQueryConfig.model_validate(
    GROUPED_QUERY.model_dump(exclude_none=True)
    | {"balance_loss_scope": "group", "balance_group_size": 2}
)
STEP_BEFORE = GroupedQueryConfig.model_validate(
    GROUPED_QUERY.model_dump(exclude_none=True) | {"balance_loss_scope": "global"}
)

FAMILIES = {
    "deepseek_v3": Family(
        MODEL,
        seed=5,
        score_function="sigmoid",
        groups=4,
        limited_groups=2,
        balance=(0.05, 0.1, 0.07),
        z_loss=(0.02, 0.01, 0.03),
        bias_rate=(0.003, 0.001, 0.002),
    ),
    "deepseek_v3_mtp": Family(
        MTP,
        seed=21,
        score_function="sigmoid",
        groups=4,
        limited_groups=2,
        balance=(0.05, 0.1, 0.07, 0.06, 0.04),
        z_loss=(0.02, 0.01, 0.03, 0.02, 0.01),
        bias_rate=(0.003, 0.001, 0.002, 0.001, 0.003),
        mtp_layers=2,
        mtp_weight=0.4,
    ),
    "grouped_query": Family(
        GROUPED_QUERY,
        seed=11,
        score_function="softmax",
        groups=1,
        limited_groups=1,
        balance=(0.1,) * 4,
        z_loss=(0.0,) * 4,
        bias_rate=(0.0,) * 4,
    ),
    "balance_of_groups": Family(
        GROUPS,
        seed=11,
        score_function="softmax",
        groups=1,
        limited_groups=1,
        balance=(0.1,) * 4,
        z_loss=(0.0,) * 4,
        bias_rate=(0.0,) * 4,
        rows_balanced=2,
    ),
    "balance_of_steps": Family(
        STEP_BEFORE,
        seed=11,
        score_function="softmax",
        groups=1,
        limited_groups=1,
        balance=(0.1,) * 4,
        z_loss=(0.0,) * 4,
        bias_rate=(0.0,) * 4,
        rows_balanced=None,
    ),
}


def batch_of_step(step: int) -> dict[str, Tensor]:
    """All B rows: documents of random lengths, rows padded by 0 to 3 positions, row 5 wholly.

    Labels are the document's next token; each rank and micro-batch has another number of them.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens_BS = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    starts_BS = torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.2
    starts_BS[:, 0] = False
    document_ids_BS = starts_BS.long().cumsum(dim=1)
    padding_B = torch.arange(ROWS) % 4
    padding_B[5] = SEQ_LEN
    index_S = torch.arange(SEQ_LEN)
    document_ids_BS[index_S >= SEQ_LEN - padding_B[:, None]] = -1
    positions_BS = torch.zeros_like(tokens_BS)
    labels_BS = torch.full_like(tokens_BS, -100)
    for row in range(ROWS):
        for s in range(SEQ_LEN - 1):
            if document_ids_BS[row, s] == document_ids_BS[row, s + 1]:
                positions_BS[row, s + 1] = positions_BS[row, s] + 1
                if document_ids_BS[row, s] >= 0:
                    labels_BS[row, s] = tokens_BS[row, s + 1]
    return {
        "tokens": tokens_BS,
        "labels": labels_BS,
        "positions": positions_BS,
        "document_ids": document_ids_BS,
    }
