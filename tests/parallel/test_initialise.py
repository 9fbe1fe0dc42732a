"""Values belong to names and global indices: sharded any way, a model starts with the same bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titan_moe.check.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.layers.init import Computed, Constant, Init, Normal
from titan_moe.mesh import Meshes
from titan_moe.parallel import initialise as room
from titan_moe.parallel.initialise import initialise, materialise

CPU = torch.device("cpu")


class Leaf(nn.Module):
    """One of everything that a layer may own; sizes that no number of ranks divides."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 7))
        self.scale = nn.Parameter(torch.empty(rows, dtype=torch.bfloat16))
        self.register_buffer("table", torch.empty(5, dtype=torch.float64), persistent=False)
        self.register_buffer("counts", torch.empty(3, dtype=torch.int64))
        self.register_buffer("absent", None)
        self.inits: dict[str, Init] = {
            "weight": Normal(0.02),
            "scale": Constant(1.5),
            "table": Computed(lambda: torch.arange(5.0).square()),
            "counts": Constant(0),
        }


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Leaf(5)
        self.second = Leaf(13)
        self.experts = nn.Parameter(torch.empty(3, 6, 4))
        self.inits: dict[str, Init] = {"experts": Normal(1.0)}

    def forward(self) -> None: ...


def values(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in named.items()
    }


def build(shard: Callable[[Tree], None] = lambda model: None, seed: int = 0) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Tree()
    shard(model)
    materialise(model, CPU, poison=True)
    assert all(bool(t.isnan().all()) for t in values(model).values() if t.is_floating_point())
    initialise(model, seed)
    return values(model)


def sharded(layout: Layout) -> dict[str, Tensor]:
    def shard(model: Tree) -> None:
        mesh = Meshes.build(layout, "cpu").fsdp("dense")
        fully_shard(model.second, mesh=mesh)
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)

    return build(shard)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(dp_shard=2), Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2)],
    ids=["1", "2", "4", "2x2"],
)
def test_sharding_leaves_the_bits_and_no_poison(pool: Pool, layout: Layout) -> None:
    expected = build()
    assert expected["second.table"].tolist() == [0.0, 1.0, 4.0, 9.0, 16.0]
    assert expected["first.scale"].tolist() == [1.5] * 5
    assert expected["first.counts"].tolist() == [0] * 3
    for answer in pool.run(layout.world, sharded, layout):
        assert answer.keys() == expected.keys()
        for name, value in answer.items():
            assert not value.isnan().any(), name
            assert torch.equal(value, expected[name]), name


def test_every_name_and_seed_has_values_of_its_own() -> None:
    zero, one = build(seed=0), build(seed=1)
    pieces = [zero["first.weight"], zero["second.weight"], one["first.weight"]]
    pieces += [expert * 0.02 for expert in zero["experts"]]  # nor are two stacked experts alike
    for index, piece in enumerate(pieces):
        for other in pieces[:index]:
            assert not torch.isclose(piece.flatten()[:20], other.flatten()[:20]).any()
    assert 0.9 < float(zero["experts"].std()) < 1.1
    assert 0.015 < float(zero["second.weight"].std()) < 0.025


def test_small_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = build()
    monkeypatch.setattr(room, "CHUNK_ELEMENTS", 10)
    assert all(torch.equal(value, expected[name]) for name, value in build().items())


def placed(shape: tuple[int, ...], how: str) -> Tensor:
    """A parameter under placements that later appliers use, on 2 × 2 ranks."""
    mesh = Meshes.build(Layout(dp_shard=2, tp=2), "cpu").dense["dp_shard", "tp"]
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(shape))
    holder.inits = {"weight": Normal(1.0)}
    if how == "fsdp over tp":  # FSDP2 cuts the rows that tensor parallelism has cut already
        inner = distribute_tensor(holder.weight.data, mesh["tp"], [Shard(0)])
        holder.weight = nn.Parameter(inner)
        fully_shard(holder, mesh=mesh["dp_shard"])
    else:
        placements = {
            "rows, columns": [Shard(0), Shard(1)],
            "columns, rows": [Shard(1), Shard(0)],
            "rows twice": [Shard(0), Shard(0)],
            "replicated, last": [Replicate(), Shard(len(shape) - 1)],
        }[how]
        holder.weight = nn.Parameter(distribute_tensor(holder.weight.data, mesh, placements))
    materialise(holder, CPU, poison=True)
    initialise(holder, 0)
    assert isinstance(holder.weight, DTensor)
    return holder.weight.full_tensor().detach()


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (3, 2, 5), (1, 3)])
@pytest.mark.parametrize(
    "how", ["rows, columns", "columns, rows", "rows twice", "replicated, last", "fsdp over tp"]
)
def test_placements_to_come(pool: Pool, shape: tuple[int, ...], how: str) -> None:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(shape))
    holder.inits = {"weight": Normal(1.0)}
    initialise(holder, 0)
    for answer in pool.run(4, placed, shape, how):
        assert torch.equal(answer, holder.weight.detach())


def test_names_do_not_see_wrappers() -> None:
    plain = build()["first.weight"]
    wrapped = nn.Module()
    wrapped.first = nn.Module()
    wrapped.first._orig_mod = Leaf(5)
    initialise(wrapped, 0)
    assert torch.equal(wrapped.first._orig_mod.weight, plain)


def test_what_is_not_named_is_refused() -> None:
    model = Tree()
    del model.second.inits["counts"]
    with pytest.raises(ValueError, match=r"second \(Leaf\): no entry in .inits for counts"):
        initialise(model, 0)
    model = Tree()
    model.first.extra = nn.Parameter(torch.empty(2))
    with pytest.raises(ValueError, match=r"first \(Leaf\): no entry in .inits for extra"):
        initialise(model, 0)
    model = Tree()
    model.inits["gone"] = Constant(0.0)
    with pytest.raises(ValueError, match=r"the model \(Tree\): .inits names gone"):
        initialise(model, 0)
    model = Tree()
    model.first.inits["table"] = Computed(lambda: torch.zeros(4))
    with pytest.raises(ValueError, match=r"first.table is \(5,\), its .inits computes \(4,\)"):
        initialise(model, 0)


def test_what_is_loaded_is_left_as_it_is() -> None:
    model = Tree()
    initialise(model, 0)
    expected = values(model)
    materialise(model, CPU, poison=True)
    initialise(model, 0, loaded={"second.weight", "experts"})
    for name, value in values(model).items():
        if name in ("second.weight", "experts"):
            assert value.isnan().all(), name
        else:
            assert torch.equal(value, expected[name]), name
