"""Pipelines against one process: gradients on four ranks, forwards counted, validation apart.

The parity matrix holds every schedule on two ranks to a reference by the book, over three steps.
Here are eight blocks, the first two without experts, for as many as eight stages.
"""

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from tests.layers.helpers import error
from tests.parity.cases import Case, config_of, layout_of
from tests.parity.run import Trace, Values, of_all_stages, rows_of, whole
from tests.parity.tiny import MODEL, batch_of_step
from tests.tolerances import BF16_ROUNDED, PARITY_GRADIENT_ERROR, PARITY_RTOL
from titan_moe import parallelize as page
from titan_moe.check.pool import Pool
from titan_moe.config.sections import RunConfig
from titan_moe.mesh import Meshes
from titan_moe.optim import build_optimizer
from titan_moe.parallel import pipeline
from titan_moe.parallel.engine import Engine
from titan_moe.parallel.pipeline import Pipeline
from titan_moe.recipe import load_recipe
from titan_moe.stages import Stage

BLOCKS, DENSE = 8, 2
MICRO_BATCHES = 8  # of two rows, on one data rank
SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def build(case: Case, **training: Any) -> tuple[Engine, Meshes]:
    config = config_of(case, **training)
    sizes: dict[str, Any] = {"num_layers": BLOCKS, "num_dense_layers": DENSE}
    for key in ("balance_loss_weight", "z_loss_weight", "bias_update_rate"):
        sizes[key] = 0.01
    config = config.model_copy(update={"model": MODEL.model_copy(update=sizes)})
    meshes = Meshes.build(layout_of(case), "cpu")
    recipe = load_recipe(config.model.recipe)
    return page.parallelize(config, recipe, meshes, torch.device("cpu"), poison=True), meshes


def step(case: Case, control: str = "", **training: Any) -> tuple[float, Values]:
    """Loss and every gradient of a step, after a control has broken something."""
    with pytest.MonkeyPatch.context() as patch:
        if control:
            CONTROLS[control](patch)
        engine, meshes = build(case, **training)
        output = engine.forward_backward(rows_of(batch_of_step(0), meshes))
    trace = Trace()
    gradients = of_all_stages(engine, meshes, lambda name, p: p.grad, trace)  # type: ignore[arg-type, return-value]
    return output.loss.item(), gradients


def assert_equal(got: tuple[float, Values], expected: tuple[float, Values]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=PARITY_RTOL)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert error(got[1][name], gradient) <= PARITY_GRADIENT_ERROR, name


FOUR_RANKS = [
    Case(pp=4, schedule="GPipe"),
    Case(pp=4, schedule="1F1B", accumulation=2),
    Case(pp=4, schedule="Interleaved1F1B", recompute="full"),
    Case(pp=4, schedule="InterleavedZeroBubble", recompute="full"),
    Case(pp=4, schedule="ZBVZeroBubble"),
    Case(pp=4, schedule="DualPipeV", recompute="full"),
    Case(pp=2, shards=2, schedule="LoopedBFS", stages_per_rank=4),
    Case(pp=2, shards=2, schedule="ZBVZeroBubble", recompute="full", accumulation=2),
    Case(pp=2, replicas=2, schedule="Interleaved1F1B", accumulation=2),
]


@pytest.mark.parametrize("case", FOUR_RANKS, ids=str)
def test_loss_and_gradients_are_those_of_one_process(pool: Pool, case: Case) -> None:
    (expected,) = pool.run(1, step, Case())
    for got in pool.run(case.world, step, case):
        assert_equal(got, expected)


def scale_by_micro_batches(patch: pytest.MonkeyPatch) -> None:
    whole_loss = Pipeline._loss
    patch.setattr(Pipeline, "_loss", lambda *args: whole_loss(*args) / MICRO_BATCHES)


def average_gradients(patch: pytest.MonkeyPatch) -> None:
    schedule = pipeline.torch_schedule

    def averaging(*args: Any) -> Any:
        made = schedule(*args)
        made.scale_grads = True
        return made

    patch.setattr(pipeline, "torch_schedule", averaging)


def rotate_layers(patch: pytest.MonkeyPatch) -> None:
    """The last stage begins with its second block and ends with its first."""
    build_part = page.build_on_meta

    def rotated(config: RunConfig, recipe: Any, stage: Stage) -> Any:
        part: Any = build_part(config, recipe, stage)
        if stage.has_head:
            first, *others = part.layers.items()
            part.layers = nn.ModuleDict([*others, first])
        return part

    patch.setattr(page, "build_on_meta", rotated)


def forget_positions(patch: pytest.MonkeyPatch) -> None:
    keywords = pipeline.keywords_of
    patch.setattr(
        pipeline,
        "keywords_of",
        lambda batch: keywords(batch | {"positions": torch.zeros_like(batch["positions"])}),
    )


CONTROLS = {
    function.__name__: function
    for function in (scale_by_micro_batches, average_gradients, rotate_layers, forget_positions)
}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_are_seen(pool: Pool, control: str) -> None:
    (expected,) = pool.run(1, step, Case())
    for got in pool.run(2, step, Case(pp=2), control):
        with pytest.raises(AssertionError):
            assert_equal(got, expected)


def forwards(case: Case, static: bool) -> tuple[dict[str, int], dict[str, int], int]:
    """Of each block here, in a step and in a validation of 7 rows; tokens counted in layer 2."""
    with pytest.MonkeyPatch.context() as patch:
        if not static:
            patch.setattr(pipeline, "PipelineStage", without_static_arguments)
        engine, _ = build(case)
        counts: Counter[str] = Counter()
        for part in engine.parts:
            for name, block in part.layers.items():  # type: ignore[union-attr, operator]
                block.attention.register_forward_pre_hook(
                    lambda *args, at=name: counts.update([at])
                )
        engine.forward_backward(batch_of_step(0))
    in_step = dict(counts)
    counts.clear()
    engine.evaluate({key: value[:7] for key, value in batch_of_step(1).items()})
    return in_step, dict(counts), int(engine.update_routers()[0].sum())


def without_static_arguments(*args: Any, **kwargs: Any) -> PipelineStage:
    del kwargs["input_args"], kwargs["output_args"]
    return PipelineStage(*args, **kwargs)


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS", "DualPipeV"])
def test_no_forward_beyond_the_micro_batches(pool: Pool, schedule: str) -> None:
    case = Case(pp=2, schedule=schedule)
    tokens = int((batch_of_step(0)["document_ids"] >= 0).sum())
    blocks: set[str] = set()
    for in_step, in_validation, counted in pool.run(2, forwards, case, True):
        blocks |= in_step.keys()
        assert set(in_step.values()) == {MICRO_BATCHES}
        assert in_validation.keys() == in_step.keys()
        assert set(in_validation.values()) == {4}  # rows 2, 2, 2, 1
        assert counted == tokens * MODEL.top_k
    assert blocks == {str(block) for block in range(BLOCKS)}


def test_without_static_arguments_there_is_one_more(pool: Pool) -> None:
    for in_step, _, _ in pool.run(2, forwards, Case(pp=2), False):
        assert set(in_step.values()) == {MICRO_BATCHES + 1}


def validation(case: Case, rows: int) -> tuple[float, float]:
    """Of so many rows, in pieces of five."""
    engine, _ = build(case)
    engine._validation_rows = 5
    nats, tokens = engine.evaluate({k: v[:rows] for k, v in batch_of_step(3).items()})
    return nats.item(), tokens.item()


@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_validation_of_any_number_of_rows(pool: Pool, schedule: str, rows: int) -> None:
    ((expected, tokens),) = pool.run(1, validation, Case(), rows)
    assert expected > 0
    for got in pool.run(4, validation, Case(pp=4, schedule=schedule), rows):
        assert got == (pytest.approx(expected, rel=PARITY_RTOL), tokens)


def steps_with(case: Case, validations: int) -> tuple[list[float], Values]:
    """Losses of three steps, and the state after them, with validations at odd moments."""
    engine, meshes = build(case)
    optimizer = build_optimizer(engine.parts, config_of(case).optimizer)
    losses = []
    for number in range(3):
        for _ in range(validations):
            engine.evaluate(rows_of(batch_of_step(100 + number), meshes))
        losses.append(engine.forward_backward(rows_of(batch_of_step(number), meshes)).loss.item())
        for _ in range(validations):
            engine.evaluate(rows_of(batch_of_step(200 + number), meshes))
        optimizer.step()
        optimizer.zero_grad()
        engine.update_routers()
    assert all(module.training for part in engine.parts for module in part.modules())
    state: Values = {}
    for part in engine.parts:
        state |= {name: whole(tensor) for name, tensor in part.state_dict().items()}
    return losses, state


@pytest.mark.parametrize(
    "case",
    [Case(pp=2, shards=2), Case(pp=2, schedule="ZBVZeroBubble", recompute="full")],
    ids=str,
)
def test_validation_leaves_no_trace(pool: Pool, case: Case) -> None:
    plain, validated = (pool.run(case.world, steps_with, case, times) for times in (0, 2))
    for (losses, state), (other_losses, other_state) in zip(plain, validated, strict=True):
        assert losses == other_losses
        for name, value in state.items():
            assert torch.equal(other_state[name], value), name


def in_bf16(case: Case) -> tuple[float, set[torch.dtype]]:
    """The loss, and what stages hand on."""
    engine, meshes = build(case, mixed_precision_param="bfloat16")
    handed: set[torch.dtype] = set()

    def look(module: object, inputs: object, hidden_BSD: Tensor) -> None:
        handed.add(hidden_BSD.dtype)

    for part in engine.parts:
        part.register_forward_hook(look)
    return engine.forward_backward(rows_of(batch_of_step(0), meshes)).loss.item(), handed


def test_stages_exchange_what_the_policy_computes_in(pool: Pool) -> None:
    ((expected, _),) = pool.run(1, in_bf16, Case())
    for loss, handed in pool.run(2, in_bf16, Case(pp=2, schedule="ZBVZeroBubble")):
        assert handed == {torch.bfloat16}
        assert math.isclose(loss, expected, rel_tol=BF16_ROUNDED)


@pytest.mark.parametrize("schedule", SPLIT)
def test_freed_weights_and_a_split_backward_are_refused(pool: Pool, schedule: str) -> None:
    """With that refusal taken out, gradients were missing, or 80% off. Configs tell it at load."""
    with pytest.raises(AssertionError, match="gradients would be lost"):
        pool.run(2, build_only, Case(pp=2, schedule=schedule, reshard="always"))


def build_only(case: Case) -> None:
    build(case)


def said_by(case: Case) -> list[str]:
    """What this rank says of stages and the pipeline."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        for module in (page, pipeline):
            patch.setattr(module.logger, "info", lambda text, *args: said.append(text % args))
        build(case)
    return said


def test_the_log_tells_all_stages_and_which_are_here(pool: Pool) -> None:
    of_all = (
        "pipeline: ZBVZeroBubble, 8 micro-batches of 2 rows; 4 stages, blocks 0 | 1 to 2 | 3 to 5 "
        "| 6 to 7, the embedding on the first and the head on the last"
    )
    case = Case(pp=2, schedule="ZBVZeroBubble", layers=(1, 2, 3, 2))
    assert pool.run(2, said_by, case) == [
        ["here stage 0 of 4: 1 block, 0", "here stage 3 of 4: 2 blocks, 6 to 7", of_all],
        ["here stage 1 of 4: 2 blocks, 1 to 2", "here stage 2 of 4: 3 blocks, 3 to 5", of_all],
    ]
    of_file = pool.run(2, said_by, Case(pp=2, schedule="CSV", microbatch=4))[0][-1]
    assert re.match(r"pipeline: \S+/schedule\.csv, 4 micro-batches of 4 rows; ", of_file)


def parameters_of(case: Case) -> int:
    meshes = Meshes.build(layout_of(case), "cpu")
    config = config_of(case)
    recipe = load_recipe(config.model.recipe)
    return page.parallelize(config, recipe, meshes, torch.device("cpu")).num_parameters()


def test_a_weight_that_two_stages_hold_is_counted_once(pool: Pool) -> None:
    case = Case("grouped_query", pp=2, schedule="DualPipeV")
    model: Any = load_recipe(case.of_family.model.recipe).load_model_class()(
        case.of_family.model, layers=range(4), has_embedding=True, has_head=True
    )
    wanted = sum(parameter.numel() for parameter in model.parameters())
    assert pool.run(2, parameters_of, case) == [wanted, wanted]
