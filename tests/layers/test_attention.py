"""Every backend against the naive reference, and the reference against a loop over queries.

B batch, S queries, T keys, H query heads, G key heads, D width of queries and keys, V of values.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from tests.layers.helpers import error
from tests.tolerances import BF16_ROUNDED, FP32_REORDERED
from titan_moe.layers import blocked
from titan_moe.layers.attention import attention, backend_for
from titan_moe.layers.mask import AttentionMask, plain_causal

TOLERANCE = {torch.float32: FP32_REORDERED, torch.bfloat16: BF16_ROUNDED}


@dataclass(frozen=True)
class Case:
    """Lengths of the documents in each row; whatever is left of S is padding. () for no mask."""

    documents: tuple[tuple[int, ...], ...]
    seq: int = 50
    heads: int = 4
    key_heads: int = 4
    qk_width: int = 12
    v_width: int = 8

    def mask(self) -> AttentionMask | None:
        return AttentionMask.of_documents(self.document_ids()) if self.documents else None

    def document_ids(self) -> Tensor:
        ids_BS = torch.full((2, self.seq), -1)
        for row, lengths in enumerate(self.documents):
            numbers = [d for d, length in enumerate(lengths) for _ in range(length)]
            ids_BS[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return ids_BS

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        shapes = [(self.heads, self.qk_width), (self.key_heads, self.qk_width)]
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(2, self.seq, *shape, generator=generator).to(dtype).requires_grad_()
            for shape in (*shapes, (self.key_heads, self.v_width))
        ]


CAUSAL = {
    "plain": Case(()),
    "one block": Case((), seq=16),
    "equal widths": Case((), v_width=12),
    "wide values": Case((), v_width=20),
    "grouped": Case((), key_heads=2),
    "one key head": Case((), key_heads=1),
}
DOCUMENTS = {
    "one document": Case(((50,), (50,))),
    "documents": Case(((7, 30, 13), (16, 16, 18))),
    "short documents": Case(((1,) * 50, (3,) * 16)),
    "padding": Case(((20, 10), (50,))),
    "only padding": Case(((), (50,))),
    "grouped documents": Case(((7, 30, 13), (40,)), key_heads=2),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last of them not full."""
    monkeypatch.setattr(blocked, "BLOCK", 16)


def run(backend: str, case: Case, dtype: torch.dtype, mask: AttentionMask | None) -> list[Tensor]:
    """Output, and gradients of q, k and v, for a fixed gradient of the output."""
    inputs = case.inputs(dtype)
    out = attention(*inputs, scale=0.3, mask=mask, backend=backend)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("backend", "name"),
    [("sdpa", name) for name in CAUSAL] + [("blocked", name) for name in CAUSAL | DOCUMENTS],
)
def test_backend_equals_reference(backend: str, name: str, dtype: torch.dtype) -> None:
    case = (CAUSAL | DOCUMENTS)[name]
    # The truth is fp32 throughout, from the same (rounded) inputs.
    inputs = [x.detach().float().requires_grad_() for x in case.inputs(dtype)]
    truth = attention(*inputs, scale=0.3, mask=case.mask(), backend="reference")
    generator = torch.Generator().manual_seed(1)
    truth.backward(torch.randn(truth.shape, generator=generator).to(dtype).float())

    results = run(backend, case, dtype, case.mask())
    for x, reference in zip(results, [truth, *(x.grad for x in inputs)], strict=True):
        assert x.dtype == dtype
        assert error(x, reference) < TOLERANCE[dtype]


def test_reference_equals_a_loop_over_queries() -> None:
    case = Case(((7, 30, 13), (20,)), key_heads=2)
    q, k, v = (x.detach().double() for x in case.inputs(torch.float32))
    out = attention(
        q.float(), k.float(), v.float(), scale=0.3, mask=case.mask(), backend="reference"
    )
    documents = case.document_ids().tolist()
    for b in range(2):
        for s in range(case.seq):
            seen = [t for t in range(s + 1) if documents[b][t] == documents[b][s]]
            for h in range(case.heads):
                weights = (k[b, seen, h // 2] @ q[b, s, h] * 0.3).softmax(0)
                assert error(out[b, s, h], weights @ v[b, seen, h // 2]) < FP32_REORDERED


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_slice_of_queries_over_all_keys_is_a_slice_of_the_whole(backend: str) -> None:
    case = DOCUMENTS["documents"]
    q, k, v = (x.detach() for x in case.inputs(torch.float32))
    ids, order = case.document_ids(), torch.arange(case.seq)
    whole = attention(q, k, v, scale=0.3, mask=case.mask(), backend="reference")
    # Two pieces, one from each end, as a balanced split over processes holds them.
    piece = torch.cat([order[5:20], order[-12:]])
    mask = AttentionMask(order[piece], order, ids[:, piece], ids)
    out = attention(q[:, piece], k, v, scale=0.3, mask=mask, backend=backend)
    assert error(out, whole[:, piece]) < FP32_REORDERED


def test_auto_is_blocked_on_cpu_and_names_a_way_out_elsewhere() -> None:
    case = DOCUMENTS["documents"]
    for x, y in zip(
        run("auto", case, torch.float32, case.mask()),
        run("blocked", case, torch.float32, case.mask()),
        strict=True,
    ):
        assert torch.equal(x, y)
    assert backend_for("cuda", None) == "sdpa"
    assert backend_for("cuda", case.mask()) == "flex"
    with pytest.raises(ValueError, match=r"by itself on mps: set training.attention_backend"):
        backend_for("mps", None)


def test_backends_refuse_what_they_cannot_do() -> None:
    q, k, v = Case(()).inputs(torch.float32)
    mask = DOCUMENTS["documents"].mask()
    with pytest.raises(ValueError, match=r"document_mask = false"):
        attention(q, k, v, scale=1.0, mask=mask, backend="sdpa")
    with pytest.raises(ValueError, match=r"runs on CUDA, not on cpu"):
        attention(q, k, v, scale=1.0, mask=mask, backend="flex")
    with pytest.raises(ValueError, match=r'"fast" is unknown'):
        attention(q, k, v, scale=1.0, mask=mask, backend="fast")


def test_padding_is_finite_and_zero_gradients_give_zero_gradients() -> None:
    case = DOCUMENTS["only padding"]
    inputs = case.inputs(torch.float32)
    out = attention(*inputs, scale=0.3, mask=case.mask(), backend="blocked")
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out, inputs, torch.zeros_like(out), retain_graph=True):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    # A sum's gradient is one number, expanded with stride 0.
    summed = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    ones = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(torch.equal(x, y) for x, y in zip(summed, ones, strict=True))


@pytest.mark.parametrize("with_documents", [False, True])
def test_no_backend_but_the_reference_forms_all_scores(
    with_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "BLOCK", 32)
    scores_bytes = 2 * 4 * 1024**2 * 4  # B·H·S·S floats
    large = largest_allocation("blocked", 1024, with_documents)
    assert large <= 2 * largest_allocation("blocked", 512, with_documents)
    assert large <= scores_bytes / 16
    if not with_documents:  # its blocks grow by steps
        assert largest_allocation("sdpa", 1024, with_documents) <= scores_bytes / 16
    # The meter does see a whole score matrix where there is one.
    assert largest_allocation("reference", 1024, with_documents) >= scores_bytes


def largest_allocation(backend: str, seq: int, with_documents: bool) -> int:
    """Bytes of the largest tensor that forward and backward ask the allocator for."""
    case = Case(((seq,), (seq,)) if with_documents else (), seq=seq)
    inputs = case.inputs(torch.float32)
    with profile(profile_memory=True) as record:
        out = attention(*inputs, scale=0.3, mask=case.mask(), backend=backend)
        out.backward(torch.ones_like(out))
    assert record.profiler is not None
    events = record.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def test_backward_is_deterministic() -> None:
    case = Case(((100, 156), (256,)), seq=256, key_heads=2)
    first, second = (run("blocked", case, torch.bfloat16, case.mask()) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_a_tracer_sees_one_operator() -> None:
    case = DOCUMENTS["documents"]
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = case.inputs(torch.float32)
    out = compiled(*inputs, scale=0.3, mask=case.mask(), backend="auto")
    eager = attention(*inputs, scale=0.3, mask=case.mask(), backend="auto")
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for x, y in zip(
        gradients, torch.autograd.grad(eager, inputs, torch.ones_like(out)), strict=True
    ):
        assert torch.equal(x, y)


def test_plain_causal_is_no_mask() -> None:
    assert plain_causal(torch.zeros(1, 4)) is None
