"""A layout in words, and which of its dimensions stay inside a fast domain. Torch-free.

A domain is `scale_up_size` neighbouring ranks joined by a fast network: a node, or a rack. A mesh
dimension of n ranks at stride s has the groups base, base + s, ..., base + (n-1)·s. They tile the
world in blocks of n·s ranks, and wherever a domain ends within a block some group lies on both
sides. So all groups stay inside if and only if blocks fill domains, or there is just one domain.
"""

from titan_moe.config.layout import Layout, product_of
from titan_moe.config.words import counted


def stays_inside(layout: Layout, scale_up_size: int) -> dict[str, bool]:
    """Whether every group of a mesh dimension lies in one domain, innermost dimensions first.

    Dimensions of both views (see `Layout`) by name; those of size 1 have no one to talk to, and are
    left out.
    """
    inside: dict[str, bool] = {}
    for view in (layout.dense, layout.sparse):
        block = 1
        for name, size in reversed(view.items()):
            block *= size
            if size > 1:
                inside[name] = layout.world <= scale_up_size or scale_up_size % block == 0
    return inside


def layout_lines(layout: Layout, scale_up_size: int | None) -> list[str]:
    """For people: the layout, and what that means for the network if one is told of."""
    topology = [] if scale_up_size is None else [topology_line(layout, scale_up_size)]
    return [layout_line(layout), *topology]


def layout_line(layout: Layout) -> str:
    """Both views: `layout: pp 1 × dp_replicate 1 × ... × tp 2; experts: efsdp 1 × ep 4`.

    What leads to a stage and a replica is the same for experts, and not said again.
    """
    experts = {name: size for name, size in layout.sparse.items() if name not in layout.dense}
    return f"layout: {product_of(layout.dense)}; experts: {product_of(experts)}"


def topology_line(layout: Layout, scale_up_size: int) -> str:
    """For people: `topology: domains of 4 ranks; inside: tp, ep; across: dp_shard, pp`."""
    inside = stays_inside(layout, scale_up_size)

    def names(within: bool) -> str:
        return ", ".join(name for name, is_inside in inside.items() if is_inside == within)

    return (
        f"topology: domains of {counted(scale_up_size, 'rank')}; inside: {names(True) or 'none'}; "
        f"across: {names(False) or 'none'}"
    )
