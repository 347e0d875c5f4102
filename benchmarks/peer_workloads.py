"""What is compared with peers: the sizes, the same for all, and a batch of random numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class PeerModel(NamedTuple):
    """A model and its batch.

    Args:
        kind: "gpt", "llama", "resnet" or "vit".
        batch: sequences or images of a step.
        sizes: the sizes of the model; for a GPT (layers, width, heads, vocabulary, length), for a Llama (layers, width,
            heads, key heads, hidden, vocabulary, length), for a ResNet (depth, classes, pixels of a side), for a ViT
            (layers, width, heads, classes, pixels of a side, pixels of a patch).
    """

    kind: str
    batch: int
    sizes: tuple[int, ...]

    @property
    def reads_text(self) -> bool:
        """Whether its batch is tokens, and not images."""
        return self.kind in ("gpt", "llama")


WORKLOADS = {
    # For a CPU.
    "gpt": PeerModel("gpt", 8, (6, 384, 6, 256, 256)),
    "resnet18": PeerModel("resnet", 16, (18, 10, 32)),
    "vit-tiny": PeerModel("vit", 8, (12, 192, 3, 1000, 224, 16)),
    # For a GPU.
    "gpt2-124m": PeerModel("gpt", 8, (12, 768, 12, 50304, 1024)),
    "gpt-4096": PeerModel("gpt", 8, (2, 4096, 32, 32768, 2048)),
    "llama-1b": PeerModel("llama", 2, (16, 2048, 32, 8, 8192, 128256, 2048)),
    "resnet50": PeerModel("resnet", 128, (50, 1000, 224)),
    # To try the commands out.
    "gpt-small": PeerModel("gpt", 2, (1, 32, 2, 64, 16)),
    "llama-small": PeerModel("llama", 2, (1, 32, 4, 2, 64, 64, 16)),
    "resnet-small": PeerModel("resnet", 2, (18, 10, 32)),
    "vit-small": PeerModel("vit", 2, (1, 32, 2, 10, 32, 16)),
}


def batch_of(model: PeerModel) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens or images, and their targets; images have their channels last."""
    random = np.random.default_rng(0)
    if model.reads_text:
        *_, vocabulary, length = model.sizes
        text = random.integers(0, vocabulary, (model.batch, length + 1)).astype("int32")
        return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
    classes, side = model.sizes[1:3] if model.kind == "resnet" else model.sizes[3:5]
    images = random.normal(size=(model.batch, side, side, 3)).astype("float32")
    return images, random.integers(0, classes, model.batch).astype("int32")


def details_of(model: PeerModel) -> dict[str, Any]:
    """What a row says of the batch."""
    units = model.batch * (model.sizes[-1] if model.reads_text else 1)
    return {"batch": model.batch, "unit": "tokens" if model.reads_text else "images", "units": units}
