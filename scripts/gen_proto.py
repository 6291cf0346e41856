"""Generate moshpitd/_pb from proto/moshpitd/v1/*.proto, or check that it is up to date.

One rule: nobody edits moshpitd/_pb. protoc names modules after the path of the .proto file
(`moshpitd.v1.daemon_pb2`), which would be a room of its own; the import path is rewritten to
`moshpitd._pb`. The path inside the descriptor stays `moshpitd/v1/...`: it is what reflection shows,
and a bare `daemon.proto` could clash with another package's file in protobuf's global pool.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
PROTO_PACKAGE = "moshpitd/v1"
TARGET = ROOT / "moshpitd" / "_pb"


def main() -> int:
    parser = argparse.ArgumentParser(description="generate moshpitd/_pb from proto/moshpitd/v1")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    check_only: bool = parser.parse_args().check

    wanted = generate()
    present = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(TARGET.glob("*_pb2*.py*"))
        if path.is_file()
    }
    if not check_only:
        write(wanted, present)
        return 0
    differences = [
        f"{TARGET.relative_to(ROOT) / name}: {problem}"
        for name in sorted(wanted.keys() | present.keys())
        if (problem := difference(wanted.get(name), present.get(name)))
    ]
    for line in differences:
        print(line, file=sys.stderr)
    if differences:
        print("run `make proto` and commit the result", file=sys.stderr)
    return 1 if differences else 0


def generate() -> dict[str, str]:
    """File name -> text for every module that protoc makes of our .proto files."""
    sources = sorted((PROTO_ROOT / PROTO_PACKAGE).glob("*.proto"))
    if not sources:
        raise SystemExit(f"gen_proto: no *.proto in {PROTO_ROOT / PROTO_PACKAGE}")
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory(prefix="moshpitd-proto-") as scratch:
        arguments = [
            "protoc",
            f"-I{PROTO_ROOT}",
            f"-I{well_known}",
            f"--python_out={scratch}",
            f"--pyi_out={scratch}",
            f"--grpc_python_out={scratch}",
            *(str(source.relative_to(PROTO_ROOT)) for source in sources),
        ]
        status = protoc.main(arguments)
        if status != 0:
            raise SystemExit(f"gen_proto: protoc failed with status {status}; its message is above")
        made = sorted((Path(scratch) / PROTO_PACKAGE).iterdir())
        return {path.name: at_home(path.read_text(encoding="utf-8")) for path in made}


def at_home(text: str) -> str:
    """The generated text with imports of sibling modules pointing into moshpitd._pb."""
    package = PROTO_PACKAGE.replace("/", ".")
    return text.replace(f"from {package} import ", "from moshpitd._pb import ")


def write(wanted: dict[str, str], present: dict[str, str]) -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in present.keys() - wanted.keys():
        (TARGET / name).unlink()  # its .proto file is gone
    for name, text in wanted.items():
        (TARGET / name).write_text(text, encoding="utf-8")
    print(f"{TARGET.relative_to(ROOT)}: {', '.join(wanted)}")


def difference(wanted: str | None, present: str | None) -> str | None:
    if present is None:
        return "missing"
    if wanted is None:
        return "no .proto file generates it any more"
    return None if wanted == present else "differs from what proto/ generates"


if __name__ == "__main__":
    sys.exit(main())
