"""Shares of traffic against every rank's messages, counted one by one."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_topology import groups_of, layouts
from titan_moe.config import load_config
from titan_moe.config.layout import Layout
from titan_moe.planner.case import Case
from titan_moe.planner.cluster import load_cluster
from titan_moe.planner.placement import across_share, domain_ranks, ranks_together

CONFIGS = Path(__file__).parents[2] / "train_configs"
RINGS = list(product([2, 4, 8], [1, 2, 4, 8]))


def groups(layout: Layout, name: str) -> list[list[int]]:
    sizes = layout.sparse if name in layout.sparse else layout.dense
    if name == "dp_shard":  # FSDP's mesh of dense weights
        sizes = {"outer": layout.pp * layout.dp_replicate, name: layout.dp_shard * layout.cp}
        sizes["tp"] = layout.tp
    return [sorted(group) for group in groups_of(sizes, name)]


@pytest.mark.parametrize("domain", [1, 2, 3, 4, 6, 8, 9, 72])
def test_against_every_group(domain: int) -> None:
    for layout in layouts(16):
        for name in {**layout.dense, **layout.sparse}:
            fewest = min(
                sum(other // domain == rank // domain for other in group)
                for group in groups(layout, name)
                for rank in group
            )
            assert ranks_together(layout, name, domain) == fewest, (layout, name)


@pytest.mark.parametrize(("ranks", "domain"), RINGS)
def test_all_to_all_counted(ranks: int, domain: int) -> None:
    sent = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    abroad = [(a, b) for a, b in sent if a // domain != b // domain]
    share = across_share("all_to_all", ranks, min(domain, ranks))
    assert share == pytest.approx(len(abroad) / len(sent))


@pytest.mark.parametrize(("ranks", "domain"), RINGS)
def test_a_ring_counted(ranks: int, domain: int) -> None:
    abroad = [a for a in range(ranks) if a // domain != (a + 1) % ranks // domain]
    for operation in ("all_gather", "reduce_scatter", "all_reduce", "send"):
        share = across_share(operation, ranks, min(domain, ranks))
        assert share == pytest.approx(len(abroad) / ranks)


def test_a_group_that_straddles_is_as_slow_as_its_loneliest_rank() -> None:
    """32 ranks in racks of 72: of the third group 8 are in the first rack, 24 in the next."""
    layout = Layout(dp_shard=288, ep=32)
    assert ranks_together(layout, "ep", 72) == 8
    assert across_share("all_to_all", 32, 8) == pytest.approx(24 / 31)


@pytest.mark.parametrize(
    ("world", "machine", "options", "ranks"),
    [
        (256, "gb300_nvl72", [], 64),
        (1024, "gb300_nvl72", [], 64),
        (288, "gb300_nvl72", [], 72),
        (64, "gb300_nvl72", [], 64),
        (72, "gb300_nvl72", [], 72),
        (720, "gb300_nvl72", [], 72),
        (100, "gb300_nvl72", [], 20),  # 50 would part a host
        (74, "gb300_nvl72", [], 37),  # no whole hosts do
        (8, "h100", [], 8),
        (1024, "h100", [], 8),
        (12, "h100", [], 6),
        (4, "h100", [], 4),
        (256, "gb300_nvl72", ["--parallelism.scale_up_size=32"], 32),
        (8, "gb300_nvl72", ["--parallelism.scale_up_size=32"], 8),
        (64, "h100", ["--parallelism.scale_up_size=32"], 8),  # more than the machine has
    ],
)
def test_ranks_of_a_domain(world: int, machine: str, options: list[str], ranks: int) -> None:
    config = load_config(CONFIGS / "debug.toml", options)
    stack: Any = None  # nothing here asks it
    cluster = load_cluster(CONFIGS / "clusters" / f"{machine}.toml")
    assert domain_ranks(Case(config, world, cluster, stack)) == ranks
