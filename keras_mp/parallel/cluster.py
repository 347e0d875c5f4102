"""Which processes train together, as their surroundings say."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

SLURM_FIRST_PORT, SLURM_PORTS = 20000, 20000
TPU_PORT = 20000
TF_CONFIG_LOOKS = '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index": 0}}'


class ClusterError(ValueError):
    """Processes that cannot train together, as the message says."""


@dataclass(frozen=True)
class Cluster:
    """The processes that train together."""

    addresses: tuple[str, ...]  # `host:port` of each process; the first one's is where the others report
    index: int  # the number of this process among them, counted from 0

    def name(self, index: int) -> str:
        """A process in words: `worker 1 (host1:12345)`."""
        return f"worker {index} ({self.addresses[index]})"

    def own_gpus(self, visible: str | None) -> list[int] | None:
        """Numbers the GPUs, among CUDA_VISIBLE_DEVICES, that it takes.

        None for all: of a process alone on its machine, and of one that was given fewer than there are processes.
        """
        hosts = [_host(address) for address in self.addresses]
        host = hosts[self.index]
        count, local = hosts.count(host), hosts[: self.index].count(host)
        given = len(visible.split(",")) if visible else None
        if count == 1 or visible == "" or (given is not None and given < count):
            return None
        share = given // count if given else 1
        return list(range(local * share, (local + 1) * share))


def find_cluster(
    hosts: str | None = None, index: int | None = None, environment: Mapping[str, str] | None = None
) -> Cluster | None:
    """Finds out which processes train together.

    The first of these that is there counts: `hosts`, the variable TF_CONFIG, the variables of a SLURM job step, those
    that GKE sets for the workers of a TPU slice.

    Args:
        hosts: the addresses `host0:port,host1:port`, the same on all processes, as `--hosts` takes them.
        index: the number of this process among them; by default the number of the one whose name or address this
            machine has.
        environment: the environment variables; by default those of this process.

    Returns:
        The cluster; None for a process that trains alone.

    Raises:
        ClusterError: If one of them is malformed; the message says what is right.
    """
    environment = os.environ if environment is None else environment
    if hosts:
        addresses = tuple(address.strip() for address in hosts.split(","))
        cluster = _checked(addresses, _own_index(addresses) if index is None else index, "--hosts")
    elif index is not None:
        raise ClusterError(f"--host-index {index} says which of --hosts this is, and there are no --hosts")
    elif environment.get("TF_CONFIG"):
        cluster = _from_tf_config(environment["TF_CONFIG"])
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        cluster = _from_slurm(environment)
    elif "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        cluster = _from_tpu(environment)
    else:
        return None
    return cluster if len(cluster.addresses) > 1 else None


def _host(address: str) -> str:
    """The host of `host:port`; of IPv6 it is in brackets."""
    return address.rpartition(":")[0].strip("[]")


def _from_tf_config(text: str) -> Cluster:
    try:
        config = json.loads(text)
        cluster, kind, index = config["cluster"], config["task"]["type"], config["task"]["index"]
        lists = [cluster.get("chief", []), cluster.get("worker", [])]
        right = (
            set(cluster) <= {"chief", "worker"}
            and all(isinstance(addresses, list) and all(isinstance(a, str) for a in addresses) for addresses in lists)
            and type(index) is int
            and 0 <= index < len(cluster[kind])
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        right = False
    if not right:
        raise ClusterError(
            f"TF_CONFIG must look like {TF_CONFIG_LOOKS}, where only chief and worker train together and the index is "
            f"that of this process in its list, got {text}"
        )
    chiefs, workers = lists
    return _checked((*chiefs, *workers), index + (len(chiefs) if kind == "worker" else 0), "TF_CONFIG")


def _from_slurm(environment: Mapping[str, str]) -> Cluster:
    def read(*names: str) -> str:
        for name in names:
            if environment.get(name):
                return environment[name]
        raise ClusterError(
            f"SLURM_STEP_NUM_TASKS says that several processes train together, but {names[0]} is not set: start them "
            "with srun, or pass --hosts"
        )

    nodes = expand_node_list(read("SLURM_STEP_NODELIST", "SLURM_NODELIST"))
    tasks = expand_task_counts(read("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(tasks) != len(nodes):
        raise ClusterError(f"SLURM lists {len(nodes)} nodes, and tasks for {len(tasks)}: {nodes}, {tasks}")
    # The same on all processes of the job step, and another for the next job.
    port = SLURM_FIRST_PORT + int(read("SLURM_JOB_ID")) % SLURM_PORTS
    addresses = tuple(
        f"{node}:{port + local}" for node, count in zip(nodes, tasks, strict=True) for local in range(count)
    )
    return _checked(addresses, int(read("SLURM_PROCID")), "SLURM")


def _from_tpu(environment: Mapping[str, str]) -> Cluster:
    if int(environment.get("MEGASCALE_NUM_SLICES") or "1") > 1:
        raise ClusterError(
            f"MEGASCALE_NUM_SLICES is {environment['MEGASCALE_NUM_SLICES']}, and TPU_WORKER_HOSTNAMES has the workers "
            "of one slice: pass --hosts with those of all"
        )
    index = environment.get("TPU_WORKER_ID", "")
    if not index.isdecimal():
        raise ClusterError(
            f"TPU_WORKER_HOSTNAMES lists several workers, and TPU_WORKER_ID, {index!r}, must be which of them this is, "
            "counted from 0; or pass --hosts"
        )
    hosts = environment["TPU_WORKER_HOSTNAMES"].split(",")
    return _checked(tuple(f"{host.strip()}:{TPU_PORT}" for host in hosts), int(index), "TPU_WORKER_HOSTNAMES")


def expand_node_list(text: str) -> list[str]:
    """Writes node names out: `a[01-02,7]` is a01, a02, a7."""
    nodes: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?[^,\[]*", text):
        match = re.fullmatch(r"(.*?)\[([^\]]*)\](.*)", part)
        if not match:
            nodes.append(part)
            continue
        for piece in match[2].split(","):
            first, _, last = piece.partition("-")
            for number in range(int(first), int(last or first) + 1):
                nodes.append(f"{match[1]}{number:0{len(first)}}{match[3]}")
    return nodes


def expand_task_counts(text: str) -> list[int]:
    """Writes counts out: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ClusterError(f"SLURM_TASKS_PER_NODE must look like 2(x3),1, got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _checked(addresses: tuple[str, ...], index: int, source: str) -> Cluster:
    for address in addresses:
        if not re.fullmatch(r".+:\d{1,5}", address) or not 0 < int(address.rpartition(":")[2]) < 65536:
            raise ClusterError(f"{source}: each address must be host:port, got {address!r}")
    if len(set(addresses)) < len(addresses):
        raise ClusterError(f"{source}: an address is listed twice in {', '.join(addresses)}")
    if not 0 <= index < len(addresses):
        raise ClusterError(f"{source}: this process is number {index}, and there are {len(addresses)}, counted from 0")
    return Cluster(addresses, index)


def _own_index(addresses: tuple[str, ...]) -> int:
    own = {socket.gethostname(), socket.getfqdn(), "localhost"}
    try:
        own |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        pass
    here = [index for index, address in enumerate(addresses) if _host(address) in own]
    if len(here) != 1:
        raise ClusterError(
            f"--hosts: {len(here)} of {', '.join(addresses)} are this machine, {socket.gethostname()}: say which one "
            "this process is with --host-index, counted from 0"
        )
    return here[0]
