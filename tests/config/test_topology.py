"""Which mesh dimensions stay inside a fast domain, against every group written out."""

from itertools import product

import pytest

from titan_moe.config.layout import Layout
from titan_moe.config.topology import layout_lines, stays_inside, topology_line


def groups_of(sizes: dict[str, int], name: str) -> set[frozenset[int]]:
    """The ranks that differ in their place along `name` alone, ranks being counted row by row."""
    names = list(sizes)
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank, places in enumerate(product(*map(range, sizes.values()))):
        others = tuple(p for n, p in zip(names, places, strict=True) if n != name)
        groups.setdefault(others, set()).add(rank)
    return set(map(frozenset, groups.values()))


def layouts(largest_world: int) -> list[Layout]:
    degrees = range(1, 5)
    return [
        Layout(pp, replicate, shard, cp, tp, ep)
        for pp, replicate, shard, cp, tp in product(degrees, repeat=5)
        if pp * replicate * shard * cp * tp <= largest_world
        for ep in range(1, shard * cp * tp + 1)
        if shard * cp * tp % ep == 0
    ]


@pytest.mark.parametrize("scale_up_size", [1, 2, 3, 4, 5, 6, 8, 9, 12, 72])
def test_against_every_group(scale_up_size: int) -> None:
    for layout in layouts(24):
        expected = {
            name: all(len({rank // scale_up_size for rank in group}) == 1 for group in groups)
            for sizes in (layout.dense, layout.sparse)
            for name in sizes
            if sizes[name] > 1
            for groups in [groups_of(sizes, name)]
        }
        assert stays_inside(layout, scale_up_size) == expected, layout


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (
            Layout(pp=2, dp_shard=2, cp=2, tp=2, ep=4),
            "topology: domains of 4 ranks; inside: tp, cp, ep; across: dp_shard, pp, efsdp",
        ),
        (Layout(tp=4), "topology: domains of 4 ranks; inside: tp, efsdp; across: none"),
        (Layout(dp_shard=8), "topology: domains of 4 ranks; inside: none; across: dp_shard, efsdp"),
        (Layout(), "topology: domains of 4 ranks; inside: none; across: none"),
    ],
)
def test_the_line_for_people(layout: Layout, line: str) -> None:
    assert topology_line(layout, 4) == line


def test_a_layout_in_both_views() -> None:
    layout = Layout(pp=2, dp_replicate=3, dp_shard=4, cp=1, tp=2, ep=4)
    told = (
        "layout: pp 2 × dp_replicate 3 × dp_shard 4 × cp 1 × tp 2; experts: efsdp 2 × ep 4",
        "topology: domains of 1 rank; inside: none; across: tp, dp_shard, dp_replicate, pp, ep, "
        "efsdp",
    )
    assert layout_lines(layout, None) == [told[0]]
    assert layout_lines(layout, 1) == list(told)
