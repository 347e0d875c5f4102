"""Every command and call that the kit prints is there, and takes the options and arguments that are written."""

import ast
import inspect
import pkgutil
import re
from pathlib import Path

import typer
from command_line import run

from keras_mp import cli
from keras_mp.cli.training_recipe import find_model_function

ROOT = Path(__file__).parents[1]
FILLED = "FILLED"


def strings_of(tree):
    """The texts of a program, its docstrings too; what is filled in when they are printed is `FILLED`."""
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else FILLED for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield re.sub(r"\{\w+\}", FILLED, node.value)


def calls_in(text):
    """The calls of the kit in a text, from its name to the bracket that ends them, and the names in backquotes."""
    yield from re.findall(r"`(keras_mp(?:\.[A-Za-z]\w*)+)`", text)
    for begun in re.finditer(r"\bkeras_mp(?:\.[A-Za-z]\w*)+\(", text):
        depth = 1
        for end in range(begun.end(), len(text)):
            depth += (text[end] in "([{") - (text[end] in ")]}")
            if not depth:
                yield text[begun.start() : end + 1]
                break


PRINTED = {
    path.relative_to(ROOT): [" ".join(text.split()) for text in strings_of(ast.parse(path.read_text()))]
    for path in sorted((ROOT / "keras_mp").rglob("*.py"))
}
PAGES = {
    path.relative_to(ROOT): path.read_text().splitlines() for path in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
}


def test_every_command_is_there_and_has_the_options_that_are_written(monkeypatch):
    monkeypatch.chdir(ROOT)  # where the training recipes are
    helps = {}

    def options_of(*command):
        if command not in helps:
            done = run(*command, "--help")
            helps[command] = set(re.findall(r"(?<!\S)--[a-z][\w-]*", done.stdout)) if done.returncode == 0 else None
        return helps[command]

    def own(given):
        """The options that a training recipe, or a function that builds a model, brings."""
        if (ROOT / "recipes" / f"{given}.py").is_file():
            return options_of("train", given)
        if given.startswith("models."):
            return {f"--{name.replace('_', '-')}" for name in inspect.signature(find_model_function(given)).parameters}
        return None  # the reader's own

    names = typer.main.get_command(cli.app).commands
    wrong, count = [], 0
    for file, texts in [*PRINTED.items(), *PAGES.items()]:
        for written in [words for text in texts for words in re.findall(r"\bkeras-mp ([^`|#]+)", text)]:
            name, *words = written.split()
            if not (name == FILLED or name.isalpha() and name.islower()) or name == "that":
                continue
            count += 1
            asked = {word.split("=")[0].rstrip(":,.") for word in words if word.startswith("--")} - {"--help"}
            brought = own(words[0]) if words else None
            known = [options_of(name)] if name != FILLED else [options_of(one) for one in names]
            for options in known:
                is_own = words and brought is None and re.search(r":|\.py$|^NAME$", words[0])
                if options is None or not (is_own or asked <= options | (brought or set())):
                    wrong.append(f"{file}: keras-mp {written}")
    assert count > 80 and wrong == []


def test_no_line_of_help_is_cut_and_each_command_begins_with_one_that_can_be_copied():
    whole = run("--help", columns=80).stdout
    commands = typer.main.get_command(cli.app).commands
    assert not re.search(r"\.\.\.$", whole, re.MULTILINE) and max(map(len, whole.splitlines())) <= 80
    for name in commands:
        lines = run(name, "--help", columns=80).stdout.splitlines()
        assert re.search(rf"^  {name} +[A-Z].*\.$", whole, re.MULTILINE), whole
        assert lines[2].strip().startswith(f"keras-mp {name} ") and not lines[3], lines


def test_every_call_is_there_and_takes_the_arguments_that_are_written():
    wrong, count = [], 0
    for file, texts in PRINTED.items():
        for call in [call for text in texts for call in calls_in(text) if f".{FILLED}" not in call]:
            name, _, arguments = call.partition("(")
            count += 1
            try:
                value = pkgutil.resolve_name(name)
                if arguments:
                    written = ast.parse(
                        re.sub(r"(?<=[(\s])\.\.\. ", "", call.replace("=...", "=None")), mode="eval"
                    ).body
                    options = {keyword.arg: keyword.value for keyword in written.keywords}
                    inspect.signature(value).bind(*written.args, **options)
            except (AttributeError, ImportError, SyntaxError, TypeError) as error:
                wrong.append(f"{file}: {call}: {error}")
    assert count > 150 and wrong == []
