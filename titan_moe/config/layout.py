"""How many ranks there are of each kind. Torch-free: launcher, checks and planner use it too.

    dense   pp × dp_replicate × dp_shard × cp × tp         attention, dense MLPs, embedding, head
    sparse  pp × dp_replicate × efsdp × ep                 routed experts

Both views list the same ranks in the same order, and dp_shard·cp·tp = efsdp·ep: inside a stage
and a replica, the ranks that share dense work are folded anew for the experts. The last dimension
is made of neighbouring ranks. Every dimension is always there, be it of size 1.
"""

from dataclasses import dataclass
from math import prod

from titan_moe.config.sections import Parallelism


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
                raise ValueError(f"{name} is {degree}, must be 1 or more")
        if self.dp_shard * self.cp * self.tp % self.ep:
            raise ValueError(
                f"dp_shard {self.dp_shard} × cp {self.cp} × tp {self.tp} = "
                f"{self.dp_shard * self.cp * self.tp} ranks cannot be folded into groups of "
                f"ep {self.ep}; ep must divide them"
            )

    @classmethod
    def of(cls, section: Parallelism, world: int) -> "Layout":
        """The layout that `[parallelism]` asks for on `world` processes.

        Raises:
            ValueError: the degrees do not multiply to the world; the message shows the arithmetic.
        """
        others, shard = _degrees_but_shard(section), section.data_parallel_shard_degree
        if shard == -1:
            taken = prod(others.values())
            if world % taken:
                raise ValueError(
                    f"{_product(others)} does not divide the world of {world} processes"
                )
            shard = world // taken
        layout = cls(dp_shard=shard, ep=section.expert_parallel_degree, **others)
        if layout.world != world:
            raise ValueError(
                f"{_product(layout.dense)}, but the world has {world} processes; "
                f"data_parallel_shard_degree = -1 takes what the others leave"
            )
        return layout

    @staticmethod
    def world_of(section: Parallelism) -> int | None:
        """Processes that the degrees need. None: they leave dp_shard to the world."""
        shard = section.data_parallel_shard_degree
        return None if shard == -1 else shard * prod(_degrees_but_shard(section).values())

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
    def stage_ranks(self) -> int:
        """Ranks that share one pipeline stage."""
        return self.world // self.pp

    @property
    def dp_degree(self) -> int:
        """Ranks that read different rows of a batch."""
        return self.dp_replicate * self.dp_shard


def _degrees_but_shard(section: Parallelism) -> dict[str, int]:
    return {
        "pp": section.pipeline_parallel_degree,
        "dp_replicate": section.data_parallel_replicate_degree,
        "cp": section.context_parallel_degree,
        "tp": section.tensor_parallel_degree,
    }


def product_of(degrees: dict[str, int]) -> str:
    """`pp 2 × tp 4`"""
    return " × ".join(f"{name} {degree}" for name, degree in degrees.items())


def _product(degrees: dict[str, int]) -> str:
    """`pp 2 × tp 4 = 8`"""
    return f"{product_of(degrees)} = {prod(degrees.values())}"
