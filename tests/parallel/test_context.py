"""Which tokens a rank has, what it sees of the others', and what that costs.

B batch, S tokens of a rank, T tokens of the row.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from titan_moe.check.pool import Pool
from titan_moe.config import load_config
from titan_moe.layers.mask import AttentionMask
from titan_moe.parallel.context import (
    GatherKeys,
    LoadBalancer,
    SequenceSlices,
    SliceMask,
    row_order,
)

TRAIN_CONFIGS = Path(__file__).parents[2] / "train_configs"


def test_an_early_and_a_late_chunk() -> None:
    assert row_order(8, 2, "headtail").tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert row_order(8, 2, "none").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert row_order(6, 3, "headtail").tolist() == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_head_and_tail_are_equal_work(ranks: int) -> None:
    """Pairs of query and key under a causal mask, counted one by one."""
    work = [sum(place + 1 for place in row) for row in row_order(64, ranks, "headtail").tolist()]
    assert len(set(work)) == 1
    assert sum(work) == 64 * 65 // 2
    uneven = [sum(place + 1 for place in row) for row in row_order(64, ranks, "none").tolist()]
    assert max(uneven) > 1.4 * sum(uneven) / ranks


def slices_here(balancer: LoadBalancer) -> SequenceSlices:
    group = dist.group.WORLD
    assert group is not None
    return SequenceSlices(group, dist.get_rank(), dist.get_world_size(), balancer)


def row_of(kind: int) -> Tensor:
    return torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(kind)).double()


def gather(balancer: LoadBalancer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both tensors over the row, and their gradients of a loss that each rank weighs its way."""
    slices = slices_here(balancer)
    mine = {"tokens": row_of(1)[..., 0], "keys": row_of(1), "values": row_of(2)}
    mine = slices.of_batch(mine)
    keys, values = mine["keys"].requires_grad_(), mine["values"].requires_grad_()
    keys_BT, values_BT = GatherKeys(slices)(keys, values)
    ((keys_BT + 2 * values_BT) * row_of(10 + slices.rank)).sum().backward()
    assert keys.grad is not None
    assert values.grad is not None
    return keys_BT.detach(), values_BT.detach(), keys.grad, values.grad


@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_keys_come_in_the_rows_order(pool: Pool, ranks: int, balancer: LoadBalancer) -> None:
    weight = torch.stack([row_of(10 + rank) for rank in range(ranks)]).sum(0)
    for rank, (keys, values, dkeys, dvalues) in enumerate(pool.run(ranks, gather, balancer)):
        places = row_order(8, ranks, balancer)[rank]
        assert torch.equal(keys, row_of(1))
        assert torch.equal(values, row_of(2))
        torch.testing.assert_close(dkeys, weight[:, places], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(dvalues, 2 * weight[:, places], rtol=1e-14, atol=1e-14)


def documents() -> Tensor:
    return torch.tensor([[0, 0, 0, 1, 1, 2, 2, -1], [0, 1, 2, 2, 2, 2, -1, -1]])


def see(balancer: LoadBalancer, with_documents: bool) -> Tensor:
    slices = slices_here(balancer)
    mine = slices.of_batch({"tokens": documents()})["tokens"]
    return SliceMask(slices, with_documents)(mine).visible()


@pytest.mark.parametrize("balancer", ["headtail", "none"])
def test_a_rank_sees_its_rows_of_the_whole_mask(pool: Pool, balancer: LoadBalancer) -> None:
    whole = AttentionMask.of_documents(documents()).visible()
    causal = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 8, 8)
    for rank, seen in enumerate(pool.run(2, see, balancer, True)):
        assert torch.equal(seen, whole[:, row_order(8, 2, balancer)[rank]])
    for rank, seen in enumerate(pool.run(2, see, balancer, False)):
        assert torch.equal(seen, causal[:, row_order(8, 2, balancer)[rank]])


def test_latents_are_gathered_not_keys_and_values() -> None:
    """DeepSeek-V3's widths: what the slot is given, per token, against all heads' K and V."""
    from recipes.deepseek_v3.model import Block
    from titan_moe.layers.context import Context
    from titan_moe.layers.rope import Rope

    cfg: Any = load_config(TRAIN_CONFIGS / "deepseek_v3" / "671b.toml").model
    widths: list[int] = []

    def count(latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        widths.extend([latent.shape[-1], k_rope.shape[-1]])
        return latent, k_rope

    with torch.device("meta"):
        rope = Rope(cfg.qk_rope_head_dim, cfg.rope_theta, cfg.max_seq_len, cfg.rope_scaling)
        block = Block(cfg, 0, rope)
        block.attention.gather_kv = count
        x_BSD = torch.empty(1, 4, cfg.hidden_size)
        valid_BS = torch.ones(1, 4, dtype=torch.bool)
        rotation = rope(torch.zeros(1, 4, dtype=torch.int64))
        block.attention(x_BSD, Context(rotation, None, valid_BS))
    assert sum(widths) == 576
    assert cfg.num_heads * (cfg.qk_head_dim + cfg.v_head_dim) == 40_960
