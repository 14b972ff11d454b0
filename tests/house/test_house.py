"""The rules of the house that no linter knows.

Each rule is a function from one source file to the places that break it; the tests below run every
rule over the whole tree, and over snippets that break it, so that no rule is one that cannot fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from holdfast.coordination.node import Node

ROOT = Path(__file__).parents[2]

# The only places that may catch everything, as "path:function", each with its reason. They are the
# tops of processes and threads, which report what they caught.
OPERATION = "whatever an operation in the stores met is reported to the node as its outcome"
BROAD_EXCEPTS: dict[str, str] = {
    "src/holdfast/local_agent/socket_server.py:SocketServer._answered": (
        "the top of a connection's task; the call fails with status 500, and the defect is logged"
    ),
    "src/holdfast/trainer/ranks/bounded_entries.py:BoundedEntries._call.run": (
        "the top of a thread, which passes it on to the waiting one"
    ),
    "src/holdfast/host/tiers/storage_worker.py:StorageWorker.begin": OPERATION,
    "src/holdfast/host/tiers/storage_worker.py:StorageWorker.commit": OPERATION,
    "src/holdfast/host/tiers/storage_worker.py:StorageWorker.list_durable": OPERATION,
    "src/holdfast/host/tiers/storage_worker.py:StorageWorker.persist": OPERATION,
    "src/holdfast/host/tiers/storage_worker.py:StorageWorker.pull": OPERATION,
    "src/holdfast/host/tiers/mirror_worker.py:MirrorWorker._write": OPERATION,
    "src/holdfast/host/tiers/mirror_worker.py:MirrorWorker._commit": OPERATION,
    "src/holdfast/waits.py:begin_call.work": ("the top of a thread; its caller gets it"),
    "src/holdfast/supervise/startup/sitecustomize.py:begin": (
        "the top of the standby process; `site` would report it and run the program"
    ),
    "src/holdfast/supervise/startup/sitecustomize.py:_import_all": (
        "a module may raise anything when it is imported; the program imports it again"
    ),
    "tests/proving/driver.py:ForkedStarts.start": (
        "the top of a forked process, which shows the error and ends with 1, as Python does"
    ),
    "src/holdfast/trainer/survival.py:_Survivor._generation": (
        "the user's training raises anything; it is raised again if no lost rank is the reason"
    ),
    "src/holdfast/trainer/survival.py:_import_like_ranks": (
        "a module may raise anything when it is imported; the program imports it again"
    ),
    "tests/supervise/ranks/rank_rig.py:start_rank": "the top of a process, which prints the error",
    "src/holdfast/demo/train.py:main": (
        "the top of a process, which tells the error and ends; other ends wait for other processes"
    ),
    "examples/slurm/train.py:main": (
        "the top of a process, which tells the error and ends; other ends wait for other processes"
    ),
    "src/holdfast/interop/mindio/calls.py:_saved": (
        "its callers get a code; an object that cannot be pickled raises anything, which is logged"
    ),
    "src/holdfast/interop/mindio/calls.py:_Sink.write": (
        "torch.save makes another error of what its sink raises; this one is raised after it"
    ),
    "src/holdfast/interop/mindio/calls.py:_check": (
        "the top of a thread that runs a user's callback, whose error is logged"
    ),
    "src/holdfast/adapt/leaves.py:object_errors": (
        "code of the user's objects raises anything; the error that follows names the leaf"
    ),
    "src/holdfast/format/renaming.py:Renaming.name": (
        "code of the user raises anything; the error that follows names the name"
    ),
    "src/holdfast/interop/orbax/orbax_files.py:_translated": "Orbax raises Exception itself",
    "src/holdfast/interop/orbax/v1/responses.py:Completions._call": (
        "the top of a thread that runs a user's callback, whose error is logged"
    ),
    "src/holdfast/interop/orbax/v1/handlers.py:FolderHandler.save.save": (
        "code of the user raises anything; a synchronous call, or the result, raises it again"
    ),
    "src/holdfast/interop/orbax/shared_run.py:opening": (
        "whatever ends the opening of a manager here ends that of the other processes"
    ),
    "src/holdfast/interop/orbax/run_reader.py:RunReader.sending_errors": (
        "whatever keeps a process from a restore is sent to those that wait for it"
    ),
    "src/holdfast/interop/trainers/axlearn_files.py:read": (
        "TensorFlow and TensorStore have errors of many classes; a damaged file raises any"
    ),
    "tests/interop/orbax_ranks.py:attempt": "any error of a call is what is compared",
    "tests/interop/orbax_round_trips.py:run_all": "any error of a trip is its result",
    "tests/interop/orbax_programs.py:attempt": "an error of either module is what is compared",
    "tests/interop/orbax_sequences.py:main": (
        "the top of a process; a program that stops is reported, and the others still run"
    ),
    "src/holdfast/trainer/save/user_policies.py:UserPolicyThread._act": (
        "the top of a thread that runs a user's code; the trainer's next call raises the error"
    ),
    "src/holdfast/trainer/save/saver.py:Saver._do": (
        "the top of a thread; the save has failed, which the trainer's next call raises"
    ),
}

FILE_LINES_MAX = 800
BODY_LINES_MAX = 60
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 8
MORE_PARAMETERS = {"CheckpointManager.__init__": 12}  # the settings of a whole run, by keyword
NAMES_THAT_SAY_NOTHING = {"common", "helper", "helpers", "misc", "util", "utils"}
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:root|work|home/\w+|Users/\w+)/")
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted\.org|npmjs\.|conda\.anaconda\.org"
    r"|index[-_]url|find[-_]links|trusted[-_]host|registry *= *.?http",
    re.IGNORECASE,
)

DECODING = "src/holdfast/format/json_codec.py"
DIRECT_DECODE = re.compile(r"msgspec\.json\.decode\(")

AGENT = "src/holdfast/host/"
NODE_API = {name for name in vars(Node) if not name.startswith("_")}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file of the tree: its path from the root, with slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed module; empty for what is not Python, so that code rules find nothing."""
        return ast.parse(self.text if self.path.endswith(".py") else "")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the module, outer before inner."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[tuple[str, Function]]:
        """All functions with their qualified names, outer before inner."""
        return list(_functions_in(self.tree))

    def place_of(self, node: ast.AST) -> str:
        """The file and the innermost function around a node, as a key of exceptions to rules."""
        around = [
            name
            for name, function in self.functions
            if function.lineno <= node.lineno <= function.end_lineno
        ]
        return f"{self.path}:{around[-1] if around else '<module>'}"


def _functions_in(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, node = pending.pop()
        if isinstance(node, Function):
            yield prefix + node.name, node
        if isinstance(node, Function | ast.ClassDef):
            prefix = f"{prefix}{node.name}."
        inner = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
        pending += [(prefix, child) for child in reversed(inner)]


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for the expression `a.b.c`, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := _dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


# The rules.


def files_are_short(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if source.path.endswith(".py") and lines > FILE_LINES_MAX:
        yield f"{source.path}: {lines} lines, at most {FILE_LINES_MAX}"


def functions_are_short(source: Source) -> Iterator[str]:
    for name, function in source.functions:
        place = f"{source.path}:{function.lineno} {name}"
        lines = function.end_lineno - function.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{place}: {lines} lines, at most {FUNCTION_LINES_MAX}"
        documented = ast.get_docstring(function) is not None
        first = function.body[min(documented, len(function.body) - 1)]
        body_lines = function.end_lineno - first.lineno + 1
        if source.path.startswith("src/") and body_lines > BODY_LINES_MAX:
            yield f"{place}: a body of {body_lines} lines, at most {BODY_LINES_MAX}"


def functions_take_few_parameters(source: Source) -> Iterator[str]:
    for name, function in source.functions:
        arguments = function.args
        named = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
        count = sum(argument.arg != "self" for argument in named)
        # A signature that another project defines is as long as it is there.
        most = MORE_PARAMETERS.get(name, PARAMETERS_MAX)
        if count > most and not source.path.startswith("src/holdfast/interop/"):
            place = f"{source.path}:{function.lineno} {name}"
            yield f"{place}: {count} parameters, at most {most}"


def names_say_something(source: Source) -> Iterator[str]:
    parts = Path(source.path).with_suffix("").parts
    if source.path.endswith(".py"):
        for part in parts:
            if part.strip("_").removeprefix("test_") in NAMES_THAT_SAY_NOTHING:
                yield f"{source.path}: `{part}` does not say what the file is for"


def broad_excepts(source: Source) -> Iterator[tuple[str, int]]:
    """Each handler of everything: its key in `BROAD_EXCEPTS`, and its line."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = [node.type]
        elif isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] == "suppress":
            caught = node.args
        else:
            continue
        types = [t for c in caught for t in (c.elts if isinstance(c, ast.Tuple) else [c])]
        if any(t is None or _dotted(t) in ("Exception", "BaseException") for t in types):
            yield source.place_of(node), node.lineno


def errors_are_caught_by_name(source: Source) -> Iterator[str]:
    for key, line in broad_excepts(source):
        if key not in BROAD_EXCEPTS:
            yield f"{source.path}:{line} catches everything; name the errors (key: {key!r})"


def skips_have_a_reason(source: Source) -> Iterator[str]:
    called = {node.func: node for node in source.nodes if isinstance(node, ast.Call)}
    for node in source.nodes:
        found = re.fullmatch(
            r"(pytest|pytest\.mark|mark|unittest)\.(skip|skipif|skipIf|xfail|importorskip)",
            _dotted(node),
        )
        if not found:
            continue
        call = called.get(node)
        values = [k.value for k in call.keywords if k.arg == "reason"] if call else []
        if call and found[2] in ("skip", "xfail") and found[1] != "pytest.mark":
            values += call.args[:1]
        if not any(not isinstance(v, ast.Constant) or v.value for v in values):
            yield f"{source.path}:{node.lineno} {found[0]} gives no reason"


def no_path_of_a_machine(source: Source) -> Iterator[str]:
    yield from _lines_with(MACHINE_PATH, "a path of one machine", source)


def no_package_registry(source: Source) -> Iterator[str]:
    yield from _lines_with(REGISTRY, "a package registry", source)


def _lines_with(pattern: re.Pattern[str], what: str, source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := pattern.search(line):
            yield f"{source.path}:{number} names {what}: {found[0]}"


LOCATION = "src/holdfast/store/location.py"
RUN_PATH = re.compile(r"/ (EVENTS|RUN_FILE|LEASES|CHECKPOINTS|ATTEMPTS)\b")


def json_is_decoded_in_one_place(source: Source) -> Iterator[str]:
    """Two threads that use a type for the first time at once end the process otherwise."""
    if source.path.startswith("src/") and source.path != DECODING:
        yield from _lines_with(DIRECT_DECODE, f"what {DECODING} does in a safe way", source)


def the_agent_asks_the_node(source: Source) -> Iterator[str]:
    """The state machines behind the node may change without the agent."""
    if not source.path.startswith(AGENT):
        return
    for node in source.nodes:
        if not isinstance(node, ast.Attribute) or node.attr in NODE_API:
            continue
        if _dotted(node.value).split(".")[-1] in ("node", "_node"):
            yield f"{source.path}:{node.lineno} `{_dotted(node)}` is no public method of Node"


def a_runs_paths_are_joined_in_one_place(source: Source) -> Iterator[str]:
    """A run may be somewhere else than in a directory."""
    if source.path.startswith("src/") and source.path != LOCATION:
        yield from _lines_with(RUN_PATH, f"what only {LOCATION} joins", source)


PROCESS_HOLDERS = {
    "tests/engines/nodes.py:Node.boot": "its `kill` ends it",
    "tests/hosts.py:Host.start": "its `end` ends it",
    "tests/prepared.py:Stem.__init__": "it ends with the tests",
    "tests/demo/test_jax_learner.py:_start": "its caller holds it",
    "tests/trust/test_hostile_input.py:start_child": "its caller holds it",
    "tests/trust/who_may_users.py:Users.popen": "its callers hold it",
}
"""Functions whose processes have an end elsewhere, each with where that is."""
HOLDING = ("ending", "enter_context")


def processes_are_held(source: Source) -> Iterator[str]:
    """A pipe that no test closes is collected in a later test, which fails instead of it."""
    if not source.path.startswith("tests/"):
        return
    held: set[ast.AST] = set()
    for node in source.nodes:
        if isinstance(node, ast.withitem):
            held.add(node.context_expr)
        elif isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] in HOLDING:
            held.update(node.args)
    for node in source.nodes:
        if _has_pipes(node) and node not in held:
            key = source.place_of(node)
            if key not in PROCESS_HOLDERS:
                yield f"{source.path}:{node.lineno} starts a process outside `with` (key: {key!r})"


def _has_pipes(node: ast.AST) -> bool:
    """Whether it starts a process whose pipes somebody has to close."""
    if not isinstance(node, ast.Call):
        return False
    if _dotted(node.func) == "prepared.start":
        return True
    values = [keyword.value for keyword in node.keywords if keyword.arg != "stdin"]
    piped = any(_dotted(value) == "subprocess.PIPE" for value in values)
    given = any(keyword.arg is None for keyword in node.keywords)
    return _dotted(node.func) == "subprocess.Popen" and (piped or given)


RULES: list[Callable[[Source], Iterator[str]]] = [
    files_are_short,
    functions_are_short,
    functions_take_few_parameters,
    names_say_something,
    errors_are_caught_by_name,
    skips_have_a_reason,
    no_path_of_a_machine,
    no_package_registry,
    json_is_decoded_in_one_place,
    the_agent_asks_the_node,
    a_runs_paths_are_joined_in_one_place,
    processes_are_held,
]


# The rules hold in the tree.


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """Every text file that is committed or could be."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for path in listing.stdout.rstrip("\0").split("\0"):
        data = (ROOT / path).read_bytes() if (ROOT / path).is_file() else b"\0"
        if b"\0" not in data:
            found.append(Source(path, data.decode()))
    assert any(source.path == "tests/house/test_house.py" for source in found)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(
    rule: Callable[[Source], Iterator[str]], sources: list[Source]
) -> None:
    violations = [violation for source in sources for violation in rule(source)]
    assert not violations, "\n".join(["", *violations])


def test_every_allowed_broad_except_exists_and_has_a_reason(sources: list[Source]) -> None:
    present = {key for source in sources for key, _ in broad_excepts(source)}
    assert BROAD_EXCEPTS.keys() <= present
    assert all(BROAD_EXCEPTS.values())


def test_every_module_is_public_or_closed_to_integrations() -> None:
    public = {
        *("building", "clock", "data", "errors", "interop", "local_agent", "policy", "reading"),
        "torch",
    }
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (
        one for one in contracts["contracts"] if one["name"] == "Integrations stand on public names"
    )
    closed = {name.removeprefix("holdfast.") for name in contract["forbidden_modules"]}
    package = ROOT / "src" / "holdfast"
    modules = {
        path.stem
        for path in package.iterdir()
        if (path / "__init__.py").exists() or path.suffix == ".py"
    } - {"__init__", "__main__"}
    assert closed.isdisjoint(public)
    assert modules == closed | public


def test_decisions_are_numbered_in_a_row() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:5] for page in pages] == [f"{n:04}-" for n in range(1, len(pages) + 1)]
    headed = [
        page.name for page in pages if not page.read_text().startswith(f"# {int(page.name[:4])}. ")
    ]
    assert headed == []


def test_constraints_pin_every_package_of_the_environment() -> None:
    pins = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins)
    pinned = {
        canonicalize_name(pin.name) for pin in pins if not pin.marker or pin.marker.evaluate()
    }
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert _needed_by(name, {"dev"}) - {name} <= pinned


def _needed_by(package: str, extras: set[str]) -> set[str]:
    """The canonical names of all that `package[extras]` installs here, itself included."""
    needed: set[str] = set()
    asked = [(canonicalize_name(package), frozenset(extras))]
    seen = set(asked)
    while asked:
        name, wanted = asked.pop()
        needed.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in wanted | {""}):
                continue
            more = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if more not in seen:
                seen.add(more)
                asked.append(more)
    return needed


# Each rule can fail, and does not fail on what it allows.


def _function(lines: int, docstring_lines: int = 1) -> str:
    doc = ['    """First line.', *["    more"] * (docstring_lines - 2), '    """']
    return "\n".join(["def f():", *doc[:docstring_lines], *["    pass"] * lines])


BREACHES = {
    "long file": (files_are_short, "src/a.py", "x = 1\n" * 801),
    "long body": (functions_are_short, "src/a.py", _function(61, 2)),
    "long function": (functions_are_short, "tests/a.py", _function(68, 3)),
    "long method": (functions_are_short, "src/a.py", "class A:\n def f():\n" + "  pass\n" * 61),
    "many parameters": (
        functions_take_few_parameters,
        "src/a.py",
        "def f(a, /, b, c, d, e, *, g, h, i, j): pass",
    ),
    "utils file": (names_say_something, "src/a/_utils.py", ""),
    "helpers folder": (names_say_something, "tests/helpers/a.py", ""),
    "bare except": (errors_are_caught_by_name, "src/a.py", "try: f()\nexcept: pass"),
    "except Exception": (
        errors_are_caught_by_name,
        "src/a.py",
        "def g():\n try: f()\n except Exception as e: print(e)",
    ),
    "except tuple": (
        errors_are_caught_by_name,
        "tests/a.py",
        "try: f()\nexcept (OSError, BaseException): pass",
    ),
    "suppress": (errors_are_caught_by_name, "src/a.py", "contextlib.suppress(Exception)"),
    "bare skip": (
        skips_have_a_reason,
        "tests/a.py",
        "@pytest.mark.skip\ndef test(): pass",
    ),
    "skipif": (skips_have_a_reason, "tests/a.py", "pytest.mark.skipif(True)"),
    "empty reason": (skips_have_a_reason, "tests/a.py", "pytest.skip('')"),
    "importorskip": (skips_have_a_reason, "tests/a.py", "pytest.importorskip('a')"),
    "machine path": (no_path_of_a_machine, "docs/a.md", f"see `/{'root'}/a`"),
    "home path": (no_path_of_a_machine, "Makefile", f"cd /{'home'}/me/a"),
    "registry": (no_package_registry, "constraints.txt", f"--extra-{'index'}-url a"),
    "direct decode": (
        json_is_decoded_in_one_place,
        "src/a.py",
        "x = msgspec.json.decode(data, type=A)",
    ),
    "a state machine of the node": (
        the_agent_asks_the_node,
        "src/holdfast/host/a.py",
        "x = self._node.roles.follower.inventory",
    ),
    "a private part of the node": (
        the_agent_asks_the_node,
        "src/holdfast/host/a.py",
        "node._work(turn)",
    ),
    "a path of a run": (
        a_runs_paths_are_joined_in_one_place,
        "src/a.py",
        "log = run / EVENTS / 'a.log'",
    ),
    "a process without an end": (
        processes_are_held,
        "tests/a.py",
        "def f():\n def g():\n  a = subprocess.Popen(b, stdout=subprocess.PIPE)",
    ),
    "a process whose pipes are hidden": (
        processes_are_held,
        "tests/a.py",
        "a = subprocess.Popen(b, **pipes)",
    ),
    "a forked process": (processes_are_held, "tests/a.py", "prepared.start(a, b, c).wait()"),
    "registry host": (no_package_registry, "README.md", f"https://{'pypi'}.org/simple"),
}

FINE = {
    "full body": (functions_are_short, "src/a.py", _function(60, 3)),
    "docstring alone": (functions_are_short, "src/a.py", 'def f():\n    """Does f."""'),
    "long test body": (functions_are_short, "tests/a.py", _function(66, 3)),
    "long text": (files_are_short, "docs/a.md", "x\n" * 501),
    "named error": (errors_are_caught_by_name, "src/a.py", "try: f()\nexcept OSError: pass"),
    "skip with reason": (skips_have_a_reason, "tests/a.py", "pytest.skip('why')"),
    "mark with reason": (
        skips_have_a_reason,
        "tests/a.py",
        "@pytest.mark.skipif(True, reason='why')\ndef test(): pass",
    ),
    "decode in a test": (json_is_decoded_in_one_place, "tests/a.py", "msgspec.json.decode(a)"),
    "a query of the node": (
        the_agent_asks_the_node,
        "src/holdfast/host/a.py",
        "x = self._node.handle(item, 0.0, published), self._node.view(0.0)",
    ),
    "the node's parts in a test": (the_agent_asks_the_node, "tests/a.py", "agent.node.roles"),
    "processes with an end": (
        processes_are_held,
        "tests/a.py",
        "with ending(prepared.start(a, b, c)), subprocess.Popen(d, stdout=subprocess.PIPE):\n"
        "    ends.enter_context(subprocess.Popen(e, stderr=subprocess.PIPE))\n"
        "    subprocess.Popen(f, stdin=subprocess.DEVNULL)",
    ),
    "relative path": (no_path_of_a_machine, "docs/a.md", f"runs/{'work'}/a and ../{'work'}/a"),
}


@pytest.mark.parametrize(("rule", "path", "text"), BREACHES.values(), ids=BREACHES)
def test_the_rule_finds_a_breach(
    rule: Callable[[Source], Iterator[str]], path: str, text: str
) -> None:
    assert len(list(rule(Source(path, text)))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), FINE.values(), ids=FINE)
def test_the_rule_allows_what_is_fine(
    rule: Callable[[Source], Iterator[str]], path: str, text: str
) -> None:
    assert not list(rule(Source(path, text)))


def test_an_allowed_broad_except_is_no_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("src/a.py", "class A:\n def g():\n  try: f()\n  except Exception: pass")
    assert len(list(errors_are_caught_by_name(source))) == 1
    monkeypatch.setitem(BROAD_EXCEPTS, "src/a.py:A.g", "the top of a thread")
    assert not list(errors_are_caught_by_name(source))
