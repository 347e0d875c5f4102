"""The page of `fits_table.py`, made of its cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_mp.advice.advise import NEARLY_FULL
from keras_mp.advice.place import find_place
from keras_mp.advice.schedule import UNCONSTRAINED

GIB = 2**30
HEADER = """# Which chips train which of KerasHub's models

Ten backbones at their published sizes, each trained in full, with LoRA of rank 8, and with LoRA of rank 8 on a base in
int4, as `backbone.quantize("int4")` makes it, with AdamW, in mixed_bfloat16, and on the T4 in mixed_float16. A cell
gives the memory of a device that one update needs, in GiB, and the cheapest measures that `keras_mp.advise` found.
**Bold**: it fits in the memory that the GPU's driver reports, which the head of the column gives. "no" comes with the
least need that was found. Nothing was run. A base that does not train is float32 under Keras's mixed policies.

- **s**: decided by shapes, nothing was compiled: weights, optimizer and batch alone are larger than the memory, with
  the optimizer's states in 8 bits, too. The figure is without temporary arrays.
- **c**: compiled with all blocks. **e**: extrapolated from compiles with 4 and with 8 blocks, in which the others were
  passed over; a cell that is asked again is extrapolated from models that have 4 and 8 ([how](../will-it-fit.md)).
  **=**: compiled for another chip of the same architecture.
- **!**, not bold: more than nine tenths of a GPU's memory, of which the runtime takes a part. Compiled (c!): expect
  that it does not fit, and take the next measure. Extrapolated (e!): not decided, because there the compiler saves
  memory (below).

`python benchmarks/fits_table.py --in-full --markdown docs/tables/fits-table.md`, {made}.
A cell is asked once and kept, so the cells are of several days in November 2026; to ask one again, take it out of
benchmarks/fits_table.json. {count}

"""
FOOTER = """
## How to read it

- The compiler for GPUs computes arrays again where a step comes near to the chip's memory, and stops as soon as it is
  below its own limit. So the figures of two chips differ, and a form with smaller weights can need as much
  as one with larger: it was given the room. Chips of two architectures differ in any case: their kernels are others.
- An extrapolated figure does not contain this: the steps with 4 and with 8 blocks are far below the limit. Above 70% of
  a GPU the step can need less, and fewer measures may be enough.
- For TPUs the compiler is ended when it has assigned memory, before it generates code. So where a step takes at most
  85% of a TPU, the figure is without the program itself, a few hundred MiB.
- int4 makes the base an eighth as large as in float32. Without lean layers a step keeps each dequantized kernel from
  the forward pass to the backward pass ([LoRA](../lora.md)): so int4 needs more than LoRA in some cells without "lean".
  Activations and logits stay as they are, and so does the batch.
- The memory is that of training. To quantize, Keras first needs the backbone in float32 on the host: four bytes a
  parameter. Quantize once on a machine that has them, `save_to_preset`, and load that preset where you train.
- [Will it fit?](../will-it-fit.md) says what a verdict rests on, and where not to trust it.

## The lines

For each set of measures of the table, the lines that apply it, with an example. `build()` makes the backbone, with
`backbone.quantize("int4")` for LoRA on int4 and `backbone.enable_lora(8)` for both kinds of LoRA, and compiles the
task:
"""
MARKS = (("shapes", "s"), ("a compile for", "="))


def page(
    cells: Iterable[Mapping[str, Any]], backbones: Mapping[str, Any], forms: Mapping[str, str], chips: Sequence[str],
    made: str,
) -> str:  # fmt: skip
    """Writes the page.

    Args:
        cells: the cells, as `fits_table.py` keeps them.
        backbones, forms, chips: the rows and columns, in their order.
        made: the day, and the versions.
    """
    known = {(cell["model"], cell["form"], cell["chip"]): cell for cell in cells}
    titles = {
        cell["chip"]: f"{cell['title']}, {find_place(cell['chip']).capacity / GIB:.3g} GiB" for cell in known.values()
    }
    missing = len(backbones) * len(forms) * len(chips) - len(known)
    # The cells of one call share its time.
    calls = {(cell["model"], cell["form"], cell["seconds"]) for cell in known.values()}
    count = f"{len(known)} cells, {sum(cell['compiles'] for cell in known.values())} sets of measures compiled in "
    count += f"{sum(seconds for *_, seconds in calls) / 3600:.1f} hours on 2 cores that other programs used, too."
    count += f" {missing} cells (empty) were not asked." if missing else ""
    lines = [HEADER.format(made=made, count=count)]
    lines += [f"| model | trained | {' | '.join(titles.get(chip, chip) for chip in chips)} |"]
    lines += [f"| --- | --- |{' --- |' * len(chips)}"]
    for name in backbones:
        for form, words in forms.items():
            row = [known.get((name, form, chip)) for chip in chips]
            if any(row):
                lines.append(f"| {name} | {words} | {' | '.join(_cell(cell) if cell else '' for cell in row)} |")
    for cell in known.values():
        if "in_full" in cell:
            off = cell["peak"] / cell["in_full"] - 1
            near = off > 0 and _fills_gpu(cell, UNCONSTRAINED)
            why = " The GPU was near to full, and the compiler saved memory (below)." if near else ""
            lines += ["", f"{cell['model']}, {forms[cell['form']]}, {cell['title']}, compiled with all blocks: "
                      f"{cell['in_full'] / GIB:.2f} GiB; the extrapolated figure is {off:+.1%} off.{why}"]  # fmt: skip
    lines += ["", "Batches of one update, on all devices together:", ""]
    lines += [f"- {name}: {backbone.parameters:,} parameters, {backbone.rows}" for name, backbone in backbones.items()]
    lines.append(FOOTER)
    examples: dict[str, Mapping[str, Any]] = {}
    for cell in known.values():
        if cell["code"]:
            examples.setdefault(cell["measures"], cell)
    for measures, cell in sorted(examples.items()):
        lines += [f"**{measures}** ({cell['model']}, {forms[cell['form']]}, {cell['title']}):", ""]
        lines += ["```text", *cell["code"], "```", ""]
    return "\n".join(lines)


def _cell(cell: Mapping[str, Any]) -> str:
    how = next((mark for words, mark in MARKS if cell["how"].startswith(words)), "c")
    if how == "c" and "blocks" in cell["how"]:
        how = "e"
    size = f"{cell['peak'] / GIB:.1f}"
    tight = ""
    if cell["verdict"] != "fits":
        size = f"no, {size}"
    elif _fills_gpu(cell, NEARLY_FULL):
        tight = "!"
    else:
        size = f"**{size}**"
    return " ".join(filter(None, [size, _short(cell["measures"]), f"({how}{tight})"]))


def _fills_gpu(cell: Mapping[str, Any], share: float) -> bool:
    """Whether a step takes more than a share of a GPU's memory."""
    place = find_place(cell["chip"])
    return place.platform == "cuda" and cell["peak"] > share * place.capacity


def _short(measures: str) -> str:
    """The measures but the precision, which the chip decides."""
    return measures.partition(", ")[2]
