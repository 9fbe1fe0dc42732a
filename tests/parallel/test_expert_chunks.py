"""Experts in chunks: what autograd holds on to is bounded, and no gradient tells the difference.

R rows, D hidden, F inner width, E experts.
"""

import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.layers.helpers import error, fill
from tests.parity.cases import Case
from tests.parity.run import Trace, train
from tests.tolerances import FP32_REORDERED, PARITY_GRADIENT_ERROR
from titan_moe.check.pool import Pool
from titan_moe.config.sections import Parallelism
from titan_moe.layers.experts import Experts
from titan_moe.passes.expert_chunks import apply_expert_chunks

D, F, E, LIMIT = 8, 64, 5, 12
FP32 = 4


def experts(limit: int | None) -> Experts:
    model: Experts = fill(Experts(E, D, F, std=0.3))
    if limit is not None:
        apply_expert_chunks(nn.ModuleDict({"experts": model}), Parallelism(max_expert_tokens=limit))
    return model


def rows_of(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """What experts are given: rows, where each expert's end, and the rows' weights."""
    rows_RD = torch.randn(sum(sizes), D, generator=torch.Generator().manual_seed(2))
    weights_R = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(3))
    ends_E = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return rows_RD.requires_grad_(), ends_E, weights_R.requires_grad_()


def held(run: Callable[[], Tensor], model: nn.Module) -> tuple[int, int]:
    """Bytes that autograd keeps after `run`, and the most rows inside experts alive at a time.

    The latter over forward and backward, as the rows of results of silu that somebody still holds.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, most, silu = 0, 0, torch.nn.functional.silu
    inside: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        if tensor.untyped_storage().data_ptr() not in weights:
            kept += tensor.numel() * tensor.element_size()
        return tensor

    def watched(x: Tensor) -> Tensor:
        nonlocal most
        out = silu(x)
        inside.append(weakref.ref(out))
        most = max(most, sum(len(alive) for ref in inside if (alive := ref()) is not None))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "silu", watched)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out_RD = run()
        out_RD.backward(torch.ones_like(out_RD))
    return kept, most


@pytest.mark.parametrize(
    "sizes",
    [
        [40, 0, 3, 30, 7],  # chunks begin and end within an expert, and between two
        [0, 0, 80, 0, 0],
        [12, 12, 12, 12, 12],
        [1, 0, 0, 0, 12],
        [12, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ],
    ids=str,
)
def test_chunks_change_nothing(sizes: list[int]) -> None:
    results = []
    for limit in (LIMIT, None):
        model, given = experts(limit), rows_of(sizes)
        out_RD = model(*given)
        out_RD.backward(torch.linspace(-1, 1, out_RD.numel()).view_as(out_RD))
        rows_RD, _, weights_R = given
        results.append(
            [out_RD, rows_RD.grad, weights_R.grad, *(p.grad for p in model.parameters())]
        )
        with torch.no_grad():
            assert torch.equal(model(*given), out_RD)
    for chunked, plain in zip(*results, strict=True):
        assert chunked is not None
        assert plain is not None
        assert error(chunked, plain) < FP32_REORDERED


def test_what_is_held_does_not_grow_with_the_rows() -> None:
    for rows in (60, 600):
        given = rows_of([0, rows, 0, 0, 0])
        plain, chunked = experts(None), experts(LIMIT)
        kept, alive = held(lambda m=plain, g=given: m(*g), plain)
        # Two projections, silu of one, and their product; and what comes out, to weigh.
        assert kept >= rows * (4 * F + D) * FP32
        assert alive == rows
        kept, alive = held(lambda m=chunked, g=given: m(*g), chunked)
        offsets = -(-rows // LIMIT) * E  # of each chunk
        assert kept <= (rows * (D + 1) + offsets) * FP32  # rows and weights as they came in
        assert LIMIT <= alive <= 2 * LIMIT


def test_below_the_limit_nothing_is_recomputed() -> None:
    model = experts(LIMIT)
    calls, silu = 0, torch.nn.functional.silu

    def counting(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return silu(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "silu", counting)
        for rows, expected in ((LIMIT, 1), (LIMIT + 1, 4)):
            calls = 0
            model(*rows_of([0, rows, 0, 0, 0])).square().sum().backward()
            assert calls == expected


def test_backward_in_parts_keeps_nothing() -> None:
    """As a schedule that splits backward takes it: for what came in, then for the weights."""
    model, (rows_RD, ends_E, weights_R) = experts(LIMIT), rows_of([0, 600, 0, 0, 0])
    plain, most, silu = experts(None), 0, torch.nn.functional.silu
    inside: list[weakref.ref[Tensor]] = []

    def watched(x: Tensor) -> Tensor:
        nonlocal most
        out = silu(x)
        inside.append(weakref.ref(out))
        most = max(most, sum(len(alive) for ref in inside if (alive := ref()) is not None))
        return out

    out_RD = plain(rows_RD, ends_E, weights_R)
    expected = torch.autograd.grad(out_RD.square().sum(), [rows_RD, weights_R, *plain.parameters()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "silu", watched)
        loss = model(rows_RD, ends_E, weights_R).square().sum()
        came_in = torch.autograd.grad(loss, [rows_RD, weights_R], retain_graph=True)
        of_weights = torch.autograd.grad(loss, list(model.parameters()))
    assert len(inside) == 3 * 50  # forward, and once for each part
    assert most <= 2 * LIMIT
    for got, wanted in zip([*came_in, *of_weights], expected, strict=True):
        assert error(got, wanted) < FP32_REORDERED


def test_log_and_refusal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "titan_moe.passes.expert_chunks"):
        experts(LIMIT)
    assert caplog.messages == ["expert chunks: 1 layers, 12 rows at once"]
    with pytest.raises(ValueError, match="max_expert_tokens = 3, but no layer of the model has"):
        apply_expert_chunks(nn.Linear(2, 2), Parallelism(max_expert_tokens=3))
    of_pipeline = Parallelism(max_expert_tokens=3, pipeline_parallel_degree=2)
    apply_expert_chunks(nn.Linear(2, 2), of_pipeline)  # a stage of it may be without


def both(case: Case) -> Trace:
    return train(case, steps=1)


@pytest.mark.parametrize(
    "case",
    [
        Case(shards=2, max_expert_tokens=5),
        Case(shards=2, max_expert_tokens=5, recompute="full"),
        Case(shards=2, ep=2, max_expert_tokens=5, recompute="full"),
    ],
    ids=str,
)
def test_under_fsdp_and_recomputation(pool: Pool, case: Case) -> None:
    expected = pool.run(1, both, Case())[0]
    for trace in pool.run(2, both, case):
        for name, gradient in expected.gradients[0].items():
            assert error(trace.gradients[0][name], gradient) < PARITY_GRADIENT_ERROR, name
