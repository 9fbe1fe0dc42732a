"""Experts and their dispatcher: grouped against the loop, both against one token at a time.

T tokens, D hidden, E experts, K experts chosen per token.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.layers.helpers import error, fill
from tests.tolerances import BF16_ROUNDED, FP32_REORDERED
from titan_moe.layers.dispatcher import LocalDispatcher
from titan_moe.layers.experts import Experts

T, D, E, K = 24, 16, 6, 2
IDS = {
    "spread": torch.arange(T * K).view(T, K) % E,
    "one expert": torch.stack([torch.full((T,), 3), torch.full((T,), 3)], dim=1),
    "idle first and last": torch.arange(T * K).view(T, K) % 2 * 2 + 1,
    "reversed": (torch.arange(T * K).view(T, K) // 8 % E).flip(0, 1),
    "no token": torch.zeros(0, K, dtype=torch.int64),
}


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until someone writes them."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def run(
    backend: str, ids_TK: Tensor, dtype: torch.dtype, hidden: int = D, inner: int = 8
) -> list[Tensor]:
    """Output, and gradients of inputs, router weights and expert weights."""
    experts = fill(Experts(E, hidden, inner, std=0.3)).to(dtype)
    experts.backend = backend
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(len(ids_TK), hidden, generator=generator).to(dtype).requires_grad_()
    weights_TK = torch.rand(ids_TK.shape, generator=generator).requires_grad_()
    dispatcher = LocalDispatcher(E)
    rows_RD, row_weights_R, offsets_E, handle = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    out_TD = dispatcher.combine(experts(rows_RD, offsets_E, row_weights_R), handle)
    out_TD.square().sum().backward()
    leaves = [x_TD, weights_TK, experts.gate, experts.up, experts.down]
    return [out_TD.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IDS)
def test_grouped_equals_loop(name: str, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: FP32_REORDERED, torch.bfloat16: BF16_ROUNDED}[dtype]
    grouped, loop = run("grouped", IDS[name], dtype), run("loop", IDS[name], dtype)
    assert len(grouped) == 6
    for x, reference in zip(grouped, loop, strict=True):
        assert x.isfinite().all()
        assert error(x, reference) < tolerance


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "inner"), [(15, 8), (16, 5), (13, 7)])
def test_any_width(hidden: int, inner: int, dtype: torch.dtype) -> None:
    """torch's kernel takes rows of whole 16 bytes alone."""
    tolerance = {torch.float32: FP32_REORDERED, torch.bfloat16: BF16_ROUNDED}[dtype]
    results = [
        run(backend, IDS["idle first and last"], dtype, hidden, inner)
        for backend in ("grouped", "loop")
    ]
    for x, reference in zip(*results, strict=True):
        assert x.shape == reference.shape
        assert error(x, reference) < tolerance


def test_loop_equals_one_token_at_a_time() -> None:
    experts, ids_TK = fill(Experts(E, D, 8, std=0.3)), IDS["spread"]
    x_TD, weights_TK = torch.randn(T, D), torch.rand(T, K)
    dispatcher = LocalDispatcher(E)
    experts.backend = "loop"
    rows_RD, row_weights_R, offsets_E, handle = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    out_TD = dispatcher.combine(experts(rows_RD, offsets_E, row_weights_R), handle)
    for t in range(T):
        expected_D = torch.zeros(D)
        for k in range(K):
            e = int(ids_TK[t, k])
            inner = F.silu(x_TD[t] @ experts.gate[e]) * (x_TD[t] @ experts.up[e])
            expected_D += weights_TK[t, k] * (inner @ experts.down[e])
        assert error(out_TD[t], expected_D) < FP32_REORDERED


@pytest.mark.parametrize("name", IDS)
def test_dispatch_keeps_its_contract(name: str) -> None:
    ids_TK = IDS[name]
    x_TD = torch.arange(len(ids_TK) * 1.0)[:, None].expand(-1, D).bfloat16()
    weights_TK = torch.rand(len(ids_TK), K)
    rows_RD, row_weights_R, offsets_E, handle = LocalDispatcher(E).dispatch(
        x_TD, ids_TK, weights_TK
    )
    assert rows_RD.dtype == torch.bfloat16
    assert row_weights_R.dtype == torch.float32
    assert offsets_E.dtype == torch.int32
    assert offsets_E.tolist() == [int((ids_TK <= e).sum()) for e in range(E)]
    assert len(rows_RD) == len(row_weights_R) == ids_TK.numel() == offsets_E[-1]
    # Every (expert, token, weight) arrives once, where its expert's rows are.
    expert_R = torch.searchsorted(offsets_E, torch.arange(len(rows_RD)), right=True)
    arrived = zip(expert_R.tolist(), rows_RD[:, 0].tolist(), row_weights_R.tolist(), strict=True)
    sent = [(int(ids_TK[t, k]), t, float(weights_TK[t, k])) for t in range(len(ids_TK)) for k in range(K)]  # fmt: skip  # noqa: E501
    assert sorted(arrived) == sorted(sent)
    # Combining sums in fp32 what bf16 would lose.
    out_TD = LocalDispatcher(E).combine(row_weights_R[:, None].expand(-1, D).contiguous(), handle)
    assert out_TD.dtype == torch.float32
    assert torch.allclose(out_TD[:, 0], weights_TK.sum(dim=1))


def test_backward_is_deterministic() -> None:
    """Four choices per token: sums of two would come out alike in any order."""
    generator = torch.Generator().manual_seed(2)
    ids_TK = torch.randint(0, E, (4096, 4), generator=generator)
    first, *others = (run("grouped", ids_TK, torch.float32) for _ in range(4))
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))
