"""Attention with windows and sinks: each backend against the reference, that against a loop.

B batch, S queries, T keys, H query heads, G key heads, D width of queries and keys, V of values.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers.helpers import error
from tests.layers.test_attention import CAUSAL, DOCUMENTS, TOLERANCE, Case
from tests.tolerances import FP32_REORDERED
from titan_moe.layers import blocked, flex
from titan_moe.layers.attention import attention, backend_for
from titan_moe.layers.grouped_query import GroupedQueryAttention
from titan_moe.layers.mask import AttentionMask

CASES = CAUSAL | DOCUMENTS
SCALE = 0.3
# Narrower than a block of queries, as wide, wider than one and two, almost and wholly the row.
WINDOWS = [None, 1, 5, 16, 17, 40, 49, 50, 1000]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last of them not full."""
    monkeypatch.setattr(blocked, "BLOCK", 16)


def sinks_of(case: Case, dtype: torch.dtype) -> Tensor:
    """As strong as other scores are, one of them by far the strongest."""
    return torch.linspace(-2.0, 5.0, case.heads).to(dtype).requires_grad_()


def gradient_of(out: Tensor) -> Tensor:
    """The same numbers in every dtype."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).bfloat16().to(out.dtype)


def run(backend: str, inputs: list[Tensor], case: Case, window: int | None) -> list[Tensor]:
    """Output, and gradients of all inputs, for a fixed gradient of the output.

    inputs: q, k and v, and sinks or not.
    """
    q, k, v, *sinks = inputs
    sinks_H = sinks[0] if sinks else None
    out = attention(
        q, k, v, scale=SCALE, mask=case.mask(), window=window, sinks_H=sinks_H, backend=backend
    )
    out.backward(gradient_of(out))
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def inputs_of(case: Case, dtype: torch.dtype, with_sinks: bool) -> list[Tensor]:
    return [*case.inputs(dtype), *([sinks_of(case, dtype)] if with_sinks else [])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", CASES)
def test_blocked_equals_reference(
    name: str, window: int | None, with_sinks: bool, dtype: torch.dtype
) -> None:
    """The truth is fp32 throughout, from the same (rounded) inputs."""
    inputs = inputs_of(CASES[name], dtype, with_sinks)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    results = run("blocked", inputs, CASES[name], window)
    truth = run("reference", exact, CASES[name], window)
    assert len(results) == len(truth) == 1 + len(inputs)
    for x, reference in zip(results, truth, strict=True):
        assert x.dtype == dtype
        assert x.shape == reference.shape
        assert error(x, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["grouped", "grouped documents", "padding"])
@pytest.mark.parametrize("window", [None, 1, 5, 20])
def test_reference_equals_a_loop_over_queries(name: str, window: int | None) -> None:
    """A softmax written out, the sink in its sum alone; gradients by the loop's own autograd."""
    case = CASES[name]
    inputs = inputs_of(case, torch.float32, True)
    results = run("reference", inputs, case, window)
    q, k, v, sinks_H = doubles = [x.detach().double().requires_grad_() for x in inputs]
    mask = case.mask()
    ids = torch.zeros(2, case.seq) if mask is None else mask.documents_BS
    rows = []
    for b in range(2):
        for s in range(case.seq):
            first = 0 if window is None else max(0, s - window + 1)
            seen = [t for t in range(first, s + 1) if ids[b, t] == ids[b, s]]
            for h in range(case.heads):
                g = h * case.key_heads // case.heads
                terms = (k[b, seen, g] @ q[b, s, h] * SCALE).exp()
                rows.append(terms @ v[b, seen, g] / (terms.sum() + sinks_H[h].exp()))
    out = torch.stack(rows).view(2, case.seq, case.heads, case.v_width)
    out.backward(gradient_of(out))
    for x, expected in zip(results, [out, *(x.grad for x in doubles)], strict=True):
        assert expected is not None
        assert error(x, expected) < FP32_REORDERED


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("window", [1, 7, 20, None])
def test_a_slice_of_queries_counts_its_window_within_the_row(
    backend: str, window: int | None
) -> None:
    """A piece of each end, as a balanced split over processes holds them, in one block or two."""
    case = DOCUMENTS["grouped documents"]
    q, k, v, sinks_H = (x.detach() for x in inputs_of(case, torch.float32, True))
    settings: dict[str, Any] = {"scale": SCALE, "window": window, "sinks_H": sinks_H}
    whole = attention(q, k, v, mask=case.mask(), backend="reference", **settings)
    ids, order = case.document_ids(), torch.arange(case.seq)
    for piece in (torch.cat([order[5:14], order[-7:]]), torch.cat([order[:13], order[-13:]])):
        mask = AttentionMask(order[piece], order, ids[:, piece], ids)
        out = attention(q[:, piece], k, v, mask=mask, backend=backend, **settings)
        assert error(out, whole[:, piece]) < FP32_REORDERED


@pytest.mark.parametrize("name", ["plain", "documents"])
def test_out_of_the_window_nothing_is_read(name: str) -> None:
    """Keys that no query of a block sees may hold anything, forward and backward."""
    case = replace(CASES[name], documents=((50,), (50,)) if CASES[name].documents else ())
    q, k, v = (x.detach() for x in case.inputs(torch.float32))
    k[:, :10], v[:, :10] = float("nan"), float("nan")
    k.requires_grad_()
    out = attention(q, k, v, scale=SCALE, mask=case.mask(), window=4, backend="blocked")
    late = out[:, 32:]  # the third block sees keys from 29 on
    assert late.isfinite().all()
    late.sum().backward()
    assert k.grad is not None
    assert k.grad[:, 32:].isfinite().all()


def test_a_sink_out_of_reach_is_none_and_a_strong_one_takes_all() -> None:
    case = CAUSAL["grouped"]
    q, k, v = (x.detach() for x in case.inputs(torch.float32))
    plain = attention(q, k, v, scale=SCALE, mask=None)
    for sink, share in ((-1e4, 1.0), (1e4, 0.0)):
        sinks_H = torch.full((case.heads,), sink)
        out = attention(q, k, v, scale=SCALE, mask=None, sinks_H=sinks_H)
        assert torch.equal(out, share * plain)


def test_a_tracer_sees_one_operator() -> None:
    case = DOCUMENTS["grouped documents"]
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = inputs_of(case, torch.float32, True)
    gradients = []
    for function in (compiled, attention):
        q, k, v, sinks_H = inputs
        out = function(q, k, v, scale=SCALE, mask=case.mask(), window=9, sinks_H=sinks_H)
        gradients.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_on_meta() -> None:
    case = DOCUMENTS["grouped documents"]
    inputs = inputs_of(case, torch.bfloat16, True)
    q, k, v, sinks_H = (x.detach().to("meta").requires_grad_() for x in inputs)
    out = attention(q, k, v, scale=SCALE, mask=None, window=9, sinks_H=sinks_H)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v, sinks_H))


def test_backward_is_deterministic() -> None:
    case = Case(((100, 156), (256,)), seq=256, key_heads=2)
    first, second = (
        run("blocked", inputs_of(case, torch.bfloat16, True), case, 40) for _ in range(2)
    )
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("window", [None, 1, 7, 20])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", ["plain", "grouped", "documents", "padding", "grouped documents"])
def test_flex_computes_what_the_reference_does(
    name: str, with_sinks: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but its kernel, which needs CUDA: block mask, grouped heads, sinks, uncompiled."""
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    case = CASES[name]
    q, k, v, *sinks = (x.detach() for x in inputs_of(case, torch.float32, with_sinks))
    sinks_H, mask = sinks[0] if sinks else None, case.mask()
    block_mask = flex.block_mask_of(mask, window, case.seq, q.device)
    out = flex.attend(q, k, v, sinks_H, SCALE, block_mask)
    truth = attention(
        q, k, v, scale=SCALE, mask=mask, window=window, sinks_H=sinks_H, backend="reference"
    )
    assert error(out, truth) < FP32_REORDERED


def test_flex_gives_sinks_their_gradient() -> None:
    """Through the log-sum-exp, which here comes from scores written out."""
    case = CAUSAL["plain"]
    inputs = inputs_of(case, torch.float32, True)
    truth = run("reference", inputs, case, None)[1:]
    leaves = q, k, v, sinks_H = [x.detach().requires_grad_() for x in inputs]
    scores_BHST = torch.einsum("bshd,bthd->bhst", q, k) * SCALE
    scores_BHST = scores_BHST.masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf"))
    out_BHSV = torch.einsum("bhst,bthv->bhsv", scores_BHST.softmax(-1), v)
    out_BHSV = flex.beside_sinks(out_BHSV, scores_BHST.logsumexp(-1), sinks_H)
    out = out_BHSV.transpose(1, 2)
    out.backward(gradient_of(out))
    for x, expected in zip(leaves, truth, strict=True):
        assert x.grad is not None
        assert error(x.grad, expected) < FP32_REORDERED


def test_flex_keeps_a_mask_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with and without a window take turns, and every one but the first finds its own."""
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    mask, device = DOCUMENTS["documents"].mask(), torch.device("cpu")
    masks = [flex.block_mask_of(mask, window, 50, device) for window in (7, None) * 3]
    assert len({id(m) for m in masks}) == 2
    assert masks[0] is masks[2] is not masks[1]


def test_auto_and_refusals() -> None:
    q, k, v, sinks_H = (x.detach() for x in inputs_of(CAUSAL["plain"], torch.float32, True))
    assert backend_for("cuda", None) == "sdpa"
    assert backend_for("cuda", None, 4) == "flex"
    assert backend_for("cuda", None, None, sinks_H) == "flex"
    assert backend_for("cpu", None, 4, sinks_H) == "blocked"
    remedy = "leave training.attention_backend at auto"
    with pytest.raises(ValueError, match=f'"sdpa" has no windows: {remedy}'):
        attention(q, k, v, scale=1.0, mask=None, window=49, backend="sdpa")
    with pytest.raises(ValueError, match=f'"sdpa" has no sinks: {remedy}'):
        attention(q, k, v, scale=1.0, mask=None, sinks_H=sinks_H, backend="sdpa")
    with pytest.raises(ValueError, match="runs on CUDA, not on cpu"):
        attention(q, k, v, scale=1.0, mask=None, window=4, backend="flex")
    # A window that no key is out of is none.
    out = attention(q, k, v, scale=1.0, mask=None, window=50, backend="sdpa")
    assert error(out, attention(q, k, v, scale=1.0, mask=None)) < FP32_REORDERED


def test_a_layer_hands_on_its_window_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_moe.layers import grouped_query

    seen: dict[str, Any] = {}

    def watched(*given: Tensor, **settings: Any) -> Tensor:
        seen.update(settings)
        return attention(*given, **settings)

    monkeypatch.setattr(grouped_query, "attention", watched)
    layer = GroupedQueryAttention(8, 4, 2, 6, std=0.1, window=3, sinks=True)
    context: Any = type("Context", (), {"rotation": staticmethod(lambda x: x), "mask": None})
    layer(torch.randn(2, 5, 8), context)
    assert seen["window"] == 3
    assert seen["sinks_H"] is layer.sinks_H


@pytest.mark.parametrize("documents", [(), ((1024,), (1024,))], ids=["rows", "documents"])
def test_memory_is_that_of_a_window(
    documents: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block is wider than its queries' windows together, sinks included."""
    monkeypatch.setattr(blocked, "BLOCK", 32)
    widths: list[int] = []
    weights = blocked._weights

    def watched(*given: Any) -> Tensor:
        weights_LMW = weights(*given)
        widths.append(weights_LMW.shape[2])
        return weights_LMW

    monkeypatch.setattr(blocked, "_weights", watched)
    case = Case(documents, seq=1024)
    run("blocked", inputs_of(case, torch.float32, True), case, 48)
    assert len(widths) == 2 * 1024 // 32
    assert max(widths) == 32 + 48 - 1 + 1
