"""The script of docs/processes.md on a machine without SLURM: a stand-in for srun sets a job step's variables."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_mp  # noqa: F401  (the saved model names its classes)

if keras.backend.backend() != "jax":
    pytest.skip("fully_sharded needs JAX", allow_module_level=True)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LIMIT = 240  # seconds; whatever still runs then is killed
# Two tasks on this machine, with the variables that srun gives a task. It notes their numbers, to kill one.
SRUN = """\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2
export SLURM_STEP_NUM_NODES=1
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" > "$TASKS/output-$rank" 2>&1 &
  echo $! > "$TASKS/task-$rank"
done
status=0
for rank in 0 1; do wait "$(< "$TASKS/task-$rank")" || status=$?; done
exit $status
"""
KERAS_MP = f'#!/bin/bash\nexec {sys.executable} -m keras_mp.cli "$@"\n'
OPTIONS = (
    "--epochs 3 --batch-size 8 --sequence-length 16 --layers 1 --width 32 --dropout 0.2 --generate 3 --no-export "
    "--checkpoint-every 5"
).split()


def script():
    """The sbatch script of the page."""
    (text,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs" / "processes.md").read_text(), re.DOTALL)
    return text


class Job:
    """The script as sbatch runs it; all of its processes are killed at the end of the scope."""

    def __init__(self, folder, corpus, number):
        self.tasks = folder / f"job-{number}"
        commands = self.tasks / "bin"
        commands.mkdir(parents=True)
        for name, text in (("srun", SRUN), ("keras-mp", KERAS_MP), ("train.sbatch", script())):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TF_CONFIG"))}
        environment |= {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TASKS": str(self.tasks),
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NODELIST": "localhost",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        }
        options = [*OPTIONS, "--corpus", str(corpus), "--output", str(folder / "runs")]
        self.process = subprocess.Popen(
            ["bash", str(commands / "train.sbatch"), *options], cwd=ROOT, env=environment, start_new_session=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def end(self):
        return self.process.wait(LIMIT)

    def output(self, rank):
        return (self.tasks / f"output-{rank}").read_text()

    def kill(self, rank):
        os.kill(int((self.tasks / f"task-{rank}").read_text()), signal.SIGKILL)


def ended_with(folder):
    """The weights and the metrics of each epoch, without what depends on the time."""
    run = folder / "runs" / "language_model"
    history = [line.rpartition(",")[0] for line in (run / "history.csv").read_text().splitlines()]
    return keras.saving.load_model(run / "model.keras").get_weights(), history


def job_number():
    return int(np.random.default_rng().integers(10_000, 30_000))


@pytest.mark.timeout(3 * LIMIT)
def test_a_sharded_job_of_which_a_task_is_killed_ends_with_the_same_numbers_when_it_is_submitted_again(tmp_path):
    corpus = tmp_path / "text.txt"
    corpus.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    with Job(tmp_path / "whole", corpus, job_number()) as job:
        assert job.end() == 0, job.output(0)[-3000:] + job.output(1)[-3000:]

    checkpoints = tmp_path / "lost" / "runs" / "language_model" / "checkpoints"
    with Job(tmp_path / "lost", corpus, job_number()) as job:
        deadline = time.monotonic() + LIMIT
        while len(list(checkpoints.glob("*.npz"))) < 2:
            assert job.process.poll() is None and time.monotonic() < deadline, job.output(0)[-3000:]
            time.sleep(0.02)
        job.kill(1)
        assert job.end() != 0
        assert "error: worker 1 (localhost:" in job.output(0) and "run it again with --resume" in job.output(0)

    with Job(tmp_path / "lost", corpus, job_number()) as job:
        assert job.end() == 0, job.output(0)[-3000:] + job.output(1)[-3000:]
        assert "resumed from" in job.output(0)
    (want, want_history), (have, have_history) = ended_with(tmp_path / "whole"), ended_with(tmp_path / "lost")
    assert have_history == want_history and len(want_history) == 4
    np.testing.assert_equal(have, want)
