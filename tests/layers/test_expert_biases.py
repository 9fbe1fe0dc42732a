"""Experts with biases and a clamped activation: both backends against transformers' gpt-oss.

T tokens, D hidden, F inner width, E experts, K experts chosen per token, R rows.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tests.layers.helpers import error, fill
from tests.tolerances import BF16_ROUNDED, FP32_REORDERED
from titan_moe.layers.dispatcher import LocalDispatcher
from titan_moe.layers.experts import ClampedSwiGLU, Experts, swiglu

T, D, F, E, K = 24, 16, 8, 6, 2
WEIGHTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
# From fp32 numbers: three matmuls, biases and the activation are rounded one after the other.
BF16_CHAIN = 2 * BF16_ROUNDED
IDS = {
    "spread": torch.arange(T * K).view(T, K) % E,
    "one expert": torch.full((T, K), 3),
    "idle first and last": torch.arange(T * K).view(T, K) % 2 * 2 + 1,
    "no token": torch.zeros(0, K, dtype=torch.int64),
}


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until someone writes them."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def experts_of(dtype: torch.dtype, inner: int = F) -> Experts:
    """Inputs of the activation come out on both sides of the clamps."""
    activation = ClampedSwiGLU(alpha=1.702, limit=1.5)
    experts: Experts = fill(Experts(E, D, inner, std=0.3, bias=True, activation=activation))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in WEIGHTS[3:]:
            experts.get_parameter(name).normal_(generator=generator)
    return experts.to(dtype)


def given(ids_TK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(len(ids_TK), D, generator=generator).to(dtype).requires_grad_()
    return x_TD, torch.rand(ids_TK.shape, generator=generator).requires_grad_()


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def run(backend: str, ids_TK: Tensor, dtype: torch.dtype, inner: int = F) -> dict[str, Tensor]:
    """Output, and gradients of inputs, router weights and expert weights, by name."""
    experts = experts_of(dtype, inner)
    experts.backend = backend  # type: ignore[assignment]
    x_TD, weights_TK = given(ids_TK, dtype)
    dispatcher = LocalDispatcher(E)
    rows_RD, row_weights_R, offsets_E, handle = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    out_TD = dispatcher.combine(experts(rows_RD, offsets_E, row_weights_R), handle)
    out_TD.square().sum().backward()
    leaves = {"x": x_TD, "weights": weights_TK}
    leaves |= {name: experts.get_parameter(name) for name in WEIGHTS}
    return {"out": out_TD.detach(), **{name: gradient(leaf) for name, leaf in leaves.items()}}


def truth(ids_TK: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same by transformers, in fp32 from the same (rounded) numbers."""
    ours = experts_of(dtype).float()
    config = GptOssConfig(
        num_local_experts=E,
        hidden_size=D,
        intermediate_size=F,
        swiglu_alpha=1.702,
        swiglu_limit=1.5,
        num_hidden_layers=1,
    )
    theirs = GptOssExperts(config)
    with torch.no_grad():
        for half, name in enumerate(("gate", "up")):  # interleaved
            theirs.gate_up_proj[..., half::2] = ours.get_parameter(name)
            theirs.gate_up_proj_bias[..., half::2] = ours.get_parameter(f"{name}_bias")
        theirs.down_proj.copy_(ours.down)
        theirs.down_proj_bias.copy_(ours.down_bias)
    x_TD, weights_TK = given(ids_TK, dtype)
    x_TD = x_TD.detach().float().requires_grad_()
    out_TD = theirs(x_TD, ids_TK, weights_TK)
    out_TD.square().sum().backward()
    both, biases = gradient(theirs.gate_up_proj), gradient(theirs.gate_up_proj_bias)
    return {
        "out": out_TD.detach(),
        "x": gradient(x_TD),
        "weights": gradient(weights_TK),
        "gate": both[..., ::2],
        "up": both[..., 1::2],
        "down": gradient(theirs.down_proj),
        "gate_bias": biases[..., ::2],
        "up_bias": biases[..., 1::2],
        "down_bias": gradient(theirs.down_proj_bias),
    }


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["grouped", "loop"])
@pytest.mark.parametrize("name", [name for name in IDS if name != "no token"])
def test_values_and_every_gradient(name: str, backend: str, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: FP32_REORDERED, torch.bfloat16: BF16_CHAIN}[dtype]
    got, expected = run(backend, IDS[name], dtype), truth(IDS[name], dtype)
    assert got.keys() == expected.keys()
    for key, wanted in expected.items():
        assert error(got[key], wanted) < tolerance, key


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["grouped", "loop"])
def test_no_row_at_all(backend: str, dtype: torch.dtype) -> None:
    """Each weight still has a gradient, for ranks that wait for it: zero."""
    for name, value in run(backend, IDS["no token"], dtype).items():
        assert torch.equal(value, torch.zeros_like(value)), name


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_width(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: FP32_REORDERED, torch.bfloat16: BF16_ROUNDED}[dtype]
    results = [run(b, IDS["idle first and last"], dtype, inner=5) for b in ("grouped", "loop")]
    for name, value in results[0].items():
        assert error(value, results[1][name]) < tolerance, name


def test_the_clamps_take_part() -> None:
    """Otherwise the comparison above would not know of them."""
    experts, (x_TD, _) = experts_of(torch.float32), given(IDS["spread"], torch.float32)
    gate_ETF = x_TD @ experts.gate + experts.gate_bias[:, None]
    up_ETF = x_TD @ experts.up + experts.up_bias[:, None]
    assert (gate_ETF > 1.5).any()
    assert (gate_ETF < -1.5).any()  # stays as it is
    assert (up_ETF.abs() > 1.5).any()
    assert (up_ETF < -1.5).any()


def test_bias_gradients_do_not_lose_small_terms() -> None:
    """bf16 stops counting at 256: a sum of rows is formed in more than that, and in one order."""
    experts = experts_of(torch.bfloat16)
    rows, expert = 5000, 2
    rows_RD = torch.zeros(rows, D, dtype=torch.bfloat16)
    offsets_E = torch.tensor([0] * expert + [rows] * (E - expert), dtype=torch.int32)
    for _ in range(2):
        experts.zero_grad()
        experts(rows_RD, offsets_E, torch.ones(rows)).sum().backward()
        expected_ED = torch.zeros(E, D, dtype=torch.bfloat16)
        expected_ED[expert] = rows
        assert torch.equal(gradient(experts.down_bias), expected_ED)


def test_backward_is_deterministic() -> None:
    ids_TK = torch.randint(0, E, (4096, 4), generator=torch.Generator().manual_seed(2))
    first, *others = (run("grouped", ids_TK, torch.float32) for _ in range(3))
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tracer_and_the_meta_device_see_shapes_alone(dtype: torch.dtype) -> None:
    experts = experts_of(dtype)
    rows_RD = torch.randn(T, D).to(dtype)
    offsets_E = torch.tensor([3, 3, 10, 20, 24, 24], dtype=torch.int32)
    inputs = rows_RD, offsets_E, torch.rand(T)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    outputs = [compiled(*inputs), experts(*inputs)]
    gradients = [torch.autograd.grad(out.sum(), list(experts.parameters())) for out in outputs]
    assert torch.equal(*outputs)
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))
    on_meta = experts.to("meta")
    out_RD = on_meta(*(x.to("meta") for x in inputs))
    out_RD.sum().backward()
    assert out_RD.shape == (T, D)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in on_meta.parameters())


def test_without_being_asked_there_is_no_bias() -> None:
    experts = Experts(E, D, F, std=0.3)
    assert set(dict(experts.named_parameters())) == set(WEIGHTS[:3])
    assert experts.activation is swiglu
