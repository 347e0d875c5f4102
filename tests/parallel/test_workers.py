"""Real processes on this machine that train together; every one is killed when it takes too long."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import together

from keras_mp.training.checkpoint_file import checkpoints_in, place_of

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("together.py")
JAX_ENDS = "the JAX distributed service detected fatal errors"
LIMIT = 150  # seconds; whatever still runs then is killed
LOSABLE = ("float32", "--epochs", 4, "--every", 2, "--silence", 8, "--dropout", 0.2)
TENSORFLOW = keras.backend.backend() == "tensorflow"


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Processes:
    """Processes of one training, killed hard at the end of the scope."""

    def __init__(self, folder, *arguments):
        self.addresses = [f"localhost:{port}" for port in free_ports(2)]
        self.running = [self._start(folder, index, arguments) for index in range(2)]
        self.deadline = time.monotonic() + LIMIT

    def _start(self, folder, index, arguments):
        environment = os.environ | {"KERAS_BACKEND": keras.backend.backend(), "TF_CPP_MIN_LOG_LEVEL": "3"}
        # One device for each process, whatever this one has.
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
        task = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": index}}
        environment.setdefault("TF_CONFIG", json.dumps(task))
        command = [sys.executable, str(PROGRAM), str(folder), *map(str, arguments)]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.running:
            process.kill()
            process.communicate()

    def wait_for_step(self, index=0):
        while line := self.running[index].stdout.readline():
            if line.startswith("step"):
                return
        raise AssertionError(f"worker {index} ended before a step: {self.running[index].stderr.read()[-2000:]}")

    def end(self):
        """Waits for all, and returns the exit status and the last words of each."""
        ended = []
        for process in self.running:
            try:
                _, errors = process.communicate(timeout=max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                _, errors = process.communicate()
                errors += f"\nkilled by the test after {LIMIT} s"
            ended.append((process.returncode, errors[-3000:]))
        return ended


def run(folder, *arguments):
    with Processes(folder, *arguments) as processes:
        for status, errors in processes.end():
            assert status == 0, errors
            assert "retracing" not in errors, errors


# For 200 steps and in more precisions: tests/long/test_200_steps.py.
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["float32"], marks=[pytest.mark.slow, pytest.mark.jax] * (not TENSORFLOW)),
        # One layer rounds so little in another order that two processes could not be told from wrong ones.
        pytest.param(["mixed_float16:1:7", "--gpt"], marks=[pytest.mark.slow, pytest.mark.rare]),
    ],
    ids=lambda arguments: arguments[0],
)
def test_two_processes_train_as_one_does(arguments, tmp_path):
    check_two_processes(arguments[:1], [*arguments, "--epochs", "2"], tmp_path)  # an epoch has 5 steps


def check_two_processes(runs, arguments, tmp_path):
    run(tmp_path / "together", *arguments)
    for name in runs:
        together.train(together.read([str(tmp_path / "alone"), *arguments]), name)
        together.train(together.read([str(tmp_path / "reordered"), *arguments, "--reordered"]), name)
        check_same(tmp_path, name)


def check_same(ended, name):
    folder = name.replace(":", "-")
    alone = np.load(ended / "alone" / folder / "ended-0.npz")
    first, second = (np.load(ended / "together" / folder / f"ended-{index}.npz") for index in range(2))
    assert int(first["skipped"]) == int(second["skipped"]) == int(alone["skipped"])
    assert int(first["skipped"]) == (":" in name)  # the planted one
    for key in alone.files:
        if not key.startswith("logs"):
            np.testing.assert_array_equal(first[key], second[key], err_msg=key)
        elif key.startswith("logs val_"):
            np.testing.assert_allclose(first[key], alone[key], rtol=0.02, err_msg=key)
    # Rounding alone makes this much, with sums in another order.
    reordered = np.load(ended / "reordered" / folder / "ended-0.npz")
    print(f"{name}: {distance(first, alone):.2e} from one process, {distance(reordered, alone):.2e} when reordered")
    assert distance(first, alone) <= 4 * distance(reordered, alone)


def distance(one, other):
    """Root mean square over all weights."""
    squares = [
        np.square(one[k] - other[k].astype("float64")) for k in other.files if k[0].isdecimal() and "seed" not in k
    ]
    return np.sqrt(np.mean(np.concatenate([square.ravel() for square in squares])))


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.timeout(900)
def test_one_that_is_lost_ends_the_other_which_names_it(tmp_path):
    check_interrupted(tmp_path)
    check_lost("SIGSTOP", 0, tmp_path) if TENSORFLOW else check_lost("SIGKILL", 1, tmp_path)


def check_interrupted(tmp_path):
    """Ctrl-C on one stops both after the same step, with a checkpoint."""
    with Processes(tmp_path / "lost", *LOSABLE, "--pause", 0.3) as processes:
        for _ in range(2):
            processes.wait_for_step()
        processes.running[1].send_signal(signal.SIGINT)
        for status, errors in processes.end():
            assert status == 0, errors
    folder = tmp_path / "lost" / "float32"
    first, second = (np.load(folder / f"ended-{index}.npz") for index in range(2))
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    place = place_of(checkpoints_in(folder / "checkpoints")[0])
    assert (0, 2) <= place < (3, 0), place


def check_lost(way, lost, tmp_path):
    with Processes(tmp_path / "lost", *LOSABLE, "--pause", 0.3) as processes:
        for _ in range(4):
            processes.wait_for_step()
        processes.running[lost].send_signal(getattr(signal, way))
        lost_at = time.monotonic()
        _, errors = processes.running[1 - lost].communicate(timeout=60)
        seconds = time.monotonic() - lost_at
        assert processes.running[1 - lost].returncode == 1
    assert seconds < 60
    # With worker 0 JAX's coordinator is gone, and JAX may end the process before this kit can say why.
    if JAX_ENDS not in errors or lost != 0:
        assert f"error: worker {lost} ({processes.addresses[lost]}) has " in errors, errors[-2000:]
        assert "--resume" in errors


@pytest.mark.slow
@pytest.mark.jax
def test_one_that_never_starts_is_named(tmp_path):
    with Processes(tmp_path, "float32", "--join", 3) as processes:
        processes.running[1].kill()
        _, errors = processes.running[0].communicate(timeout=90)
        assert processes.running[0].returncode not in (None, 0)
    missing = f"worker 1 ({processes.addresses[1]})"
    if TENSORFLOW:
        assert f"LostWorkerError: {missing} did not join within 3 s" in errors, errors[-2000:]
    else:  # JAX aborts the process, and lists numbers
        assert missing in errors and re.search(r"timed out task names:\s+(\S*task:)?1\s", errors), errors[-2000:]
