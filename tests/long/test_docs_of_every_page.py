"""The Python of every page runs, each block on the backend it is for."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_docs import PROGRAMS, run_page


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, code in PROGRAMS.items() if code.strip()])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)
