import subprocess
import sys

import pytest

QUIET = "from keras_mp.system.quiet_import import import_keras\nimport_keras()\nimport os, sys\nos.write(2, b'after')"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_nothing_is_written_and_stderr_is_back():
    done = run(QUIET)
    assert done.returncode == 0 and done.stderr == "after"


def test_a_failing_import_shows_what_was_written():
    noisy = (
        "import os, sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'keras':\n"
        "            os.write(2, b'the cause')\n"
        "            raise ImportError('broken')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    done = run(noisy + QUIET)
    assert done.returncode == 1 and "the cause" in done.stderr and "broken" in done.stderr
