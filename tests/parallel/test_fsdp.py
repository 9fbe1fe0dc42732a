"""What FSDP is told, and what it is told on every module."""

import logging
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from recipes.deepseek_v3 import RECIPE
from recipes.deepseek_v3.model import Model
from recipes.deepseek_v3.sharding import SHARDING
from tests.parity.cases import Case, config_of
from tests.parity.run import build, rows_of
from tests.parity.tiny import MODEL, batch_of_step
from titan_moe.check.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.mesh import Meshes
from titan_moe.parallel.fsdp import apply_fsdp, fsdp_modules
from titan_moe.parallelize import build_on_meta
from titan_moe.recipe import FsdpUnit, Sharding
from titan_moe.stages import split_stages

UNITS = {
    "",
    "embedding",
    "layers.0",
    "layers.1",
    "layers.1.moe.router",
    "layers.1.moe.experts",
    "layers.2",
    "layers.2.moe.router",
    "layers.2.moe.experts",
    "layers.3",
    "layers.3.moe.router",
    "layers.3.moe.experts",
    "head.norm",
    "head",
}


def what_fsdp_was_told(case: Case) -> dict[str, list[dict[str, object]]]:
    engine, _ = build(case)
    return {
        name: [
            {
                "factor": group.gradient_divide_factor,
                "sums": group.force_sum_reduction_for_comms,
                "reshards": group.post_forward_mesh_info is not None,
                "mesh": tuple(group.mesh_info.mesh.shape),
            }
            for group in module._get_fsdp_state()._fsdp_param_groups
        ]
        for name, module in engine.parts[0].named_modules()
        if isinstance(module, FSDPModule)
    }


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        (Case(), (1,)),
        (Case(shards=2), (2,)),
        (Case(shards=2, replicas=2, reshard="never"), (2, 2)),
        (Case(replicas=2), (2, 1)),
    ],
    ids=str,
)
def test_every_module_sums_its_gradients(pool: Pool, case: Case, mesh: tuple[int, ...]) -> None:
    told = pool.run(case.world, what_fsdp_was_told, case)[0]
    assert told.keys() == UNITS
    groups = [group for name in UNITS for group in told[name]]
    assert len(groups) == len(UNITS) - 1  # all but the root, to which nothing is left
    expected = {"factor": 1.0, "sums": True, "reshards": case.reshard != "never", "mesh": mesh}
    assert all(group == expected for group in groups)


def names_and_types(case: Case) -> dict[str, str]:
    engine, _ = build(case, dtype="bfloat16", mixed_precision_param="bfloat16")
    router = engine.parts[0].layers["1"].moe.router
    seen: list[torch.dtype] = []
    router.register_forward_hook(lambda module, args, out: seen.extend([module.weight.dtype]))
    engine.forward_backward(rows_of(batch_of_step(0), _))
    assert set(seen) == {torch.float32}, "inside a bf16 unit the router's weight is bf16"
    state = engine.parts[0].state_dict()
    return {name: str(tensor.dtype) for name, tensor in state.items()}


def test_names_and_types_stay_those_of_the_plain_model(pool: Pool) -> None:
    case = Case(shards=2, recompute="full")
    config = config_of(case, dtype="bfloat16")
    (stage,) = split_stages(config)
    plain = build_on_meta(config, RECIPE, stage).state_dict()
    types = {name: str(tensor.dtype) for name, tensor in plain.items()}
    assert pool.run(2, names_and_types, case) == [types] * 2
    for name, dtype in types.items():
        kind = {"selection_bias": "float32", "previous_counts": "int64"}
        expected = kind.get(name.rpartition(".")[2], "bfloat16")
        if name.endswith("router.weight"):
            expected = "float32"
        assert dtype == f"torch.{expected}", name


def sharded_by(layers: range, sharding: Sharding, has_head: bool) -> tuple[int, str]:
    """Modules that FSDP gathers of one stage, and what the log says."""
    config = config_of(Case())
    with torch.device("meta"):
        model: nn.Module = Model(
            MODEL, layers=layers, has_embedding=not has_head, has_head=has_head
        )
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("titan_moe.parallel.fsdp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    meshes = Meshes.build(Layout(**asdict(Layout())), "cpu")
    apply_fsdp(model, meshes, sharding, config.training, config.parallelism)
    logger.removeHandler(handler)
    return len(fsdp_modules(model)), lines[-1]


def test_stages_without_experts_embedding_or_head(pool: Pool) -> None:
    [(modules, line)] = pool.run(1, sharded_by, range(1), SHARDING, False)
    assert modules == 3
    assert line.startswith("fsdp: 2 units and the root, ")
    assert line.endswith("replicas 1 × shards 1")
    [(modules, _)] = pool.run(1, sharded_by, range(1, 3), SHARDING, True)
    assert modules == 9


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["layers.*.mo.experts", "layers.*"], r"'layers.\*.mo.experts' matches no module"),
        (["layer.*"], r"'layer.\*' matches no module"),
        (
            ["layers.*", "layers.*.moe.router"],
            r"layers.1.moe.router, .* is in an FSDP unit already",
        ),
        (["layers.1", "layers.*"], r"layers.1, .* is in an FSDP unit already"),
    ],
)
def test_units_that_touch_nothing_or_twice(pool: Pool, units: list[str], message: str) -> None:
    sharding = Sharding(tuple(FsdpUnit(pattern) for pattern in units))
    with pytest.raises(ValueError, match=message):
        pool.run(1, sharded_by, range(3), sharding, True)
