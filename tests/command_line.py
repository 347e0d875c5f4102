"""Runs `keras-mp` in this process, which has imported everything: a process of its own takes seconds to start."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import keras
import pytest

from keras_mp import cli


def run(*arguments, columns=160, cwd=None, backend=None):
    """What a process of its own would end with: its status and both streams.

    It is one where the command needs another backend than this process has.
    """
    argv = ["keras-mp", *map(str, arguments)]
    environment = {"COLUMNS": str(columns), "KERAS_BACKEND": backend or keras.backend.backend()}  # export sets it, too
    if environment["KERAS_BACKEND"] != keras.backend.backend():
        environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "keras_mp.cli", *argv[1:]]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as scope:
        scope.enter_context(contextlib.chdir(cwd or os.curdir))
        scope.enter_context(mock.patch.dict(os.environ, environment))
        scope.enter_context(mock.patch.object(sys, "argv", argv))
        scope.enter_context(mock.patch.object(sys, "path", [os.getcwd(), *sys.path]))
        scope.enter_context(contextlib.redirect_stdout(out))
        scope.enter_context(contextlib.redirect_stderr(errors))
        ended = scope.enter_context(pytest.raises(SystemExit))
        cli.main()
    code = ended.value.code
    status = code if isinstance(code, int) else int(bool(code))
    return subprocess.CompletedProcess(argv, status, out.getvalue(), errors.getvalue())
