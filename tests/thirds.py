"""Slow cases of a test: continuous integration runs every third, `make test-all` each."""

import pytest


def thirds(cases):
    """Parameters of each case, a tuple or a single argument."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.slow] + [pytest.mark.rare] * (place % 3 != 0),
        )
        for place, case in enumerate(cases)
    ]
