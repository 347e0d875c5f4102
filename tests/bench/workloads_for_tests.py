"""Workloads that the tests of the processes need; imported there by name."""

import os
import time

import numpy as np

from keras_mp.bench.workloads import CannotRunError, Workload


def sleeper(seconds, batch_size=1):
    def run(steps):
        started = time.perf_counter()
        time.sleep(steps * seconds)
        return time.perf_counter() - started

    print("what a library prints must not be taken for an answer")
    os.system("echo nor this")
    return Workload(run, {"pid": os.getpid(), "batch": batch_size, "backend": os.environ.get("KERAS_BACKEND")})


def holder(mebibytes):
    """A step that needs so much memory while it runs."""

    def run(steps):
        np.ones((steps, mebibytes, 2**20), "int8").sum()
        return 0.001

    return Workload(run, {})


def unable():
    raise CannotRunError("this machine has no such units.\nmore lines")


def broken():
    raise ZeroDivisionError("the model cannot be built")


def exhausted():
    raise MemoryError("no room")


def exhausted_at_the_second_call():
    calls = []

    def run(steps):
        calls.append(steps)
        if len(calls) > 1:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        return 0.001

    return Workload(run, {})


def exhausted_later():
    def run(steps):
        if steps > 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")
        return 1e-3

    return Workload(run, {})


def killed():
    os.kill(os.getpid(), 9)


def crashes():
    os._exit(3)


def one_chip(number):
    workload = sleeper(0.001)
    return workload._replace(details=workload.details | {"kind": "tpu", "number": number})
