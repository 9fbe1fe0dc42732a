"""Where each process stands: one world of ranks, seen twice.

    dense   pp × dp_replicate × dp_shard × cp × tp         attention, dense MLPs, embedding, head
    sparse  pp × dp_replicate × efsdp × ep                 routed experts

Both views list the same ranks in the same order, and dp_shard·cp·tp = efsdp·ep: inside a stage
and a replica, the ranks that share dense work are folded anew for the experts. The last dimension
is made of neighbouring ranks. Every dimension is always there, be it of size 1.

Torch is imported when meshes are built, not with this module: a launcher checks layouts without it.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from titan_moe.config.sections import Parallelism

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

View = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Layout:
    """Degrees of every kind of parallelism; `efsdp`, the experts' sharding, follows from them.

    Raises:
        ValueError: a degree below 1, or experts that cannot be folded over the ranks.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, degree in {**self.dense, "ep": self.ep}.items():
            if degree < 1:
                raise ValueError(f"parallelism: {name} is {degree}, must be 1 or more")
        if self.dp_shard * self.cp * self.tp % self.ep:
            raise ValueError(
                f"parallelism: dp_shard {self.dp_shard} × cp {self.cp} × tp {self.tp} = "
                f"{self.dp_shard * self.cp * self.tp} ranks cannot be folded into groups of "
                f"ep {self.ep}; ep must divide them"
            )

    @classmethod
    def of(cls, section: Parallelism, world: int) -> "Layout":
        """The layout that `[parallelism]` asks for on `world` processes.

        Raises:
            ValueError: the degrees do not multiply to the world; the message shows the arithmetic.
        """
        replicate, shard = (
            section.data_parallel_replicate_degree,
            section.data_parallel_shard_degree,
        )
        if shard == -1:
            if world % replicate:
                raise ValueError(
                    f"parallelism.data_parallel_replicate_degree = {replicate} does not divide the "
                    f"world of {world} processes ({world} / {replicate} = {world / replicate:.3g})"
                )
            shard = world // replicate
        layout = cls(dp_replicate=replicate, dp_shard=shard)
        if layout.world != world:
            factors = " × ".join(f"{name} {degree}" for name, degree in layout.dense.items())
            raise ValueError(
                f"parallelism: {factors} = {layout.world}, but the world has {world} processes; "
                f"data_parallel_shard_degree = -1 takes what the others leave"
            )
        return layout

    @property
    def dense(self) -> dict[str, int]:
        """Sizes of the dense view by name, outermost first."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }

    @property
    def sparse(self) -> dict[str, int]:
        """Sizes of the sparse view by name, outermost first."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "efsdp": self.efsdp,
            "ep": self.ep,
        }

    @property
    def efsdp(self) -> int:
        """Ranks over which the weights of one group of experts are sharded."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def world(self) -> int:
        return prod(self.dense.values())

    @property
    def dp_degree(self) -> int:
        """Ranks that read different rows of a batch."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class Meshes:
    """Both views as device meshes, and what appliers ask of them.

    dense, sparse: with the dimensions named at the top of this file.
    loss_group: the ranks of this rank's stage that hold different tokens (dp × cp): sums over a
        batch are sums over this group.
    """

    layout: Layout
    dense: "DeviceMesh"
    sparse: "DeviceMesh"
    loss_group: "ProcessGroup"
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

        # Ranks of one cp group hold the same dense weights, so FSDP shards over dp_shard and cp.
        data = view(
            {
                "pp": layout.pp,
                "dp_replicate": layout.dp_replicate,
                "fsdp": layout.dp_shard * layout.cp,
                "tp": layout.tp,
            }
        )
        loss_group = data["dp_replicate", "fsdp"]._flatten("loss").get_group()
        return cls(layout, view(layout.dense), view(layout.sparse), loss_group, data)

    @property
    def dp_degree(self) -> int:
        """Ranks that read different rows of a batch."""
        return self.layout.dp_degree

    @property
    def dp_rank(self) -> int:
        """Which of the `dp_degree` parts of a batch this rank reads."""
        replica = self.dense.get_local_rank("dp_replicate")
        return replica * self.layout.dp_shard + self.dense.get_local_rank("dp_shard")

    def fsdp(self, view: View) -> "DeviceMesh":
        """The mesh that fully_shard takes: 1-D (shard), or with replicas 2-D (replicate, shard)."""
        mesh, shard = (self._data, "fsdp") if view == "dense" else (self.sparse, "efsdp")
        return mesh[shard] if self.layout.dp_replicate == 1 else mesh["dp_replicate", shard]
