"""The house rules, read from the source with ast: who may import whom, and what may be named how.

One rule: every check is a function from one module's text to a list of complaints, so that the
same function runs over the tree (must be silent) and over a bad example (must complain). A check
that cannot fail is not a check. Imports under TYPE_CHECKING count: an arrow is an arrow.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moshpitd"

LINES_ADVISED, LINES_ALLOWED = 400, 500
FUNCTION_LINES_ALLOWED = 100  # the aim is 70; a table of cases may be longer

# room -> rooms that it may import. Everybody may import errors, and itself.
ARROWS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "core": frozenset(),
    "tensors": frozenset(),
    "_pb": frozenset(),
    "net": frozenset({"core"}),
    "rpc": frozenset({"_pb"}),
    "sim": frozenset({"core", "tensors"}),
    "daemon": frozenset({"core", "tensors", "net", "rpc"}),  # and _pb, in daemon/api only
    "client": frozenset({"tensors", "rpc"}),
    # daemon, because LocalSwarm runs real nodes in the test's own process.
    "testing": frozenset({"core", "tensors", "client", "daemon"}),
    "examples": frozenset({"client"}),
    "cli": frozenset({"rpc", "daemon", "sim"}),
    "__init__": frozenset(),
    "__main__": frozenset({"cli"}),
}
PB_READERS = ("_pb/", "rpc/", "daemon/api")

# outside package -> prefixes of the paths that may import it. One home each; what is not listed
# has no home yet, and finding one is a decision.
HOMES: dict[str, tuple[str, ...]] = {
    "hivemind": ("net/",),
    "libp2p": ("net/",),
    "cryptography": ("net/",),
    "OpenSSL": ("net/openssl",),
    "trio": ("net/",),
    "base58": ("net/",),
    "multiaddr": ("net/",),
    "msgpack": ("net/wire", "daemon/flight", "daemon/recorder"),
    "grpc": ("rpc/", "daemon/api", "_pb/"),
    "grpc_health": ("rpc/", "daemon/api"),
    "grpc_reflection": ("rpc/", "daemon/api"),
    "google": ("rpc/", "daemon/api", "_pb/"),
    "uvloop": ("daemon/",),
    "prometheus_client": ("daemon/",),
    "aiohttp": ("daemon/",),
    "pydantic": ("daemon/",),
    "pydantic_settings": ("daemon/",),
    "typer": ("cli/",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "matplotlib": ("cli/",),
    "torch": ("tensors/", "client/", "testing/", "examples/"),
    "numpy": ("sim/", "tensors/"),
    "sklearn": ("examples/",),
}

# hivemind's DHT, averagers and optimizers fork processes; only P2P and DHTNode are used.
HIVEMIND_BANNED = ("averaging", "optim", "moe", "DHT", "dht.DHT", "dht.dht")

NO_CLOCK_NO_THREADS = frozenset({"asyncio", "time", "threading", "logging"})
STDLIB_BANNED: dict[str, frozenset[str]] = {
    "core": NO_CLOCK_NO_THREADS
    | {"os", "socket", "ssl", "select", "selectors", "signal", "subprocess", "multiprocessing"}
    | {"concurrent", "datetime", "secrets", "uuid", "tempfile", "pathlib", "io"},
    "sim": NO_CLOCK_NO_THREADS | {"datetime", "secrets", "uuid", "socket"},
}
# id() and hash() of a str differ between two runs of one seed; the rest touches the outside.
BUILTINS_BANNED: dict[str, frozenset[str]] = {
    "core": frozenset({"id", "hash", "open", "print", "input"}),
    "sim": frozenset({"id", "hash"}),
}

WORDS_BANNED = frozenset({"manager", "helper", "util", "base", "info", "data"})


class Module:
    """One source file: where it lies in the package, and its tree."""

    def __init__(self, where: str, text: str) -> None:
        self.where = where  # "core/peer.py"
        self.text = text
        self.tree = ast.parse(text, filename=where)
        self.room = where.split("/")[0].removesuffix(".py")
        self.generated = where.startswith("_pb/")

    def imports(self) -> Iterator[tuple[str, int]]:
        """(full dotted name, line) of everything that is imported anywhere in the file."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        folder = ["moshpitd", *self.where.split("/")[:-1]]
        return ".".join([*folder[: len(folder) - node.level + 1], *filter(None, [node.module])])


def broken_arrows(module: Module) -> list[str]:
    complaints = []
    for name, line in module.imports():
        if name.split(".")[0] != "moshpitd":
            continue
        target = name.split(".")[1] if "." in name else "__init__"
        if target not in ARROWS:
            target = "__init__"  # a name that moshpitd/__init__.py defines
        allowed = {"errors", "__init__", module.room} | ARROWS[module.room]
        if module.room == "errors":
            allowed = set()
        if module.where.startswith(PB_READERS):
            allowed.add("_pb")
        if target not in allowed:
            complaints.append(f"{module.where}:{line}: {module.room} may not import {target}")
        below = module.room == "client" and not module.where.startswith("client/optim/")
        if below and name.startswith("moshpitd.client.optim"):
            # Its registry imports client.swarm: whichever of the two came first would fail.
            complaints.append(f"{module.where}:{line}: client may not import client.optim")
    return complaints


def homeless_packages(module: Module) -> list[str]:
    complaints = []
    for name, line in module.imports():
        package = name.split(".")[0]
        if package in sys.stdlib_module_names or package == "moshpitd":
            continue
        if package not in HOMES:
            complaints.append(f"{module.where}:{line}: {package} has no home in HOMES")
        elif not module.where.startswith(HOMES[package]):
            home = ", ".join(HOMES[package])
            complaints.append(f"{module.where}:{line}: {package} may be imported by {home} only")
        elif package == "hivemind":
            rest = name.removeprefix("hivemind").removeprefix(".")
            if any(rest == word or rest.startswith(f"{word}.") for word in HIVEMIND_BANNED):
                complaints.append(f"{module.where}:{line}: {name} forks processes; use DHTNode")
    return complaints


def impurities(module: Module) -> list[str]:
    banned = STDLIB_BANNED.get(module.room)
    if banned is None:
        return []
    complaints = []
    for name, line in module.imports():
        package = name.split(".")[0]
        if package in banned:
            complaints.append(f"{module.where}:{line}: {module.room} may not import {package}")
        if package == "random" and name not in {"random", "random.Random"}:
            complaints.append(f"{module.where}:{line}: of random, only random.Random")
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="random"), attr=name) if name != "Random":
                if _imports(module, "random"):
                    complaints.append(f"{module.where}:{node.lineno}: random.{name} is global")
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS_BANNED[module.room]:
                complaints.append(f"{module.where}:{node.lineno}: {name}() is not pure")
    return complaints


def _imports(module: Module, name: str) -> bool:
    """True when the bare name is the module, not an argument that happens to be called so."""
    return any(found == name for found, _ in module.imports())


def late_imports(module: Module) -> list[str]:
    if module.room == "cli" or module.generated:
        return []
    return [
        f"{module.where}:{inner.lineno}: import inside {outer.name}()"
        for outer in ast.walk(module.tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]


def banned_words(module: Module) -> list[str]:
    if module.generated:
        return []
    names = [(Path(module.where).stem, 1)]
    names += [
        (node.name, node.lineno) for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    ]
    return [
        f"{module.where}:{line}: {name} says nothing: {word!r} is a banned word"
        for name, line in names
        for word in _words(name)
        if word in WORDS_BANNED or word.removesuffix("s") in WORDS_BANNED
    ]


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def missing_docstring(module: Module) -> list[str]:
    empty_init = module.where.endswith("__init__.py") and not module.tree.body
    if module.generated or empty_init or ast.get_docstring(module.tree):
        return []
    return [f"{module.where}:1: no docstring (what the file is for, and its one rule)"]


def too_long(module: Module) -> list[str]:
    if module.generated:
        return []
    complaints = []
    lines = module.text.count("\n")
    if lines > LINES_ALLOWED:
        complaints.append(f"{module.where}: {lines} lines, at most {LINES_ALLOWED}")
    elif lines > LINES_ADVISED:
        warnings.warn(f"{module.where}: {lines} lines, aim at {LINES_ADVISED}", stacklevel=2)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_ALLOWED:
                where = f"{module.where}:{node.lineno}: {node.name}()"
                complaints.append(f"{where} has {lines} lines, at most {FUNCTION_LINES_ALLOWED}")
    return complaints


CHECKS: tuple[Callable[[Module], list[str]], ...] = (
    broken_arrows,
    homeless_packages,
    impurities,
    late_imports,
    banned_words,
    missing_docstring,
    too_long,
)


def the_tree() -> list[Module]:
    return [
        Module(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def test_every_folder_of_the_package_is_a_known_room() -> None:
    rooms = {module.room for module in the_tree()}
    assert rooms <= ARROWS.keys(), f"no arrows are written down for {sorted(rooms - ARROWS.keys())}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_keeps_the_rule(check: Callable[[Module], list[str]]) -> None:
    complaints = [complaint for module in the_tree() for complaint in check(module)]
    assert not complaints, "\n" + "\n".join(complaints)


DOC = '"""Doc."""\n'
BAD: list[tuple[Callable[[Module], list[str]], str, str]] = [
    (broken_arrows, "core/a.py", "from moshpitd.net import wire"),
    (broken_arrows, "core/a.py", "from ..tensors import layout"),
    (broken_arrows, "net/a.py", "import moshpitd.daemon.driver"),
    (broken_arrows, "client/a.py", "from moshpitd import daemon"),
    (broken_arrows, "client/a.py", "from moshpitd.client.optim.options import PASSING"),
    (broken_arrows, "sim/a.py", "from moshpitd.daemon.driver import Driver"),
    (broken_arrows, "daemon/driver.py", "from moshpitd._pb import daemon_pb2"),
    (broken_arrows, "tensors/a.py", "if TYPE_CHECKING:\n    from moshpitd.core import peer"),
    (broken_arrows, "errors.py", "from moshpitd.core import peer"),
    (homeless_packages, "net/a.py", "import torch"),
    (homeless_packages, "daemon/a.py", "from torch import Tensor"),
    (homeless_packages, "core/a.py", "import numpy as np"),
    (homeless_packages, "net/links.py", "import msgpack"),
    (homeless_packages, "daemon/driver.py", "import grpc"),
    (homeless_packages, "client/a.py", "import grpc"),
    (homeless_packages, "net/a.py", "import an_unheard_of_package"),
    (homeless_packages, "net/a.py", "from hivemind import DHT"),
    (homeless_packages, "net/a.py", "from hivemind.averaging.averager import X"),
    (impurities, "core/a.py", "import time"),
    (impurities, "core/a.py", "from os import path"),
    (impurities, "core/a.py", "from random import random"),
    (impurities, "core/a.py", "import random\nx = random.random()"),
    (impurities, "sim/a.py", "import asyncio"),
    (impurities, "sim/a.py", "order = id(object())"),
    (impurities, "core/a.py", "print('hello')"),
    (late_imports, "daemon/a.py", "def f():\n    import json"),
    (late_imports, "net/a.py", "class A:\n    async def f(self):\n        from json import loads"),
    (banned_words, "daemon/a.py", "class PeerManager: ..."),
    (banned_words, "daemon/a.py", "class BaseRun: ..."),
    (banned_words, "daemon/a.py", "class GRPCInfo: ..."),
    (banned_words, "net/utils.py", ""),
    (missing_docstring, "core/a.py", "x = 1"),
    (too_long, "core/a.py", "x = 1\n" * (LINES_ALLOWED + 1)),
    (too_long, "core/a.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES_ALLOWED),
]


@pytest.mark.parametrize(("check", "where", "text"), BAD)
def test_a_bad_example_is_found(
    check: Callable[[Module], list[str]], where: str, text: str
) -> None:
    assert check(Module(where, text)), f"{check.__name__} is silent about {text!r} in {where}"


GOOD: list[tuple[str, str]] = [
    ("core/a.py", "import random\ndef f(rng: random.Random) -> int:\n    return rng.randrange(3)"),
    ("core/a.py", "from random import Random\nfrom moshpitd.errors import InternalError"),
    ("core/b.py", "from moshpitd.core.events import Tick\nfrom .events import Tock"),
    ("net/a.py", "from hivemind import P2P\nfrom hivemind.dht.node import DHTNode"),
    ("net/wire.py", "import msgpack\nfrom moshpitd.core import messages"),
    ("daemon/api/servicer.py", "import grpc\nfrom moshpitd._pb import daemon_pb2"),
    ("daemon/a.py", "import uvloop\nfrom moshpitd.net.control import Control\nimport time"),
    ("sim/a.py", "import heapq\nimport numpy\nfrom moshpitd.tensors import layout"),
    ("cli/main.py", "def f():\n    from moshpitd.daemon import lifecycle"),
    ("client/optim/a.py", "from moshpitd.client.optim import registry"),
    ("testing/a.py", "import torch\nimport asyncio\nclass Database: ..."),
]


@pytest.mark.parametrize(("where", "text"), GOOD)
def test_a_good_example_passes(where: str, text: str) -> None:
    module = Module(where, DOC + text)
    assert [complaint for check in CHECKS for complaint in check(module)] == []


def test_licence_is_one_spdx_word_and_its_text_is_here() -> None:
    project = _toml(ROOT / "pyproject.toml")["project"]
    assert project["license"] == "Apache-2.0"
    assert not [line for line in project["classifiers"] if line.startswith("License ::")]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_constraints_pin_everything_that_the_project_names() -> None:
    project = _toml(ROOT / "pyproject.toml")["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    named = [line for group in groups for line in group]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    assert not [name for name, pin in pins.items() if "+" in pin], "a local suffix names one index"
    assert pins["torch"] == "2.13.0"
    pinned = {_canonical(name) for name in pins}
    wanted = {_canonical(re.split(r"[<>=~! \[;]", line)[0]) for line in named}
    assert wanted <= pinned, f"not pinned: {sorted(wanted - pinned)}"


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
