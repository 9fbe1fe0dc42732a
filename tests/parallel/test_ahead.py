"""Tokens further ahead: what each position reads and predicts, and what a step makes of it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.cases import Case
from tests.parity.reference import Reference
from tests.parity.run import build, gradients_of, rows_of
from tests.parity.tiny import ROWS, SEQ_LEN, batch_of_step
from tests.tolerances import PARITY_CURVE_RTOL, PARITY_GRADIENT_ERROR
from titan_moe.check.pool import Pool
from titan_moe.parallel import pipeline
from titan_moe.parallel.ahead import labels_ahead, labels_at_each_depth, look_ahead

MTP = "deepseek_v3_mtp"
N = -100


def packed(*lengths: int, joined: bool = False) -> tuple[list[int], list[int]]:
    """Tokens of one row of documents of these lengths, numbered on, and their labels.

    joined: a document's last token predicts the next one's first.
    """
    ends, total = set(), 0
    for length in lengths:
        total += length
        ends.add(total - 1)
    tokens = list(range(10, 10 + total))
    labels = [N if s in ends and not joined else tokens[s] + 1 for s in range(total)]
    return tokens, labels


def test_a_document_by_hand() -> None:
    _, labels = packed(1, 4, 9)
    ahead = labels_ahead(torch.tensor([labels]), 2)[0].T.tolist()
    assert ahead == [
        [N, 12, 13, 14, N, 16, 17, 18, 19, 20, 21, 22, 23, N],
        [N, 13, 14, N, N, 17, 18, 19, 20, 21, 22, 23, N, N],
        [N, 14, N, N, N, 18, 19, 20, 21, 22, 23, N, N, N],
    ]


def test_across_documents_and_up_to_the_rows_last_label() -> None:
    """The window is a token longer than the row: its label is known, what comes after is not."""
    _, labels = packed(2, 3, joined=True)
    ahead = labels_ahead(torch.tensor([labels]), 2)[0].T.tolist()
    assert ahead == [[11, 12, 13, 14, 15], [12, 13, 14, 15, N], [13, 14, 15, N, N]]


def test_rows_do_not_read_each_other_and_a_break_ends_all_that_lead_over_it() -> None:
    labels_BS = torch.tensor([[1, 2, N, 4, 5], [6, N, N, 9, N]])
    batch = look_ahead({"labels": labels_BS, "tokens": labels_BS}, 2)
    assert batch["labels"][0].T.tolist() == [[1, 2, N, 4, 5], [2, N, N, 5, N], [N, N, N, N, N]]
    assert batch["labels"][1].T.tolist() == [[6, N, N, 9, N], [N] * 5, [N] * 5]
    assert torch.equal(batch["next_tokens"], batch["labels"][:, :, :2])
    assert labels_at_each_depth(batch["labels"]).tolist() == [6, 2, 0]
    assert labels_at_each_depth(labels_BS).tolist() == [6]


def test_without_such_layers_the_batch_is_what_it_was() -> None:
    batch = batch_of_step(0)
    assert look_ahead(batch, 0) is batch


def documents(*lengths: int) -> dict[str, Tensor]:
    """A step whose every row is made of documents of these lengths, and padding."""
    batch = batch_of_step(0)
    filled, places = sum(lengths), [s for length in lengths for s in range(length)]
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    padding = SEQ_LEN - filled
    batch["document_ids"] = torch.tensor(ids + [-1] * padding).repeat(ROWS, 1)
    batch["positions"] = torch.tensor(places + [0] * padding).repeat(ROWS, 1)
    _, labels = packed(*lengths)
    has_label_S = torch.tensor(labels + [N] * padding) != N
    batch["labels"] = torch.where(has_label_S, batch["tokens"].roll(-1, dims=1), N)
    return batch


def step_of(
    case: Case, lengths: tuple[int, ...]
) -> tuple[float, float | None, list[list[int]], dict[str, Tensor]]:
    engine, meshes = build(case)
    output = engine.forward_backward(rows_of(documents(*lengths), meshes))
    gradients = gradients_of(engine.parts[0])
    mtp_loss = None if output.mtp_loss is None else output.mtp_loss.item()
    return output.loss.item(), mtp_loss, engine.update_routers().tolist(), gradients


@pytest.mark.parametrize("case", [Case(MTP, accumulation=4), Case(MTP, shards=4)], ids=str)
def test_one_and_nine_tokens(pool: Pool, case: Case) -> None:
    reference = Reference(MTP)
    expected = reference.step(documents(1, 9, 2))
    wanted = gradients_of(reference.model)
    for loss, mtp_loss, counts_LE, gradients in pool.run(case.world, step_of, case, (1, 9, 2)):
        assert loss == pytest.approx(expected.loss.item(), rel=PARITY_CURVE_RTOL)
        assert mtp_loss == pytest.approx(expected.mtp_loss.item(), rel=PARITY_CURVE_RTOL)
        assert counts_LE == expected.counts_LE.tolist()
        # A token known ahead is one that follows in its document: 12 positions, 9, 8 of them.
        tokens_L = [sum(counts_E) for counts_E in counts_LE]
        assert tokens_L == [2 * ROWS * known for known in (12, 12, 12, 9, 7)]
        for name, gradient in wanted.items():
            error = (gradients[name] - gradient).norm()
            assert error <= PARITY_GRADIENT_ERROR * gradient.norm(), name


def test_documents_too_short_for_the_second_depth(pool: Pool) -> None:
    """Two tokens have one label between them, and nothing further ahead: zero, not nan."""
    ((loss, mtp_loss, _, gradients),) = pool.run(1, step_of, Case(MTP), (3, 3, 3))
    assert mtp_loss is not None
    assert math.isfinite(loss)
    reference = Reference(MTP)
    ahead = reference.step(documents(3, 3, 3)).mtp_loss.item()  # of two depths, the second 0
    assert mtp_loss == pytest.approx(2 * ahead, rel=PARITY_CURVE_RTOL)
    assert not any(gradient.isnan().any() for gradient in gradients.values())
    ((loss, mtp_loss, _, gradients),) = pool.run(1, step_of, Case(MTP), (2, 2, 2))
    assert math.isfinite(loss)
    assert mtp_loss is not None
    assert math.isnan(mtp_loss), "no position has a token to predict ahead"
    assert not any(gradient.isnan().any() for gradient in gradients.values())


def validated(case: Case) -> bool:
    """Whether validation, between two steps, leaves counts and nats of what is ahead alone."""
    engine, meshes = build(case)
    engine.forward_backward(rows_of(batch_of_step(0), meshes))
    before = [b.clone() for part in engine.parts for b in part.buffers()]
    engine.evaluate(rows_of(batch_of_step(1), meshes))
    after = [b for part in engine.parts for b in part.buffers()]
    return all(map(torch.equal, before, after))


@pytest.mark.parametrize("case", [Case(MTP), Case(MTP, pp=2)], ids=str)
def test_validation_leaves_no_trace(pool: Pool, case: Case) -> None:
    assert pool.run(case.world, validated, case) == [True] * case.world


def shapes(case: Case) -> list[tuple[torch.Size, torch.Size]]:
    """What torch's schedule was told that each stage here gives, and what it gave."""
    told: list[torch.Size] = []
    gave: dict[nn.Module, torch.Size] = {}
    build_stage = pipeline.PipelineStage

    def recorded(*args: Any, output_args: Tensor, **kwargs: Any) -> Any:
        told.append(output_args.shape)
        return build_stage(*args, output_args=output_args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "PipelineStage", recorded)
        engine, meshes = build(case)
    for part in engine.parts:
        part.register_forward_hook(lambda part, args, out: gave.update({part: out.shape}))
    engine.forward_backward(rows_of(batch_of_step(0), meshes))
    return list(zip(told, gave.values(), strict=True))


def test_the_schedule_is_told_what_the_last_stage_gives(pool: Pool) -> None:
    of_first, of_last = pool.run(2, shapes, Case(MTP, pp=2, schedule="GPipe"))
    assert of_first == [(torch.Size([2, SEQ_LEN, 32]),) * 2]
    assert of_last == [(torch.Size([2, SEQ_LEN, 3 * 32]),) * 2]
