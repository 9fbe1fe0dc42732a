"""Which mesh dimensions stay inside a fast domain, by arithmetic alone. Torch-free.

A domain is `scale_up_size` neighbouring ranks joined by a fast network: a node, or a rack. A mesh
dimension of n ranks at stride s has the groups base, base + s, ..., base + (n-1)·s. They tile the
world in blocks of n·s ranks, and wherever a domain ends within a block some group lies on both
sides. So all groups stay inside if and only if blocks fill domains, or there is just one domain.
"""

from titan_moe.config.layout import Layout


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


def topology_line(layout: Layout, scale_up_size: int) -> str:
    """For people: `topology: domains of 4 ranks; inside: tp, ep; across: dp_shard, pp`."""
    inside = stays_inside(layout, scale_up_size)

    def names(within: bool) -> str:
        return ", ".join(name for name, is_inside in inside.items() if is_inside == within)

    return (
        f"topology: domains of {scale_up_size} ranks; inside: {names(True) or 'none'}; "
        f"across: {names(False) or 'none'}"
    )
