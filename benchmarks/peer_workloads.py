"""What is compared with peers: the sizes, the same for all, and a batch of random numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Workload(NamedTuple):
    """A model and its batch.

    Args:
        kind: "gpt", "resnet" or "vit".
        batch: sequences or images of a step.
        sizes: of the model; for a GPT (layers, width, heads, vocabulary, length), for a ResNet (depth, classes, pixels
            of a side), for a ViT (layers, width, heads, classes, pixels of a side, pixels of a patch).
    """

    kind: str
    batch: int
    sizes: tuple[int, ...]


WORKLOADS = {
    # For a CPU.
    "gpt": Workload("gpt", 8, (6, 384, 6, 256, 256)),
    "resnet18": Workload("resnet", 16, (18, 10, 32)),
    "vit-tiny": Workload("vit", 8, (12, 192, 3, 1000, 224, 16)),
    # For a GPU.
    "gpt2-124m": Workload("gpt", 8, (12, 768, 12, 50304, 1024)),
    "gpt-4096": Workload("gpt", 8, (2, 4096, 32, 32768, 2048)),
    "resnet50": Workload("resnet", 128, (50, 1000, 224)),
    # To try the commands out.
    "gpt-small": Workload("gpt", 2, (1, 32, 2, 64, 16)),
    "resnet-small": Workload("resnet", 2, (18, 10, 32)),
    "vit-small": Workload("vit", 2, (1, 32, 2, 10, 32, 16)),
}


def batch_of(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens or images, and their targets; images have their channels last."""
    random = np.random.default_rng(0)
    if workload.kind == "gpt":
        *_, vocabulary, length = workload.sizes
        text = random.integers(0, vocabulary, (workload.batch, length + 1)).astype("int32")
        return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
    classes, side = workload.sizes[1:3] if workload.kind == "resnet" else workload.sizes[3:5]
    images = random.normal(size=(workload.batch, side, side, 3)).astype("float32")
    return images, random.integers(0, classes, workload.batch).astype("int32")


def details_of(workload: Workload) -> dict[str, Any]:
    """What a row says of the batch."""
    gpt = workload.kind == "gpt"
    units = workload.batch * (workload.sizes[-1] if gpt else 1)
    return {"batch": workload.batch, "unit": "tokens" if gpt else "images", "units": units}
