"""Where each process stands: one world of ranks, seen twice (see `config.layout`).

Torch is imported when meshes are built, not with this module.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan_moe.config.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

View = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Meshes:
    """Both views as device meshes, and what appliers ask of them.

    dense, sparse: with the dimensions that `Layout` names.
    sequence: the ranks, cp × tp, over which the tokens of one row are spread.
    """

    layout: Layout
    dense: "DeviceMesh"
    sparse: "DeviceMesh"
    sequence: "DeviceMesh"
    _data: "DeviceMesh"

    @classmethod
    def build(cls, layout: Layout, device_type: str) -> "Meshes":
        """Collective over the default process group, whose size must be the layout's world."""
        from torch.distributed import get_world_size
        from torch.distributed.device_mesh import init_device_mesh

        assert layout.world == get_world_size(), f"{layout} on {get_world_size()} processes"
        world = init_device_mesh(device_type, (layout.world,), mesh_dim_names=("world",))

        def view(sizes: dict[str, int]) -> "DeviceMesh":
            return world._unflatten(0, tuple(sizes.values()), tuple(sizes))

        dense = view(layout.dense)
        # Ranks of one cp group hold the same dense weights, so FSDP shards over dp_shard and cp.
        data = view(
            {
                "pp": layout.pp,
                "dp_replicate": layout.dp_replicate,
                "fsdp": layout.dp_shard * layout.cp,
                "tp": layout.tp,
            }
        )
        sequence = dense["cp", "tp"]._flatten("sequence")
        return cls(layout, dense, view(layout.sparse), sequence, data)

    @property
    def dp_degree(self) -> int:
        """Ranks that read different rows of a batch."""
        return self.layout.dp_degree

    @property
    def dp_rank(self) -> int:
        """Which of the `dp_degree` parts of a batch this rank reads."""
        replica = self.dense.get_local_rank("dp_replicate")
        return replica * self.layout.dp_shard + self.dense.get_local_rank("dp_shard")

    @property
    def tensor(self) -> "DeviceMesh":
        """The tp ranks, of the mesh that FSDP's for dense weights belongs to."""
        return self._data["tp"]

    @property
    def expert(self) -> "DeviceMesh":
        """The ep ranks, of the mesh that FSDP's for experts belongs to."""
        return self.sparse["ep"]

    @property
    def pipeline(self) -> "DeviceMesh":
        return self.dense["pp"]

    def fsdp(self, view: View) -> "DeviceMesh":
        """The mesh that fully_shard takes: 1-D (shard), or with replicas 2-D (replicate, shard)."""
        mesh, shard = (self._data, "fsdp") if view == "dense" else (self.sparse, "efsdp")
        return mesh[shard] if self.layout.dp_replicate == 1 else mesh["dp_replicate", shard]
