"""Compile core/ and sim/ with mypyc into build/compiled, where `moshpitd sim` finds them.

    python scripts/compile_sim.py

One rule: what lies there is whole and says of which sources it was made, or nothing lies there.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from moshpitd.cli.sim_compiled import FOLDER, PACKAGE, STAMP, is_fresh, sources, stamp

ROOT = PACKAGE.parent
WORK = ROOT / "build" / "mypyc"
MYPY = "[mypy]\nstrict = true\n"
FLAGS = ("-ffp-contract=off", "-fvisibility=hidden")
"""No product and sum may become one operation, or the digest would be another one; and nobody calls
in from outside but by the doors of a module, so that calls between two modules are plain ones."""


def main() -> int:
    if is_fresh():
        print(f"{FOLDER} is made of these sources")
        return 0
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext
    except ImportError as error:
        print(f"compile_sim: {error}; `make setup` installs mypy and setuptools", file=sys.stderr)
        return 2
    made_of = stamp()
    os.chdir(ROOT)  # paths below it become module names
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    (WORK / "mypy.ini").write_text(MYPY, encoding="ascii")
    words = [f"--config-file={WORK / 'mypy.ini'}", f"--cache-dir={WORK / 'cache'}"]
    files = [str(path.relative_to(ROOT)) for path in sources()]
    print(f"compiling {len(files)} modules, about two minutes", flush=True)
    modules = mypycify(
        [*words, *files],
        opt_level="2", debug_level="0", multi_file=True,
        target_dir=str(WORK.relative_to(ROOT)), group_name="moshpitd_compiled",
    )  # fmt: skip
    for one in modules:
        one.extra_compile_args = [*one.extra_compile_args, *FLAGS]
    command = build_ext(Distribution({"name": "moshpitd-compiled", "ext_modules": modules}))
    command.build_lib, command.build_temp = str(WORK / "lib"), str(WORK / "objects")
    command.ensure_finalized()
    command.run()
    _put(WORK / "lib", made_of)
    print(f"{FOLDER}: `moshpitd sim run` and `soak` use it until the sources change")
    return 0


def _put(made: Path, made_of: str) -> None:
    """In place of what lay there."""
    (made / STAMP).write_text(f"{made_of}\n", encoding="ascii")
    shutil.rmtree(FOLDER, ignore_errors=True)
    made.rename(FOLDER)


if __name__ == "__main__":
    sys.exit(main())
