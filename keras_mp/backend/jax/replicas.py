"""Values that belong to all replicas."""

from typing import Any

import keras


def replica_count() -> int:
    """Returns over how many devices the current Keras distribution splits a batch."""
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.batch_dim_name is None:
        return 1
    mesh = distribution.device_mesh
    return int(mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)])


def any_replica(flag: Any) -> Any:
    """Returns the flag: a compiled JAX step sees the arrays of all devices and processes as one."""
    return flag


def sum_over_replicas(tensors: list[Any]) -> list[Any]:
    """Returns the tensors: JAX has added up the gradients of all devices in the backward pass."""
    return tensors


def max_over_replicas(tensor: Any) -> Any:
    """Returns the tensor: it is that of all devices."""
    return tensor
