"""Meshes: both views of a layout, on real ranks."""

from dataclasses import asdict

import pytest
from torch import distributed as dist

from titan_moe.check.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.mesh import Meshes


def where(layout: Layout) -> dict[str, object]:
    meshes = Meshes.build(layout, "cpu")
    return {
        "dense": dict(zip(layout.dense, meshes.dense.get_coordinate() or (), strict=True)),
        "sparse": dict(zip(layout.sparse, meshes.sparse.get_coordinate() or (), strict=True)),
        "dp": (meshes.dp_rank, meshes.dp_degree),
        "sequence": sorted(dist.get_process_group_ranks(meshes.sequence.get_group())),
        "fsdp": meshes.fsdp("dense").mesh.tolist(),
        "efsdp": meshes.fsdp("sparse").mesh.tolist(),
    }


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_shard=4),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(dp_replicate=4),
        Layout(dp_shard=2, tp=2, ep=4),
        Layout(pp=2, dp_shard=2, ep=2),
        Layout(dp_shard=2, cp=2, ep=2),
        Layout(dp_replicate=2, cp=2, ep=1),
        Layout(cp=2, tp=2, ep=2),
    ],
    ids=lambda layout: " ".join(f"{k}{v}" for k, v in asdict(layout).items() if v > 1) or "one",
)
def test_meshes_against_a_count_by_hand(pool: Pool, layout: Layout) -> None:
    """Ranks are written in mixed radix; a group is all ranks that differ in its digits alone."""

    def digits(rank: int, sizes: dict[str, int]) -> dict[str, int]:
        out = {}
        for name, size in reversed(sizes.items()):
            out[name], rank = rank % size, rank // size
        return out

    def group(rank: int, sizes: dict[str, int], *names: str) -> list[int]:
        mine = digits(rank, sizes)
        alike = {name for name in sizes if name not in names}
        return [
            r for r in range(layout.world) if all(digits(r, sizes)[n] == mine[n] for n in alike)
        ]

    for rank, answer in enumerate(pool.run(layout.world, where, layout)):
        dense = digits(rank, layout.dense)
        assert answer["dense"] == dense
        assert answer["sparse"] == digits(rank, layout.sparse)
        assert answer["dp"] == (
            dense["dp_replicate"] * layout.dp_shard + dense["dp_shard"],
            layout.dp_degree,
        )
        assert answer["sequence"] == group(rank, layout.dense, "cp", "tp")
        shards = group(rank, layout.dense, "dp_shard", "cp")
        expert_shards = group(rank, layout.sparse, "efsdp")
        if layout.dp_replicate == 1:
            assert answer["fsdp"] == shards
            assert answer["efsdp"] == expert_shards
        else:
            assert shards in answer["fsdp"]
            assert len(answer["fsdp"]) == layout.dp_replicate
            assert expert_shards in answer["efsdp"]
            assert len(answer["efsdp"]) == layout.dp_replicate
