"""A state is a place in a plan, so a plan may not change between releases of one version of states.

If this test fails, a policy deals otherwise than it did: raise ``packload.plan.state.VERSION``, and put the
new digests here.
"""

from __future__ import annotations

import numpy as np
import pytest

from packload.plan.state import VERSION, digest
from tests.packload.plan.plans import POLICIES

DIGESTS = {
    "random": "c64955b4cfb5525bbd3d14ec",
    "bucket": "74f33a0bc50b4e417bf2c0ec",
    "budget_of_small_samples": "4f8e81bdb7f731460753f784",
    "budget_of_large_samples": "b57e1e5a8355263d3360ce40",
    "budget_padded": "43e0a8b29e277136f7ab5641",
    "several_budgets": "011995975591f5dbbac91716",
    "budget_in_fractions": "62cf3f4cc6910996da628dfa",
    "fixed": "3184fafc41204b62effc505c",
}


@pytest.mark.parametrize("name", POLICIES)
def test_plans_of_one_version_are_the_same_in_every_release(name):
    lengths = [(7 * i * i + 3 * i) % 50 for i in range(40_000)]
    windows = POLICIES[name](lengths, rank=0, world_size=2, seed=3).windows(epoch=1)
    parts = [part for window in windows for part in (window.units.astype(np.int64), window.splits)]
    assert (VERSION, digest(*parts)) == (1, DIGESTS[name])
