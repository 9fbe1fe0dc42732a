"""The engine's arithmetic: sums over valid tokens, validation without a trace, loud errors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from recipes.deepseek_v3 import RECIPE
from tests.parity.cases import Case, config_of
from tests.parity.reference import Reference, cross_entropy
from tests.parity.run import build, gradients_of, rows_of, whole
from tests.parity.tiny import MODEL, ROWS, SEQ_LEN, batch_of_step
from tests.tolerances import PARITY_CURVE_RTOL, PARITY_GRADIENT_ERROR
from titan_moe.check.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.mesh import Meshes
from titan_moe.optim import build_optimizer
from titan_moe.parallelize import parallelize
from titan_moe.world import any_rank


def one_and_nine() -> dict[str, Tensor]:
    """A step in which the first quarter of the rows predicts one token, the second nine."""
    batch = batch_of_step(0)
    batch["document_ids"].clamp_(min=0)
    labels_BS = torch.full((ROWS, SEQ_LEN), -100)
    labels_BS[2, 3] = 7
    labels_BS[5, :5] = torch.arange(5)
    labels_BS[7, 1:5] = torch.arange(4) + 30
    return batch | {"labels": labels_BS}


def one_step(case: Case) -> tuple[float, int, dict[str, Tensor]]:
    engine, meshes = build(case)
    output = engine.forward_backward(rows_of(one_and_nine(), meshes))
    return output.loss.item(), output.valid_tokens, gradients_of(engine.parts[0])


@pytest.mark.parametrize("case", [Case(accumulation=4), Case(shards=4), Case(shards=2)], ids=str)
def test_micro_batches_of_one_and_nine_tokens(pool: Pool, case: Case) -> None:
    """Averaging micro-batches or ranks would weigh the one token as much as the nine."""
    reference = Reference()
    expected = reference.step(one_and_nine()).loss
    wanted = gradients_of(reference.model)
    for loss, valid_tokens, gradients in pool.run(case.world, one_step, case):
        assert valid_tokens == 10
        assert loss == pytest.approx(expected.item(), rel=PARITY_CURVE_RTOL)
        for name, gradient in wanted.items():
            error = (gradients[name] - gradient).norm()
            assert error <= PARITY_GRADIENT_ERROR * gradient.norm(), name


def step_of(case: Case, labels: int | None, rows: int) -> None:
    engine, meshes = build(case)
    batch = rows_of(batch_of_step(0), meshes)
    if labels is not None:
        batch["labels"].fill_(labels)
    engine.forward_backward({key: value[:rows] for key, value in batch.items()})


def test_steps_that_cannot_be(pool: Pool) -> None:
    with pytest.raises(ValueError, match="without a single valid token"):
        pool.run(2, step_of, Case(shards=2), -100, ROWS)
    message = r"training.local_batch_size = 4 does not divide the 7 rows of a rank's step"
    with pytest.raises(ValueError, match=message):
        pool.run(1, step_of, Case(accumulation=4), None, 7)


def validate(case: Case) -> tuple[float, float]:
    engine, meshes = build(case)
    nats, tokens = engine.evaluate(rows_of(batch_of_step(0), meshes))
    assert nats.dtype == tokens.dtype == torch.float64
    return nats.item(), tokens.item()


@pytest.mark.parametrize(
    "case", [Case(), Case(shards=2, accumulation=4), Case(shards=2, replicas=2)], ids=str
)
def test_validation_sums_over_all_ranks(pool: Pool, case: Case) -> None:
    batch = batch_of_step(0)
    reference = Reference().model.eval()
    hidden_BSD = reference(
        batch["tokens"],
        positions_BS=batch["positions"],
        document_ids_BS=batch["document_ids"],
        tokens_BS=batch["tokens"],
    )
    valid_tokens = int((batch["labels"] != -100).sum())
    mean = cross_entropy(reference.head.logits(hidden_BSD), batch["labels"]).item()
    for nats, tokens in pool.run(case.world, validate, case):
        assert tokens == valid_tokens
        assert nats == pytest.approx(mean * valid_tokens, rel=PARITY_CURVE_RTOL)


def steps_with(case: Case, validations: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps and all state after them, with validations at every odd moment."""
    engine, meshes = build(case)
    model = engine.parts[0]
    optimizer = build_optimizer(engine.parts, config_of(case).optimizer)
    losses = []
    for step in range(3):
        losses.append(engine.forward_backward(rows_of(batch_of_step(step), meshes)).loss.item())
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for _ in range(validations):
            engine.evaluate(rows_of(batch_of_step(100 + step), meshes))
        optimizer.step()
        optimizer.zero_grad()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name
        for _ in range(validations):
            engine.evaluate(rows_of(batch_of_step(200 + step), meshes))
        engine.update_routers()
    assert all(module.training for module in model.modules())
    values = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        values |= {f"{index}.{key}": whole(tensor) for key, tensor in state.items()}
    return losses, values


@pytest.mark.parametrize("reshard", ["default", "never"])
def test_validation_leaves_no_trace(pool: Pool, reshard: Any) -> None:
    case = Case(shards=2, reshard=reshard)
    plain, validated = (pool.run(2, steps_with, case, times) for times in (0, 2))
    for (losses, values), (other_losses, other_values) in zip(plain, validated, strict=True):
        assert losses == other_losses
        assert values.keys() == other_values.keys()
        for name, value in values.items():
            assert torch.equal(other_values[name], value), name


def agree(world: int) -> tuple[bool, bool, list[int], float]:
    """Of the world, and of a model without a single MoE layer."""
    case = Case(shards=world)
    dense = {"num_dense_layers": MODEL.num_layers}
    for key in ("balance_loss_weight", "z_loss_weight", "bias_update_rate"):
        dense[key] = 0.0
    config = config_of(case)
    config = config.model_copy(update={"model": MODEL.model_copy(update=dense)})
    meshes = Meshes.build(Layout.of(config.parallelism, world), "cpu")
    engine = parallelize(config, RECIPE, meshes, torch.device("cpu"), poison=True)
    output = engine.forward_backward(rows_of(batch_of_step(0), meshes))
    assert output.balance_loss.item() == 0.0
    counts = list(engine.update_routers().shape)
    mine = meshes.dp_rank == 1
    return any_rank(mine), any_rank(False), counts, engine.grad_norm().item()


def test_ranks_agree_and_a_dense_model_trains(pool: Pool) -> None:
    answers = pool.run(2, agree, 2)
    for flagged, quiet, counts, norm in answers:
        assert (flagged, quiet, counts) == (True, False, [0, 0])
        assert math.isfinite(norm)
        assert norm > 0.0


def sent_and_said(case: Case, steps: int) -> tuple[int, dict[str, int | None] | None]:
    """Bytes that this rank's all-to-alls sent to others in the last step; what the engine says."""
    engine, meshes = build(case)
    rank, sent, all_to_all = meshes.expert.get_local_rank(), 0, dist.all_to_all_single

    def watched(
        out: Tensor, given: Tensor, arriving: list[int], splits: list[int], **group: Any
    ) -> Any:
        nonlocal sent
        row_bytes = given[:1].numel() * given.element_size()
        sent += row_bytes * (sum(splits) - splits[rank])
        return all_to_all(out, given, arriving, splits, **group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", watched)
        for step in range(steps):
            for parameter in engine.parameters():
                parameter.grad = None
            sent = 0
            engine.forward_backward(rows_of(batch_of_step(step), meshes))
    return sent, engine.dispatch_bytes()


def test_bytes_of_the_last_step(pool: Pool) -> None:
    for case in (
        Case(shards=2, ep=2),
        Case(shards=2, ep=2, scale_up=1),
        Case(shards=2, ep=2, pp=2, scale_up=2),
    ):
        answers = pool.run(case.world, sent_and_said, case, 2)
        total = sum(sent for sent, _ in answers)
        assert total > 0
        across = {None: None, 1: total, 2: 0}[case.scale_up]
        inside = None if across is None else total - across
        expected = {"total": total, "inside": inside, "across": across}
        assert [said for _, said in answers] == [expected] * case.world
    assert pool.run(1, sent_and_said, Case(), 1) == [(0, None)]
