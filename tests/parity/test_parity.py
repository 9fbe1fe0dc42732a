"""Same recipe, same loss, any layout: each way to lay the work against one process by the book."""

import pytest
import torch
from torch import Tensor

from tests.parity.cases import Case, config_of
from tests.parity.compare import Comparison, compare
from tests.parity.layouts import LAYOUTS
from tests.parity.reference import Reference, reference
from tests.parity.run import build, train, whole
from tests.parity.table import TABLE, rows_in, write_table
from titan_moe.check.pool import Pool
from titan_moe.config.checks import run_checks

# Eight processes on two cores take long, and each of their products is there on four too.
TRAINED = [
    pytest.param(case, marks=pytest.mark.nightly) if case.world > 4 else case for case in LAYOUTS
]


@pytest.fixture(scope="module")
def comparisons() -> dict[Case, list[Comparison]]:
    """Of every layout that was run and found right, one per rank."""
    return {}


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_three_steps_equal_one_process(
    pool: Pool, comparisons: dict[Case, list[Comparison]], case: Case
) -> None:
    expected = reference(case.family)
    of_ranks = [compare(trace, expected) for trace in pool.run(case.world, train, case)]
    assert [comparison.faults for comparison in of_ranks] == [()] * case.world
    comparisons[case] = of_ranks


def test_the_table_has_a_row_for_every_layout(comparisons: dict[Case, list[Comparison]]) -> None:
    """After a whole run, nightly layouts among it, it is written anew if it had not."""
    rows = [(str(case), case.world) for case in LAYOUTS]
    if rows_in(TABLE) != rows and comparisons.keys() == set(LAYOUTS):
        write_table(TABLE, [(case, comparisons[case]) for case in LAYOUTS])
    remedy = "./run_tests.sh --nightly tests/parity writes it anew"
    assert rows_in(TABLE) == rows, f"{TABLE} is stale: {remedy}"


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_no_layout_is_refused(case: Case) -> None:
    assert run_checks(config_of(case), case.world, on_disk=False) == []


def initial_values(case: Case) -> list[tuple[str, Tensor]]:
    engine, _ = build(case)
    return [
        (name, whole(tensor))
        for part in engine.parts
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
    ]


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(shards=4),
        Case(replicas=2, shards=2),
        Case(tp=2, shards=2),
        Case(tp=2, shards=2, ep=4),
        Case("grouped_query", pp=2, schedule="ZBVZeroBubble"),
    ],
    ids=str,
)
def test_initial_values_are_the_same_bits(pool: Pool, case: Case) -> None:
    """Memory was poisoned with NaN before it was initialised: none is left."""
    model = Reference(case.family).model
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    seen = set()
    for values in pool.run(case.world, initial_values, case):
        for name, value in values:
            assert torch.equal(value, expected[name]), name
            assert not value.isnan().any(), name
            seen.add(name)
    assert seen == expected.keys()
