"""Layouts: the arithmetic of the two views, and meshes that show it on real ranks."""

import subprocess
import sys
from dataclasses import asdict

import pytest
from torch import distributed as dist

from tests.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.config.sections import Parallelism
from titan_moe.mesh import Meshes


def section(replicate: int, shard: int) -> Parallelism:
    return Parallelism(data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard)


def test_views_multiply_to_one_world() -> None:
    layout = Layout(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=4, ep=8)
    assert layout.dense == {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "cp": 2, "tp": 4}
    assert layout.sparse == {"pp": 2, "dp_replicate": 3, "efsdp": 2, "ep": 8}
    assert layout.world == 96
    assert layout.dp_degree == 6


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "expected"),
    [
        (1, -1, 1, (1, 1)),
        (1, -1, 4, (1, 4)),
        (2, -1, 4, (2, 2)),
        (4, -1, 4, (4, 1)),
        (2, 2, 4, (2, 2)),
    ],
)
def test_degrees_from_the_section(
    replicate: int, shard: int, world: int, expected: tuple[int, int]
) -> None:
    layout = Layout.of(section(replicate, shard), world)
    assert (layout.dp_replicate, layout.dp_shard) == expected
    assert layout.world == world


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "message"),
    [
        (3, -1, 4, r"dp_replicate 3 × cp 1 × tp 1 = 3 does not divide the world of 4 processes"),
        (2, 4, 4, r"pp 1 × dp_replicate 2 × dp_shard 4 × cp 1 × tp 1 = 8, but the world has 4"),
        (1, 2, 4, r"dp_shard 2 .* = 2, but the world has 4"),
    ],
)
def test_impossible_degrees_show_their_arithmetic(
    replicate: int, shard: int, world: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.of(section(replicate, shard), world)


def test_degrees_below_one_and_experts_that_do_not_fold() -> None:
    with pytest.raises(ValueError, match=r"dp_shard is 0, must be 1 or more"):
        Layout(dp_shard=0)
    with pytest.raises(ValueError, match=r"ep is -1"):
        Layout(ep=-1)
    with pytest.raises(ValueError, match=r"dp_shard 2 × cp 1 × tp 2 = 4 ranks .* ep 3"):
        Layout(dp_shard=2, tp=2, ep=3)


def test_a_layout_needs_no_torch() -> None:
    code = (
        "import sys; from titan_moe.config.layout import Layout; import titan_moe.mesh;"
        "import titan_moe.optim.schedule;"
        "from titan_moe.config.sections import Parallelism; Layout.of(Parallelism(), 8);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
