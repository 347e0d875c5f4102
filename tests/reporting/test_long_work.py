"""Long work shows a bar on a terminal, and nothing where its output goes elsewhere."""

import io
import sys

from keras_mp.reporting.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def work():
    with progress("trainings", 2) as tell:
        tell("float32, seed 0")
        tell("bfloat16, seed 0", 1)


def test_a_terminal_shows_how_far_the_work_is(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    work()
    shown = sys.stderr.getvalue()
    assert "trainings" in shown and "1/2" in shown and "left:" in shown and "bfloat16, seed 0" in shown


def test_elsewhere_it_is_silent(capsys):
    work()
    assert capsys.readouterr() == ("", "")
