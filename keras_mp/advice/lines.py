"""The lines of a program that apply a set of measures."""

from __future__ import annotations

from keras_mp.advice.measures import Measures
from keras_mp.advice.place import Place
from keras_mp.advice.source import Source


def lines(measures: Measures, source: Source, place: Place, rows: int) -> tuple[str, ...]:
    """Writes the measures as code, from the policy to `fit`.

    Args:
        measures: what to apply.
        source: where the model comes from.
        place: the devices.
        rows: of the whole batch.
    """
    changes = measures.precision != source.precision
    before, within = [], []
    if source.is_function:
        if changes:
            before.append(f'keras_mp.set_global_policy("{measures.precision}")')
        within.append(f"model = {source.text}")
    else:
        within += [f"model = {source.text}"] if source.text else []
        within += [f'model = keras_mp.in_precision(model, "{measures.precision}")'] if changes else []
    if measures.lean or measures.remat:
        within.append(f"model = keras_mp.make_lean(model{', remat=True' if measures.remat else ''})")
    if measures.state_dtype:
        within.append(f'model = keras_mp.set_state_dtype(model, "{measures.state_dtype}")')
    if measures.micro_batches > 1:
        within.append(f"model = keras_mp.accumulate_gradients(model, {measures.micro_batches})")
    within.append(f"model.fit(x, y, batch_size={rows // measures.micro_batches})")
    if measures.strategy:
        before.append(f'with keras_mp.distribute("{measures.strategy}", devices={place.devices}):')
        within = [f"    {line}" for line in within]
    return (*before, *within)
