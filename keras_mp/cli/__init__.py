"""The command `keras-mp`: what the library does, from the shell."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from keras_mp.system.argument_checks import one_of, whole_number
from keras_mp.system.packages import install_command
from keras_mp.system.quiet_import import import_keras, import_tensorflow, quiet_stderr

_MODEL_HELP = "A training recipe (a file, module:function, or a name in the folder recipes), or a .keras file."
_STEP_HELP = f"{_MODEL_HELP[:-1]}, or module:function that builds a model, whose options are those of the function."

Model = Annotated[str, typer.Argument(help=_MODEL_HELP)]
ModelOrFunction = Annotated[str, typer.Argument(help=_STEP_HELP)]
BatchSize = Annotated[
    int | None, typer.Option(help="Of all devices together. By default the training recipe's; 8 for a .keras file.")
]
Length = Annotated[
    int | None, typer.Option(help="The size of each axis that a model leaves open besides the batch, such as tokens.")
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="For a .keras file: a module that defines its custom layers; may be repeated."),
]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Load Python lambdas, which can run arbitrary code.")]
Html = Annotated[Path | None, typer.Option(help="Write the whole report as one HTML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Strategy = Annotated[
    str | None,
    typer.Option(help="How several chips share the step, on JAX: data, fully_sharded or tensor."),
]
Compare = Annotated[str, typer.Option(help="Precisions to compare with, separated by commas.")]
Details = Annotated[bool, typer.Option("--details", help="Print the tables behind the answer, too.")]

# Options that a training recipe or a function adds of its own.
_RECIPE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    subcommand_metavar="COMMAND",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Mixed-precision training for Keras 3 on TensorFlow and JAX, with every claim checked.\n\n"
    "Begin with: keras-mp doctor",
)


def _print_version(asked: bool) -> None:
    if asked:
        from keras_mp.system.packages import installed

        typer.echo(f"keras-mp {installed(['keras-mp']).get('keras-mp') or 'from a clone, not installed'}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# A command has a short help, because Typer cuts the first sentence of a long one; its help begins with a line to copy.
@app.command(short_help="Say which precision is best here, and what is missing.")
def doctor(
    chips: Annotated[
        bool, typer.Option("--chips", help="List the chips that inspect and advise compile for, instead.")
    ] = False,
) -> None:
    """keras-mp doctor --chips

    Print which precisions this machine supports, what `auto` chooses and why, and which packages are missing.
    """
    if chips:
        _print_chips()
        return
    from rich.console import Console

    from keras_mp.cli import environment

    Console().print(environment.doctor())


def _print_chips() -> None:
    import_keras()
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from keras_mp.planner.chips.targets import find_target, missing_compiler, target_names

    table, ready = Table(), True
    for column in ("target", "chip", "memory", "ready"):
        table.add_column(column)
    for name in target_names():
        target = find_target(name)
        memory = f"{target.chip.device_bytes / 2**30:.1f} GiB" if target.chip else ""
        if target.chip and target.chip.devices > 1:
            memory += f" a device, {target.chip.devices} devices a chip"
        available = not missing_compiler(target)
        table.add_row(name, target.title, memory, "yes" if available else "no")
        ready = ready and available
    console = Console()
    console.print(table)
    if not ready:
        console.print(
            Text(
                f"To get the compilers that are missing: {install_command('inspect')}\nThen, on a machine without a "
                "GPU or TPU, set JAX_PLATFORMS=cpu in your own JAX programs."
            ),
            soft_wrap=True,
        )


@app.command(
    context_settings={**_RECIPE_OPTIONS, "help_option_names": []},
    add_help_option=False,
    short_help="Run a training recipe, with its own options.",
)
def train(context: typer.Context) -> None:
    _find_modules_here()
    from keras_mp.cli.training_recipe import run_recipe

    raise typer.Exit(run_recipe(context.args))


@app.command(context_settings=_RECIPE_OPTIONS, short_help="Compile a training step for a chip, and show its precision.")
def inspect(
    context: typer.Context,
    model: ModelOrFunction,
    target: Annotated[
        str, typer.Option(help="A chip of `keras-mp doctor --chips`, or host; with --strategy several: h100x8, v5e-16.")
    ] = "host",
    strategy: Strategy = None,
    compare: Compare = "",
    html: Html = None,
    batch_size: BatchSize = None,
    length: Length = None,
    inference: Annotated[bool, typer.Option("--inference", help="Inspect the forward pass only.")] = False,
    imports: Imports = None,
    unsafe: Unsafe = False,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """keras-mp inspect digits --target h100 --width 64

    Show the precision of each product in a training step compiled for a chip, which need not be attached.

    Options that are not listed here, as --width, are passed to the training recipe, or to the function that builds a
    model: keras-mp inspect my_models:build --width 512 --policy mixed_bfloat16
    """
    _check_writable(html=html)
    _find_modules_here()
    import_keras()
    if compare or model.endswith(".keras"):
        import_tensorflow()
    from keras_mp.planner.chips.targets import find_target
    from keras_mp.planner.inspect import inspect as inspect_step

    built, batch, trains = _step(model, context, find_target(target).traced, batch_size, length, imports, unsafe)
    inference = inference or not trains
    report = inspect_step(
        built,
        batch[0] if inference else batch,
        target,
        training=not inference,
        compare=_names(compare),
        strategy=strategy,
    )
    _show(report, html, as_json, details)


@app.command(context_settings=_RECIPE_OPTIONS, short_help="Say which chips hold a training, and what makes it fit.")
def advise(
    context: typer.Context,
    model: ModelOrFunction,
    target: Annotated[
        str,
        typer.Option(
            help="Chips of `keras-mp doctor --chips`, or several of one, separated by commas: rtx4090,v5e-8.",
        ),
    ],
    strategy: Strategy = None,
    compare: Compare = "",
    html: Html = None,
    batch_size: BatchSize = None,
    length: Length = None,
    inference: Annotated[bool, typer.Option("--inference", hidden=True)] = False,
    imports: Imports = None,
    unsafe: Unsafe = False,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """keras-mp advise digits --target rtx4090,v5e

    Say for each chip whether it holds the training of a model, and the cheapest measures that make it fit.

    Steps are compiled, which takes minutes; results are kept. Options that are not listed here are passed to the
    training recipe, or to the function that builds a model, as `keras-mp inspect` does.
    """
    if inference:
        raise ValueError(
            "--inference: the measures of advise change a training step. `keras-mp inspect --inference --target CHIP` "
            "says whether a chip holds the forward pass"
        )
    _check_writable(html=html)
    _find_modules_here()
    import_keras()
    import_tensorflow()
    from keras_mp.planner.advise import advise as advise_chips
    from keras_mp.planner.advise import find_places

    targets = _names(target)
    chip = find_places(targets)[0].traced  # each chip is asked about in its own precision, whichever it is built in
    built, batch, trains = _step(model, context, chip, batch_size, length, imports, unsafe)
    _check_trains(model, trains)
    text = f"keras.saving.load_model({model!r})" if _is_file(model, context) else ""
    report = advise_chips(built, batch, targets, compare=_names(compare), strategy=strategy, text=text)
    _show(report, html, as_json, details)


@app.command(context_settings=_RECIPE_OPTIONS, short_help="List the layers that a lower precision would harm.")
def audit(
    context: typer.Context,
    model: Model,
    html: Html = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="For a .keras file: an .npz file with arrays x and y; x/NAME for each of several inputs, y/NAME for "
            "each of several outputs."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of batches to run.")] = 8,
    batch_size: BatchSize = None,
    length: Length = None,
    imports: Imports = None,
    unsafe: Unsafe = False,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """keras-mp audit digits --width 64

    Run a model forward and backward in float32, and list the layers that do not fit a lower precision.

    Options that are not listed here, as --width, are passed to the training recipe.
    """
    _check_writable(html=html)
    _find_modules_here()
    import_keras()
    import_tensorflow()
    from keras_mp.numerics.audit import audit as audit_model
    from keras_mp.numerics.data import random_batches

    batches: Any = None
    if _is_file(model, context):
        from keras_mp.conversion.model_file import model_of_file, shapes_of_step
        from keras_mp.numerics.data import batches_of_file

        built, trains = model_of_file(Path(model), imports or (), unsafe=unsafe)
        _check_trains(model, trains)
        size = 8 if batch_size is None else batch_size
        if data is not None:
            batches = batches_of_file(data, built, size)
        else:
            shapes = shapes_of_step(built, size, length, trains, "give some with --data")
    else:
        if data is not None:
            raise ValueError("--data is for a .keras file: a training recipe has data of its own")
        _check_no_file_options(imports, unsafe)
        with quiet_stderr():  # a recipe's data sets import TensorFlow on JAX too
            recipe, config = _recipe(model, context, batch_size, length)
            built, shapes = recipe.step(config)
            batches = recipe.batches(config)
    real = batches is not None
    report = audit_model(built, batches if real else random_batches(built, shapes, steps), steps)
    if not real:
        remedy = "--data" if model.endswith(".keras") else "the training recipe a function batches(config)"
        report.notes.append(f"The batches were random numbers: ranges on real data differ. Give {remedy}.")
    _show(report, html, as_json, details)


@app.command(context_settings=_RECIPE_OPTIONS, short_help="Measure a training step here in several precisions.")
def bench(
    context: typer.Context,
    model: Model,
    compare: Annotated[str, typer.Option(help="Precisions to compare with float32, separated by commas.")] = (
        "mixed_bfloat16"
    ),
    html: Html = None,
    batch_size: BatchSize = None,
    length: Length = None,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each precision.")] = 20,
    seconds: Annotated[float, typer.Option(help="Approximate length of a measurement; at least one step.")] = 0.5,
    imports: Imports = None,
    unsafe: Unsafe = False,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """keras-mp bench digits --width 64

    Measure a training step on this machine in several precisions, interleaved, relative to float32.

    Options that are not listed here, as --width, are passed to the training recipe.
    """
    _check_writable(html=html)
    _find_modules_here()
    import_keras()
    from keras_mp.bench.timing import check_precisions, time_in_processes

    arguments: dict[str, Any] = {} if batch_size is None else {"batch_size": whole_number("batch_size", batch_size)}
    if _is_file(model, context):
        from keras_mp.conversion.model_file import check_model_file

        check_model_file(model)
        function = "keras_mp.bench.keras_step:file"
        arguments |= {"path": model, "length": length, "imports": imports or [], "unsafe": unsafe}
    else:
        _check_no_file_options(imports, unsafe)
        with quiet_stderr():
            recipe, config = _recipe(model, context, batch_size, length)
            recipe.check_can_be_measured(config)
        function = "keras_mp.cli.training_recipe:timed_step"
        arguments |= {"arguments": [model, *context.args, *_option("--length", length)]}
    report = time_in_processes(
        function,
        arguments,
        check_precisions(_names(compare)),
        f"{model}: a training step",
        rounds=rounds,
        seconds=seconds,
        log=lambda text: typer.echo(text, err=True),
    )
    if not any(row.seconds for row in report.rows):
        raise RuntimeError("; ".join(dict.fromkeys(row.reason for row in report.rows)))
    _show(report, html, as_json, details)


@app.command(short_help="Write a trained model for another runtime, and check it.")
def export(
    model: Annotated[Path, typer.Argument(help="A .keras file, trained in any precision on any backend.")],
    path: Annotated[Path, typer.Argument(help="The folder or file to write.")],
    format: Annotated[str, typer.Option(help="savedmodel, onnx, litert, litert-int8, litert-int16x8.")] = "savedmodel",
    calibrate: Annotated[
        Path | None, typer.Option(help="For int8 and int16x8: an .npy or .npz file with hundreds of typical inputs.")
    ] = None,
    integer_io: Annotated[
        bool, typer.Option("--integer-io", help="For int8 and int16x8: inputs and outputs are integers, too.")
    ] = False,
    imports: Imports = None,
    verify: Annotated[
        Path | None, typer.Option(help="An .npy or .npz file of inputs, on which to compare with the model in float32.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference that --verify allows.")] = 1e-5,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing export, after the new one was checked.")
    ] = False,
    unsafe: Unsafe = False,
    html: Html = None,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """keras-mp export model.keras exported

    Export a model as a SavedModel, an ONNX or a LiteRT file in float32 throughout, or as a LiteRT file in integers.
    """
    _check_writable(html=html)
    _check_export(format, path, verify, calibrate, integer_io)
    os.environ["KERAS_BACKEND"] = "tensorflow"  # each is made by TensorFlow, whatever the model was trained on
    _find_modules_here()
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            f"export writes files with TensorFlow, which is not installed: {install_command('tensorflow')}"
        )
    import_keras()
    from keras_mp.conversion.model_file import load_model_file
    from keras_mp.export.litert import export_litert
    from keras_mp.export.onnx import export_onnx
    from keras_mp.export.saved_model import export_float32
    from keras_mp.numerics.data import inputs_among, read_arrays

    loaded = load_model_file(model, imports or (), unsafe=unsafe, compile=False)
    files = (verify, calibrate)
    batch, data = (None if file is None else inputs_among(file, read_arrays(file), loaded) for file in files)
    options: dict[str, Any] = {"verify": batch, "tolerance": tolerance, "overwrite": overwrite}
    report: Any
    if format == "savedmodel":
        report = export_float32(loaded, path, **options)
    elif format == "onnx":
        report = export_onnx(loaded, path, **options)
    else:
        quantize = None if format == "litert" else format.removeprefix("litert-")
        report = export_litert(loaded, path, quantize=quantize, calibrate=data, integer_io=integer_io, **options)
    _show(report, html, as_json, details)


def _check_export(format: str, path: Path, verify: Path | None, calibrate: Path | None, integer_io: bool) -> None:
    """Refuses a format that there is not, and options that are not for it."""
    one_of("--format", format, ("savedmodel", "onnx", "litert", "litert-int8", "litert-int16x8"))
    quantizes = format.startswith("litert-")
    if quantizes and calibrate is None:
        raise ValueError(
            f"--format {format} needs --calibrate, a .npz or .npy file with hundreds of inputs like those that will "
            "be served: the ranges of integers are measured on them"
        )
    for name, given in (("calibrate", calibrate is not None), ("integer-io", integer_io)):
        if given and not quantizes:
            raise ValueError(f"--{name} is for --format litert-int8 and litert-int16x8, not {format!r}")
    for name, file in (("verify", verify), ("calibrate", calibrate)):
        if file is not None and not file.exists():
            raise FileNotFoundError(f"there is no file --{name} {str(file)!r}")
        if file is not None and path.exists() and path.samefile(file):
            raise ValueError(f"path {str(path)!r} is the file that --{name} reads: give a new file")


def _names(text: str) -> list[str]:
    """What commas, and blanks beside them, separate."""
    return [name for part in text.split(",") if (name := part.strip())]


def _check_writable(**files: Path | None) -> None:
    """Refuses a folder as a file before the work."""
    for name, path in files.items():
        if path is not None and path.is_dir():
            raise IsADirectoryError(f"--{name} {str(path)!r} is a folder: name a file in it")


def _show(report: Any, html: Path | None, as_json: bool, details: bool = False) -> None:
    from rich.console import Console

    if html is not None:
        report.to_html(html)
    if as_json:
        typer.echo(report.to_json())
    else:
        console = Console()
        soft_wrap = not console.is_terminal  # a file or a pipe gets whole lines
        console.print(report, soft_wrap=soft_wrap)
        if details:
            console.print(report.details(), soft_wrap=soft_wrap)


def _find_modules_here() -> None:
    """Lets `--import` and `module:function` name modules here."""
    # Last: a `keras.py` in a folder with a model that somebody sent, say, must not run in Keras's place.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


# What other files are called that hold a model, or a part of one.
_OTHER_SUFFIXES = {".h5", ".hdf5", ".json", ".pb", ".onnx", ".tflite", ".npz", ".npy", ".zip", ".safetensors", ".ckpt"}


def _is_file(model: str, context: typer.Context) -> bool:
    path = Path(model)
    if path.suffix.lower() in _OTHER_SUFFIXES or (path / "saved_model.pb").exists():
        from keras_mp.conversion.model_file import check_model_file

        check_model_file(path)
        raise ValueError(f"{model!r} is not a .keras file: write one with model.save('model.keras')")
    if path.suffix != ".keras":
        return False
    if context.args:
        raise ValueError(
            f"unknown after {model!r}: {' '.join(context.args)}. `keras-mp {context.command.name} --help` lists "
            "the options; only training recipes add options of their own"
        )
    return True


def _step(
    model: str,
    context: typer.Context,
    chip: Any,
    batch_size: int | None,
    length: int | None,
    imports: list[str] | None,
    unsafe: bool,
) -> tuple[Any, Any, bool]:
    """A model, a batch, and whether it can train."""
    # The policy "auto" of a training recipe or a function is that of the chip.
    size = 8 if batch_size is None else batch_size
    if _is_file(model, context):
        from keras_mp.conversion.model_file import step_of_file

        return step_of_file(Path(model), size, length, imports or (), unsafe=unsafe)
    _check_no_file_options(imports, unsafe)
    from keras_mp.backend.common.device import absent_chip
    from keras_mp.cli.function_step import step_of_function
    from keras_mp.cli.training_recipe import find_model_function

    with quiet_stderr(), absent_chip(chip):  # a recipe's data sets import TensorFlow on JAX too
        build = find_model_function(model)
        if build is not None:
            return step_of_function(model, build, context.args, size, length)
        recipe, config = _recipe(model, context, batch_size, length)
        built, batch = recipe.step(config)
    return built, batch, True


def _check_trains(model: str, trains: bool) -> None:
    if not trains:
        raise ValueError(f"the model in {model!r} is not compiled for training: compile it with a loss, and save it")


def _check_no_file_options(imports: list[str] | None, unsafe: bool = False) -> None:
    for name, given in (("--import", imports), ("--unsafe", unsafe)):
        if given:
            raise ValueError(f"{name} is for a .keras file: a training recipe imports what it needs")


def _recipe(given: str, context: typer.Context, batch_size: int | None, length: int | None) -> tuple[Any, Any]:
    """The training recipe, its config with the command's options."""
    from keras_mp.cli.training_recipe import find_recipe

    recipe = find_recipe(given)
    sizes = [*_option("--batch-size", batch_size), *_option("--length", length)]
    return recipe, recipe.config([*context.args, *sizes], f"keras-mp {context.command.name} {given}")


def _option(name: str, value: int | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def main() -> None:
    """Runs the command; a user's mistake is one line."""
    try:
        app()
    except (ValueError, ImportError, OSError, TypeError, RuntimeError) as error:
        if os.environ.get("KERAS_MP_TRACEBACK"):
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
