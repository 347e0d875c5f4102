"""How many small faults the tests of `make test` find: mutants of the library, each judged by the tests of its room.

    python benchmarks/mutants.py draw                     # benchmarks/mutants.txt: which mutants, from a seed
    python benchmarks/mutants.py judge --out judged.txt   # runs each on TensorFlow, two at a time; --rooms fp8 for one

A mutant is one change of one expression. It is killed when a test of the folder that tests its room, or of promises,
fails or hangs; the first failure ends its run. One run without a mutant says which tests reach the expression: only
their files are run with the mutant, and these tests first. The list says below a mutant why it changes nothing that a
program could see, or which test of another folder judges it, too.

The list names a mutant by its function and its expression, not by a line, so that it is the same one after the code
around it has changed. A mutant whose expression is no longer there stops the judge.
"""

import argparse
import ast
import collections
import functools
import itertools
import json
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
ROOT = HERE.parent
LIST = HERE / "mutants.txt"
SEED = 20261129
COUNT = 12  # of each room
ROOMS = {  # the folder of its tests, beside promises
    "loss_scaling": "loss_scaling",
    "optimizer": "loss_scaling",
    "fp8": "fp8",
    "stability": "stability",
    "lean": "lean",
    "rebuild": "rebuild",
    "precision": "precision",
    "training": "training",
    "treatment": "treatment",
    "backend": "backend",
}
HANGS = 900  # seconds
AT_ONCE = 2
SAME, ALSO = "# equivalent: ", "# also: "

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


def scopes_of(tree):
    """The names of the class and function that each node stands in, by the node's id; "" at the top of a module."""
    names = {id(tree): ""}
    for node in ast.walk(tree):
        name = names[id(node)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
        names |= {id(child): name for child in ast.iter_child_nodes(node)}
    return names


@functools.cache
def mutants_of(file):
    """Each mutant of a file, by its line in the list: where the expression begins and ends, and the new text."""
    text = file.read_bytes()
    tree = ast.parse(text)
    left_out, scopes, mutants, alike = set(map(id, unseen(tree))), scopes_of(tree), {}, collections.Counter()
    starts = list(itertools.accumulate(map(len, text.splitlines(keepends=True)), initial=0))
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        place = node.test if isinstance(node, ast.If) else node
        for changed in changes(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            path = file.relative_to(ROOT).as_posix()
            line = f"{path} {scopes[id(node)]}: {' '.join(ast.unparse(place).split())} => {changed}"
            alike[line] += 1
            mutants[line if alike[line] == 1 else f"{line}  # {alike[line]}"] = start, end, changed
    return mutants


def draw():
    """Writes down which mutants, one a line: `file function: expression => text`, and which of several alike."""
    rng = random.Random(SEED)
    lines = [f"# seed {SEED}"]
    for room in ROOMS:
        files = [file for file in sorted((ROOT / "keras_mp" / room).rglob("*.py")) if "jax" not in str(file)]
        lines += sorted(rng.sample([line for file in files for line in mutants_of(file)], COUNT))
    LIST.write_text("\n".join(lines) + "\n")


def place_of(mutant):
    """A mutant's file, where in its bytes the expression begins and ends, and the text in its place."""
    name = mutant.split(" ")[0]
    start, end, text = mutants_of(ROOT / name)[mutant]
    return name, start, end, text


def mutated(root, mutant):
    """The file of a mutant, its bytes, and its bytes with the mutant."""
    name, start, end, text = place_of(mutant)
    before = (root / name).read_bytes()
    return root / name, before, before[:start] + text.encode() + before[end:]


PROBE = """
import os
import sys

known = set()

def hit(number):
    test, frame = os.environ.get("MUTANTS_TEST", "import"), sys._getframe(1)
    while frame is not None:  # a module may be imported in the midst of a test, and its constants serve all
        if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"].startswith("keras_mp."):
            test = "import"
        frame = frame.f_back
    line = f"{number} {test}\\n"
    if line not in known:
        known.add(line)
        with open(os.environ["MUTANTS_REACHED"], "a") as file:
            file.write(line)

def pytest_runtest_setup(item):
    os.environ["MUTANTS_TEST"] = item.nodeid
"""


def reached(root, mutants, room, out, options):
    """Runs the tests of a room once, and writes down for each mutant the tests that reach its place."""
    (root / "mutants_probe.py").write_text(PROBE)
    inserts = collections.defaultdict(list)
    for number, mutant in enumerate(mutants):
        name, start, end, text = place_of(mutant)
        hit = f"__import__('mutants_probe').hit({number})"
        if text == "pass" or text == "return None":
            inserts[name].append((start, 1, end, f"{hit}; "))
        else:  # where several begin, the outermost opens first; where several end, the innermost closes first
            inserts[name].append((start, 1, end, f"({hit}, ("))
            inserts[name].append((end, 0, start, "))[1]"))
    for name, of_file in inserts.items():
        text = (root / name).read_bytes()
        for place, _, _, inserted in sorted(of_file, reverse=False, key=lambda i: (-i[0], i[1], i[2])):
            text = text[:place] + inserted.encode() + text[place:]
        (root / name).write_bytes(text)
    lines = root / f"reached_{room}.txt"
    lines.write_text("")
    environment = os.environ | {"MUTANTS_REACHED": str(lines), "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutants_probe", *options]
    command += [f"tests/{ROOMS[room]}", "tests/promises"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    print(room, done.stdout.strip().splitlines()[-1], flush=True)
    tests = {mutant: set() for mutant in mutants}
    for number, test in (line.split(" ", 1) for line in lines.read_text().splitlines()):
        tests[mutants[int(number)]].add(test)
    out.write_text(json.dumps({mutant: sorted(names) for mutant, names in tests.items()}))


class First:
    """Runs first the tests that reach a mutant; others of their files may see what a cache or a fixture keeps."""

    def __init__(self, tests, module):
        self.tests, self.module = set(tests), module

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: (item.nodeid not in self.tests, self.module not in item.path.name))


def judge(root, mutant, reaching, options):
    """Runs the tests that reach a mutant in a child that has imported the frameworks; the name of the failed test."""
    file, before, after = mutated(root, mutant)
    folders = f"tests/{ROOMS[mutant.split('/')[1]]}", "tests/promises"
    tests = [
        path.relative_to(root).as_posix() for folder in folders for path in sorted((root / folder).glob("test_*.py"))
    ]
    if "import" not in reaching:
        tests = [test for test in tests if any(name.startswith(f"{test}::") for name in reaching)]
    tests += [below for listed, below in said(ALSO) if listed == mutant]
    if not tests:
        return "SURVIVED: no test reaches it"
    file.write_bytes(after)
    log = root / "judged.log"
    child = os.fork()
    if not child:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        import pytest

        code = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", *options, *tests], plugins=[First(reaching, file.stem)]
        )
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
        file.write_bytes(before)
    if os.waitstatus_to_exitcode(status) in (0, 5):  # 5: none of the tests is selected
        return "SURVIVED"
    failed = [line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"killed: {failed[0].split(' - ')[0] if failed else f'status {status}'}"


def said(kind):
    """Each mutant below which the list says something of a kind, with what it says."""
    lines = itertools.pairwise(LIST.read_text().splitlines())
    return [(mutant, below.removeprefix(kind)) for mutant, below in lines if below.startswith(kind)]


def work(root, mutants, reaching, out, options):
    os.chdir(root)
    sys.path[:] = [str(root), str(root / "tests"), *(p for p in sys.path if p not in ("", str(HERE), str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(root)
    import jax  # noqa: F401  # imported once here, and not once for each mutant; the kit itself is imported by the child
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    for mutant in mutants:
        started = time.monotonic()
        verdict = judge(root, mutant, reaching[mutant], options)
        with open(out, "a") as file:
            file.write(f"{verdict} | {time.monotonic() - started:.0f} s | {mutant}\n")


def summary(out):
    equivalent = dict(said(SAME))
    judged = [line.split(" | ", 2) for line in Path(out).read_text().splitlines()]
    counts = collections.defaultdict(lambda: [0, 0])
    for verdict, _, mutant in judged:
        if mutant not in equivalent:
            room = mutant.split("/")[1]
            counts[room][0] += verdict.startswith("killed")
            counts[room][1] += 1
    for room, (killed, all_) in counts.items():
        print(f"{room:14} {killed:3} of {all_:3} killed")
    print(f"{'all':14} {sum(k for k, _ in counts.values()):3} of {sum(n for _, n in counts.values()):3}")


def copied(folder):
    """A copy of the repository, which mutants change."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "build"))
    return folder


def side_by_side(commands):
    """Runs commands, as many at a time as AT_ONCE says."""
    running = []
    for command in commands:
        while len(running) == AT_ONCE:
            time.sleep(0.5)
            running = [process for process in running if process.poll() is None]
        running.append(subprocess.Popen([sys.executable, __file__, *map(str, command)]))
    for process in running:
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["draw", "judge", "reached", "work", "summary"])
    parser.add_argument("--out", default="judged.txt", help="a file of a line a mutant; those in it are not run again")
    parser.add_argument("--mark", default="not slow", help="which tests: pytest's -m")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS), help="the rooms to judge")
    for name in ("--root", "--room", "--part"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    out = Path(asked.out).resolve()
    if asked.do == "draw":
        return draw()
    if asked.do == "summary":
        return summary(out)
    done = {line.split(" | ", 2)[2] for line in out.read_text().splitlines()} if out.exists() else set()
    listed = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    gone = [mutant for mutant in listed if mutant not in mutants_of(ROOT / mutant.split(" ")[0])]
    if gone:
        raise SystemExit("\n".join(["The code of these mutants is no longer there; draw others:", *gone]))
    done |= dict(said(SAME)).keys()
    todo = [mutant for mutant in listed if mutant not in done and mutant.split("/")[1] in asked.rooms]
    if asked.do == "reached":
        of_room = [mutant for mutant in todo if mutant.split("/")[1] == asked.room]
        return reached(Path(asked.root), of_room, asked.room, out, ["-m", asked.mark])
    if asked.do == "work":
        reaching = json.loads(Path(asked.root).with_name("reached.json").read_text())
        return work(Path(asked.root), asked.part.splitlines(), reaching, out, ["-m", asked.mark])
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        rooms = sorted({mutant.split("/")[1] for mutant in todo}, key=list(ROOMS).index)
        mark = ["--mark", asked.mark]
        side_by_side(
            [
                "reached",
                "--root",
                copied(folder / f"of_{room}"),
                "--room",
                room,
                "--out",
                folder / f"{room}.json",
                *mark,
            ]
            for room in rooms
        )
        reaching = {}
        for room in rooms:
            reaching |= json.loads((folder / f"{room}.json").read_text())
        (folder / "reached.json").write_text(json.dumps(reaching))
        side_by_side(
            [
                "work",
                "--root",
                copied(folder / str(part)),
                "--part",
                "\n".join(todo[part::AT_ONCE]),
                "--out",
                out,
                *mark,
            ]
            for part in range(AT_ONCE)
        )
    summary(out)


if __name__ == "__main__":
    main()
