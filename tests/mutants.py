"""How many small faults the tests of `make test` find: mutants of the library, each judged by the tests of its room.

    python tests/mutants.py draw                 # tests/mutants.txt: which mutants, from a seed
    python tests/mutants.py judge --out judged   # runs each on TensorFlow; two at a time, about half a minute each

A mutant is one change of one expression. It is killed when a test of the folder that mirrors its room fails or hangs; the
first failure ends its run. Mutants that change nothing a program could see are listed in EQUIVALENT with the reason.
"""

import argparse
import ast
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIST = HERE / "mutants.txt"
SEED = 20261126
ROOMS = {  # how many of each; the three that must be found best have more
    "loss_scaling": 20,
    "fp8": 20,
    "stability": 20,
    "lean": 12,
    "rebuild": 12,
    "precision": 12,
    "training": 8,
    "export": 12,
}
HANGS = 400  # seconds
EQUIVALENT: dict[str, str] = {}

COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*", ast.Mod: "*"}


def text_of(node):
    return f"({ast.unparse(node)})"


def changes(node):
    """The texts that could stand in a node's place."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
            yield f"{text_of(left)} {COMPARED[type(op)]} {text_of(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
            yield f"{text_of(left)} {COMPUTED[type(op)]} {text_of(right)}"
        case ast.BoolOp(op=op, values=values):
            yield (" or " if isinstance(op, ast.And) else " and ").join(map(text_of, values))
        case ast.UnaryOp(op=ast.Not(), operand=operand) | ast.UnaryOp(op=ast.USub(), operand=operand):
            yield text_of(operand)
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield repr(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"{text_of(orelse)} if {text_of(test)} else {text_of(body)}"
        case ast.If(test=test):
            yield f"not {text_of(test)}"
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"


def unseen(tree):
    """Nodes in docstrings, annotations and messages of errors, which no mutant changes."""
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.Raise):
            parts = [node]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.arg) and node.annotation:
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef) and node.returns:
            parts = [node.returns]
        elif isinstance(node, ast.JoinedStr):
            parts = [node]
        for part in parts:
            yield from ast.walk(part)


def mutants_of(file):
    """Each mutant of a file: line, column, end line, end column, text in its place."""
    tree = ast.parse(file.read_text())
    left_out = set(map(id, unseen(tree)))
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        place = node.test if isinstance(node, ast.If) else node
        for text in changes(node):
            yield place.lineno, place.col_offset, place.end_lineno, place.end_col_offset, text


def draw():
    """Writes down which mutants: one a line, `file:line:column-line:column => text`."""
    rng = random.Random(SEED)
    lines = [f"# seed {SEED}"]
    for room, count in ROOMS.items():
        pattern = "checkpoint*.py" if room == "training" else "*.py"
        files = sorted((HERE.parent / "keras_mp" / room).glob(pattern))
        all_of_room = [(file, mutant) for file in files for mutant in mutants_of(file)]
        for file, (line, column, last, end, text) in sorted(rng.sample(all_of_room, count)):
            place = file.relative_to(HERE.parent).as_posix()
            lines.append(f"{place}:{line}:{column}-{last}:{end} => {text}")
    LIST.write_text("\n".join(lines) + "\n")


def mutated(root, mutant):
    """The file of a mutant, its text, and its text with the mutant."""
    place, text = mutant.split(" => ", 1)
    name, line, middle, end = place.split(":")
    column, last = middle.split("-")
    file = root / name
    before = file.read_text()
    lines = before.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: int(line) - 1])) + int(column)
    stop = sum(map(len, lines[: int(last) - 1])) + int(end)
    raw = before.encode()
    return file, before, (raw[:start] + text.encode() + raw[stop:]).decode()


def tests_of(file, root):
    """The tests of a file's room, those of its own module first."""
    folder = root / "tests" / file.parent.name
    files = sorted(folder.glob("test_*.py"))
    return [str(f) for f in sorted(files, key=lambda f: (file.stem not in f.stem, f.name))]


def judge(root, mutant, options):
    """Runs the tests of a mutant's room in a child that has imported the frameworks; the name of the failed test."""
    file, before, after = mutated(root, mutant)
    file.write_text(after)
    log = root / "judged.log"
    child = os.fork()
    if not child:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        import pytest

        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *options, *tests_of(file, root)])
        sys.stdout.flush()
        os._exit(int(code))
    started = time.monotonic()
    try:
        while time.monotonic() - started < HANGS:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.1)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "killed: hangs"
    finally:
        file.write_text(before)
    if status == 0:
        return "SURVIVED"
    failed = [line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"killed: {failed[0].split(' - ')[0] if failed else f'status {status}'}"


def work(root, mutants, out, options):
    os.chdir(root)
    sys.path[:] = [str(root), str(root / "tests"), *(p for p in sys.path if p not in ("", str(HERE), str(HERE.parent)))]
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(root)
    import jax  # noqa: F401  # imported once here, and not once for each mutant; the kit itself is imported by the child
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    for mutant in mutants:
        started = time.monotonic()
        verdict = judge(root, mutant, options)
        with open(out, "a") as file:
            file.write(f"{verdict} | {time.monotonic() - started:.0f} s | {mutant}\n")


def summary(out):
    judged = [line.split(" | ") for line in Path(out).read_text().splitlines()]
    counts = collections.defaultdict(lambda: [0, 0])
    for verdict, _, mutant in judged:
        if mutant not in EQUIVALENT:
            room = mutant.split("/")[1]
            counts[room][0] += verdict.startswith("killed")
            counts[room][1] += 1
    for room, (killed, all_) in counts.items():
        print(f"{room:14} {killed:3} of {all_:3} killed")
    print(f"{'all':14} {sum(k for k, _ in counts.values()):3} of {sum(n for _, n in counts.values()):3}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["draw", "judge", "work", "summary"])
    parser.add_argument("--out", default="judged.txt", help="a file of a line a mutant; those in it are not run again")
    parser.add_argument("--mark", default="not slow", help="which tests: pytest's -m")
    parser.add_argument("--root", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    out = Path(asked.out).resolve()
    if asked.do == "draw":
        return draw()
    if asked.do == "summary":
        return summary(out)
    mutants = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    if asked.do == "work":
        return work(Path(asked.root), sys.stdin.read().splitlines(), out, ["-m", asked.mark])
    done = out.read_text() if out.exists() else ""
    todo = [mutant for mutant in mutants if mutant not in done]
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for number in range(2):
            root = Path(folder) / str(number)
            shutil.copytree(HERE.parent, root, ignore=shutil.ignore_patterns(".*", "build", "docs"))
            command = [sys.executable, __file__, "work", "--root", root, "--out", out, "--mark", asked.mark]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            worker.stdin.write("\n".join(todo[number::2]))
            worker.stdin.close()
            workers.append(worker)
        for worker in workers:
            worker.wait()
    summary(out)


if __name__ == "__main__":
    main()
