"""The step of a prepared model on a CPU, where TensorFlow's kernels sum and compute in 16 bits."""

from __future__ import annotations

from typing import Any

from keras_mp import backend
from keras_mp.lean.gelu import gelu
from keras_mp.rebuild.notes import notes_of
from keras_mp.treatment.treated import Treatment, register_treatments

# The treatment of a model; its options are `{"islands": bool}`, as `keras_mp.prepare` takes it.
STEP_ON_A_CPU = "step on a CPU"


class StepOnACPU:
    """A model whose step on a CPU sums and computes in float32 what TensorFlow's kernels do not."""

    def train_step(self, *arguments: Any) -> Any:
        notes = notes_of(self)
        assert notes is not None
        # On JAX there is a state before the batch.
        scope = (
            notes.kept[STEP_ON_A_CPU](arguments[-1])
            if notes.treatments[STEP_ON_A_CPU]["islands"]
            else backend.without_islands()
        )
        with backend.gradients_on_cpus(), backend.activations_on_cpus(gelu), scope:
            return super().train_step(*arguments)  # type: ignore[misc]


def _count_batch_sizes(model: Any) -> None:
    notes = notes_of(model)
    assert notes is not None
    notes.kept[STEP_ON_A_CPU] = backend.count_batch_sizes()


register_treatments({STEP_ON_A_CPU: Treatment(lambda original, names: StepOnACPU, _count_batch_sizes, order=-2)})
