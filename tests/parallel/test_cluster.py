import json
import socket

import pytest

from keras_mp.parallel.cluster import Cluster, ClusterError, expand_node_list, expand_task_counts, find_cluster

TWO = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}


def tf_config(**changes):
    return {"TF_CONFIG": json.dumps(TWO | changes)}


def test_a_process_alone_has_no_cluster():
    assert find_cluster(environment={}) is None
    assert find_cluster(environment=tf_config(cluster={"worker": ["a:1"]}, task={"type": "worker", "index": 0})) is None


def test_hosts_and_an_index():
    assert find_cluster("a:1, b:2", 1, {}) == Cluster(("a:1", "b:2"), 1)


def test_this_machine_is_found_by_its_name():
    assert find_cluster(f"elsewhere:1,{socket.gethostname()}:2", environment={}).index == 1
    with pytest.raises(ClusterError, match="2 of localhost:1, localhost:2 are this machine.*--host-index"):
        find_cluster("localhost:1,localhost:2", environment={})


def test_tf_config():
    assert find_cluster(environment=tf_config()) == Cluster(("a:1", "b:2"), 1)
    chief = tf_config(cluster={"chief": ["c:3"], "worker": ["a:1", "b:2"]})
    assert find_cluster(environment=chief) == Cluster(("c:3", "a:1", "b:2"), 2)
    assert find_cluster("x:1,y:2", 0, tf_config()).addresses == ("x:1", "y:2")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "TF_CONFIG must look like .* got {"),
        ("[]", "must look like"),
        (json.dumps({"cluster": {"worker": ["a:1"]}}), "must look like"),
        (json.dumps(TWO | {"cluster": {"worker": "a:1"}}), "must look like"),
        (json.dumps(TWO | {"cluster": {"ps": ["a:1"], "worker": ["b:2"]}}), "only chief and worker train together"),
        (json.dumps(TWO | {"cluster": {"worker": []}}), "must look like"),
        (json.dumps(TWO | {"task": {"type": "worker", "index": 2}}), "the index is that of this process in its list"),
        (json.dumps(TWO | {"task": {"type": "worker", "index": "0"}}), "must look like"),
        (json.dumps(TWO | {"task": {"type": "evaluator", "index": 0}}), "must look like"),
        (json.dumps(TWO | {"cluster": {"worker": ["a", "b:2"]}}), "each address must be host:port, got 'a'"),
        (json.dumps(TWO | {"cluster": {"worker": ["a:99999", "b:2"]}}), "host:port, got 'a:99999'"),
        (json.dumps(TWO | {"cluster": {"worker": ["a:1", "a:1"]}}), "listed twice"),
    ],
)
def test_a_malformed_tf_config_is_explained(text, message):
    with pytest.raises(ClusterError, match=message):
        find_cluster(environment={"TF_CONFIG": text})


def test_slurm():
    environment = {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[08-09]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_JOB_ID": "41234",
        "SLURM_PROCID": "2",
    }
    assert find_cluster(environment=environment) == Cluster(("n08:21234", "n08:21235", "n09:21234"), 2)
    with pytest.raises(ClusterError, match="SLURM_STEP_NODELIST is not set: start them with srun, or pass --hosts"):
        find_cluster(environment={"SLURM_STEP_NUM_TASKS": "2"})


def test_slurm_short_forms():
    assert expand_node_list("a[01-03,7],b,c[9-10]-x") == ["a01", "a02", "a03", "a7", "b", "c9-x", "c10-x"]
    assert expand_task_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ClusterError, match="must look like"):
        expand_task_counts("two")


def test_an_index_that_is_not_there_is_named():
    with pytest.raises(ClusterError, match="this process is number 2, and there are 2, counted from 0"):
        find_cluster("a:1,b:2", 2, {})
    with pytest.raises(ClusterError, match="there are no --hosts"):
        find_cluster(None, 1, {})


@pytest.mark.parametrize(
    "addresses, index, visible, gpus",
    [
        (("a:1", "b:1"), 1, None, None),  # one process a machine: all
        (("a:1", "b:1"), 1, "0,1,2,3", None),
        (("a:1", "a:2", "b:1", "b:2"), 3, None, [1]),
        (("a:1", "a:2", "b:1", "b:2"), 2, "0,1,2,3,4,5,6,7", [0, 1, 2, 3]),
        (("a:1", "a:2", "b:1", "b:2"), 3, "4,5", [1]),
        (("a:1", "a:2", "b:1", "b:2"), 3, "7", None),  # its own
        (("a:1", "a:2"), 1, "", None),  # none
    ],
)
def test_the_gpus_of_a_machine_are_shared_out(addresses, index, visible, gpus):
    assert Cluster(addresses, index).own_gpus(visible) == gpus


def test_the_workers_of_a_tpu_slice():
    workers = {"TPU_WORKER_HOSTNAMES": "t-0.s, t-1.s", "TPU_WORKER_ID": "1"}
    assert find_cluster(environment=workers) == Cluster(("t-0.s:20000", "t-1.s:20000"), 1)
    assert find_cluster(environment=workers | {"TPU_WORKER_HOSTNAMES": "localhost"}) is None
    assert find_cluster("a:1,b:1", 0, workers).addresses == ("a:1", "b:1")
    with pytest.raises(ClusterError, match="TPU_WORKER_ID, '', must be which of them this is"):
        find_cluster(environment={"TPU_WORKER_HOSTNAMES": "a,b"})
    with pytest.raises(ClusterError, match="MEGASCALE_NUM_SLICES is 2, .* pass --hosts with those of all"):
        find_cluster(environment=workers | {"MEGASCALE_NUM_SLICES": "2"})
