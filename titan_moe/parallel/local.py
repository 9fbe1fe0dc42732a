"""Weights that a mesh splits: DTensors to everybody but the module that computes with them.

A module that an applier has split sees plain local tensors in its forward, so that layers are
written once, for one process. Optimizer, norm and checkpoint see the DTensors, whatever the layout.
"""

from functools import cache
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


class Splitter:
    """Splits parameters over one mesh dimension; a weight that two modules share, once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        assert mesh.ndim == 1
        self.mesh = mesh
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    def split(self, module: nn.Module, name: str, dim: int) -> None:
        """Leave each rank an equal part of `module.<name>` along dim.

        Raises:
            ValueError: the ranks do not divide it.
        """
        size, ranks = module.get_parameter(name).shape[dim], self.mesh.size()
        if size % ranks:
            raise ValueError(f"{size} along dimension {dim} cannot be split over {ranks} ranks")
        self._place(module, name, Shard(dim), partial=False)

    def replicate(self, module: nn.Module, name: str, *, partial: bool) -> None:
        """Keep `module.<name>` whole on each rank.

        partial: a rank's gradient is its share, to be added up over the mesh (see `PendingSums`).
        """
        self._place(module, name, Replicate(), partial=partial)

    def _place(self, module: nn.Module, name: str, placement: Placement, *, partial: bool) -> None:
        whole = module.get_parameter(name)
        if whole not in self._done:
            placed = distribute_tensor(whole, self.mesh, [placement], src_data_rank=None)
            self._done[whole] = nn.Parameter(placed, requires_grad=whole.requires_grad)
        module.register_parameter(name, self._done[whole])
        _see_local(module, name, self.mesh)
        if isinstance(placement, Replicate):
            replicated: dict[str, bool] = module.__dict__.setdefault("replicated", {})
            replicated[name] = partial


def replicated_parameters(model: nn.Module) -> dict[nn.Parameter, bool]:
    """Those that every rank of a mesh holds whole, and whether their gradients are shares."""
    found = {
        module._parameters[name]: partial
        for module in model.modules()
        for name, partial in module.__dict__.get("replicated", {}).items()
    }
    return {parameter: partial for parameter, partial in found.items() if parameter is not None}


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients are still to be added up over the mesh."""
    return [parameter for parameter, partial in replicated_parameters(model).items() if partial]


def _see_local(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    meshes: dict[str, DeviceMesh] = module.__dict__.setdefault("local_meshes", {})
    meshes[name] = mesh
    cls = type(module)
    if name not in getattr(cls, "local_names", ()):
        module.__class__ = _local_class(cls, name)  # type: ignore[arg-type]


@cache
def _local_class(cls: type[nn.Module], name: str) -> type[nn.Module]:
    """cls, with `self.<name>` the local part of that parameter, and differentiable as such."""

    def local(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        # FSDP's slices, between uses, lie on a larger mesh and are nobody's to compute with.
        if isinstance(parameter, DTensor) and parameter.device_mesh == module.local_meshes[name]:
            return parameter.to_local(grad_placements=parameter.placements)
        return parameter

    names = (*getattr(cls, "local_names", ()), name)
    return type(
        f"Local{cls.__name__.removeprefix('Local')}",
        (cls,),
        {name: property(local), "local_names": names},
    )
