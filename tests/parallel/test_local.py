"""Weights that a mesh splits: local to the module that computes, DTensors to everybody else."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from titan_moe.check.pool import Pool
from titan_moe.layers.linear import Linear
from titan_moe.parallel.local import Splitter, partial_parameters


def whole() -> nn.ModuleDict:
    """Two linears that share a weight, and a norm's."""
    first, second = Linear(6, 4, std=1.0), Linear(6, 4, std=1.0)
    torch.manual_seed(0)
    nn.init.normal_(first.weight)
    second.weight = first.weight
    return nn.ModuleDict({"first": first, "second": second, "norm": nn.RMSNorm(6)})


def split() -> dict[str, object]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, splitter = whole(), Splitter(mesh)
    expected = model["first"].weight.detach().chunk(2)[mesh.get_local_rank()].clone()
    splitter.split(model["first"], "weight", dim=0)
    splitter.split(model["second"], "weight", dim=0)
    splitter.replicate(model["norm"], "weight", partial=True)
    x = torch.arange(12.0).view(2, 6)
    y = model["first"](model["norm"](x))
    y.sum().backward()
    parameters = dict(model.named_parameters())
    gradient = parameters["first.weight"].grad
    assert isinstance(gradient, DTensor)
    return {
        "names": list(parameters),
        "dtensors": all(isinstance(p, DTensor) for p in parameters.values()),
        "global": parameters["first.weight"].shape,
        "seen": torch.equal(model["first"].weight, expected),
        "plain": type(model["first"].weight) is Tensor,
        "shared": model["second"]._parameters["weight"] is model["first"]._parameters["weight"],
        "out": y.shape,
        "gradient": gradient.to_local().shape,
        "partial": [p is parameters["norm.weight"] for p in partial_parameters(model)],
        "kind": (isinstance(model["first"], Linear), type(model["first"]).__name__),
        "saved": list(model.state_dict()),
    }


def test_a_module_sees_its_part(pool: Pool) -> None:
    for answer in pool.run(2, split):
        assert answer == {
            "names": ["first.weight", "norm.weight"],
            "dtensors": True,
            "global": (4, 6),
            "seen": True,
            "plain": True,
            "shared": True,
            "out": (2, 2),
            "gradient": (2, 6),
            "partial": [True],
            "kind": (True, "LocalLinear"),
            "saved": ["first.weight", "second.weight", "norm.weight"],
        }


def split_in_three() -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    Splitter(mesh).split(whole()["first"], "weight", dim=0)


def test_what_does_not_divide_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="4 along dimension 0 cannot be split over 3 ranks"):
        pool.run(3, split_in_three)
