"""The page of `fits_table.py`, made of its cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_mp.planner.chips.place import find_place
from keras_mp.planner.fit.measures import MEASURES
from keras_mp.planner.fit.schedule import NEARLY_FULL, UNCONSTRAINED
from keras_mp.planner.fit.step import ROOM_FOR_CODE
from keras_mp.precision.policy import PURE_BFLOAT16

GIB = 2**30
SINCE = "2026-11-28"
HEADER = """# Which chips train which of KerasHub's models

Fourteen backbones at their published sizes, each trained in full, with LoRA of rank 8, and with LoRA of rank 8 on int4:
a base as `backbone.quantize("int4")` makes it, and of experts `narrow_frozen(model, experts="int4")`, with AdamW, in
mixed_bfloat16, and on the T4 in mixed_float16. A cell gives the memory of a device that one update needs, in GiB, and
the cheapest measures that `keras_mp.advise` found.
**Bold**: it fits in the memory that the GPU's driver reports, which the head of the column gives, and leaves a tenth of
it to the GPU's runtime. "no" comes with the least need that was found. Nothing was run.

- **s**: decided by shapes, nothing was compiled: weights, optimizer and batch alone are larger than the memory, with
  the optimizer's states in 8 bits, too. The figure is without temporary arrays.
- **c**: compiled with all blocks. **e**: extrapolated from compiles with 4 and with 8 blocks, in which the others were
  passed over; a cell that is asked again is extrapolated from models that have 4 and 8 ([how](../will-it-fit.md)).
  **=**: compiled for another chip of the same architecture.
- **!**, not bold: more than nine tenths of a GPU's memory, of which the runtime takes a part. Compiled (c!): expect
  that it does not fit, and take the next measure. Extrapolated (e!): not decided, because there the compiler saves
  memory (below).
- **p**: more than 85% of a TPU, without the program itself, which was 44 to 562 MiB in 20 deep models' steps and is
  counted in the other cells above 85%.
- **f**: asked from these measures on, or from cheaper ones that were tried and are too large: sets before those were
  passed over by an estimate, so a cheaper one may fit.
- **at most**: compiled without its chip's kernel of attention, which the step has today and which keeps no scores; with
  it fewer measures may do.
- **o**: neither bold nor asked again since `advise` has more measures: a base in 16 bits, weights in bfloat16, released
  gradients, states on the host.

{again}

{kernels}

Llama 3 8B in full on an L4 takes 20.6 of 22.0 GiB, all blocks compiled, and 19.8 would leave a tenth to the runtime:
at the loss, logits in bfloat16 and their gradient, 3.9 GiB, lie beside the inputs of all blocks, 2.0. Tried with 4
blocks, in GiB of temporary memory: the gradient of the embedding without zeros that wait for it (4.14 to 3.43 on an
RTX 4090, 2 x 2048 tokens; built); the gradient of the output layer added up by chunks of rows and slices of the
vocabulary (3.96 to 3.73 on the L4); the output layer updated first, whose states XLA then fetches when the backward
pass has ended, so that all gradients wait (3.43 to 4.11 on the RTX 4090). Not tried: the inputs of blocks in the host's
memory.

`python benchmarks/planner/fits_table.py --in-full --markdown docs/tables/fits-table.md`, {made}.
A cell is asked once and kept, so the cells are of several days in November 2026; to ask one again, take it out of
benchmarks/planner/fits_table.json. {count}

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
- Cells of Qwen 3 without **f**, and that with LoRA on a v5e, were asked when `make_lean` passed over its attention:
  they have whole scores, and need less today.
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
    others: dict[str, list[str]] = {}
    for cell in known.values():
        if cell.get("versions", made) not in made:
            others.setdefault(cell["versions"], []).append(f"{cell['model']} {forms[cell['form']]} on {cell['title']}")
    count += "".join(f" By {versions}: {', '.join(names)}." for versions, names in others.items())
    lines = [HEADER.format(made=made, count=count, again=_again(known.values(), backbones, forms),
                           kernels=_kernels(known.values()))]  # fmt: skip
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


def _again(cells: Iterable[Mapping[str, Any]], backbones: Mapping[str, Any], forms: Mapping[str, str]) -> str:
    """How many of the cells that were not bold are now, by which measure, and why others are not."""
    open_before = [cell for cell in cells if not _is_new(cell) and not _is_bold(cell | cell.get("before", {}))]
    asked = [cell for cell in open_before if "before" in cell]
    fit = [cell for cell in asked if _is_bold(cell)]
    none = sum((cell | cell.get("before", {}))["verdict"] != "fits" for cell in open_before)
    text = (
        f'Of {len(open_before)} cells that were not bold ({none} of them "no"), {len(asked)} were asked again, and '
        f"{len(fit)} are bold now"
    )
    by_measure = Counter(_decisive(cell) for cell in fit)
    if by_measure:
        text += f": by {', '.join(f'{name} {count}' for name, count in by_measure.most_common())}"
    by_form = Counter(forms[cell["form"]] for cell in fit)
    if by_form:
        text += f"; {', '.join(f'{name} {count}' for name, count in by_form.most_common())}"
    left = [cell for cell in open_before if not _is_bold(cell)]
    on_t4 = [cell for cell in left if cell["chip"] == "t4" and cell["form"] == "full"]
    large = [cell for cell in left if cell not in on_t4 and _is_large(cell, backbones)]
    rest = [cell for cell in left if cell not in on_t4 and cell not in large]
    missed = sum("before" in cell for cell in rest)
    text += (
        f". Of the {len(left)} others, {len(on_t4)} are in full on the T4, which has no bfloat16, and whose loss is "
        f"scaled, so that all gradients wait for the check; of {len(large)} the weights in 16 bits and 4 GiB are more "
        f"than the chip; {missed} leaves less than a tenth with every measure"
    )
    return text + (f"; {len(rest) - missed} may fit." if len(rest) > missed else ".")


def _kernels(cells: Iterable[Mapping[str, Any]]) -> str:
    """How many cells a kernel of attention can change, by a trace of their steps; what became of those asked again."""
    old = [cell for cell in cells if not _is_new(cell)]
    marked = [cell for cell in old if cell.get("kernel")]
    compiled = [cell for cell in old if cell["set"] and cell.get("day", "") < SINCE]
    text = (
        f"Since {SINCE} a step is traced with its chip's kernel of attention. Traced so (`--kernels`), the steps of "
        f"{len(compiled) - len(marked)} of the {len(compiled)} cells that were compiled before have none, and their "
        "figures stay: those on a T4, for which there is none; of GPT-2 and BERT-large, which drop scores; of ViT-L, "
        "whose 197 tokens no kernel takes, and of Whisper on TPUs; of the Gemmas' 256 features on GPUs before Hopper; "
        f"and on TPUs all without lean layers. {len(marked)} have one, and their figures are at most what they need; "
        f'{sum(cell["verdict"] != "fits" for cell in marked)} of them say "no".'
    )
    again = [cell for cell in cells if cell.get("day", "") >= SINCE and cell.get("before")]
    if again:
        least = sum(cell["verdict"] == cell["before"]["verdict"] for cell in again)
        text += f" Of {len(again)} that were asked again, {least} kept their verdict."
    return text


def _is_new(cell: Mapping[str, Any]) -> bool:
    """Whether a cell was first asked when all measures were there."""
    return "day" in cell and "before" not in cell


def _is_large(cell: Mapping[str, Any], backbones: Mapping[str, Any]) -> bool:
    """Whether the weights in 16 bits leave less than 4 GiB of a chip."""
    room = find_place(cell["chip"]).capacity - 2 * backbones[cell["model"]].parameters
    return cell["form"] != "int4" and room < 4 * GIB


def _decisive(cell: Mapping[str, Any]) -> str:
    """The last of the measures, in the order in which they are tried, that a cell has."""
    names = [one.name for one in MEASURES if one.name in cell["set"]["names"]]
    others = [name for name in names if name not in ("lean", "remat")]
    return others[-1] if others else "measures of before"


def _is_bold(cell: Mapping[str, Any]) -> bool:
    """Whether the step fits, and leaves a GPU's runtime its part."""
    return cell["verdict"] == "fits" and not _fills_gpu(cell, NEARLY_FULL)


def _cell(cell: Mapping[str, Any]) -> str:
    how = next((mark for words, mark in MARKS if cell["how"].startswith(words)), "c")
    if how == "c" and "blocks" in cell["how"]:
        how = "e"
    size = "at most " * bool(cell.get("kernel")) + f"{cell['peak'] / GIB:.1f}"
    tight = ""
    if cell["verdict"] != "fits":
        size = f"no, {size}"
    elif not _is_bold(cell):
        tight = "!"
    else:
        size = f"**{size}**"
    nearly = cell.get("without_code") and cell["peak"] > ROOM_FOR_CODE * find_place(cell["chip"]).capacity
    tight += "p" * bool(nearly)
    marks = (
        how
        + tight
        + "f" * bool(cell.get("begin"))
        + "o" * (not _is_bold(cell) and not _is_new(cell) and "before" not in cell)
    )
    return " ".join(filter(None, [size, _short(cell["measures"]), f"({marks})"]))


def _fills_gpu(cell: Mapping[str, Any], share: float) -> bool:
    """Whether a step takes more than a share of a GPU's memory."""
    place = find_place(cell["chip"])
    return place.platform == "cuda" and cell["peak"] > share * place.capacity


def _short(measures: str) -> str:
    """The measures but the precision, which the chip decides, where weights are float32."""
    policy, _, rest = measures.partition(", ")
    return ", ".join(filter(None, [f"{policy} weights" * (policy == PURE_BFLOAT16), rest]))
