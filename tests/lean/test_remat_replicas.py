"""Blocks that recompute on several replicas, in a process of its own."""

from pathlib import Path

import pytest
from in_own_process import RARE, run


@pytest.mark.parametrize("part", [RARE])
def test_on_several_replicas(part):
    run(Path(__file__).parent / "remat_on_replicas.py", part, 4)
