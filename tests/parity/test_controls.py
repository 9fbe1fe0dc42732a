"""What the matrix is worth: each applier, broken on purpose, turns it red at the right place."""

import re

import pytest

from tests.parity.compare import compare
from tests.parity.controls import CONTROLS, Control
from tests.parity.layouts import LAYOUTS
from tests.parity.reference import reference
from tests.parity.run import train
from titan_moe.check.pool import Pool


@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_broken_controls_are_seen(pool: Pool, control: Control) -> None:
    case = control.case
    assert case in LAYOUTS, "what is broken here must be green there"
    expected = reference(case.family, steps=1)
    for trace in pool.run(case.world, train, case, 1, control.break_it):
        faults = compare(trace, expected).faults
        assert any(re.search(control.red, fault) for fault in faults), faults
