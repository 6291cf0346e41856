"""Play the demo of every algorithm, one after the other, and print what each one proved.

    python scripts/demo_all.py [--only NAME ...] [--json FILE]

One rule: a line says what that demo's own report says; the exit code is 0 only when all of them
passed. Each runs `moshpitd demo --algorithm NAME` as a person would, with a fresh swarm of four
daemons of which one is killed and comes back; together they take about two minutes each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from moshpitd.cli.demo_algorithms import NAMES

TIMEOUT_S = 600.0
"""Of one demo. They take 90 to 150 s on two idle cores; one that hangs ends by itself after 150 s
of silence."""
COLUMNS = ("algorithm", "shards", "accuracy", "difference", "rejoined", "MB sent", "seconds", "")


def main() -> int:
    parser = argparse.ArgumentParser(description="the demo of every algorithm")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write all reports there")
    args = parser.parse_args()
    rows, reports = [COLUMNS], {}
    for name in args.only:
        print(f"{name} ...", flush=True)
        found = play(name)
        reports[name] = found
        rows.append(row_of(name, found))
        print("  ".join(rows[-1]), flush=True)
    print()
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)))
    if args.json is not None:
        args.json.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    return 0 if all(found.get("passed") for found in reports.values()) else 1


def play(name: str) -> dict[str, Any]:
    """The report of one demo; without one, what it said last."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "moshpitd.cli.main", "demo", "--algorithm", name]
        try:
            done = subprocess.run(
                [*command, "--json", str(report)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            said = (done.stdout + done.stderr).strip()
        except subprocess.TimeoutExpired:
            said = f"not through after {TIMEOUT_S:.0f} s"
        if report.exists():
            found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return found
    print(said)
    return {"passed": False, "seconds": round(time.monotonic() - began, 1)}


def row_of(name: str, report: dict[str, Any]) -> tuple[str, ...]:
    killed = report.get("killed") or {}
    peers = report.get("peers", [])
    failed = [check["name"] for check in report.get("checks", []) if not check["passed"]]
    return (
        name,
        report.get("shards", ""),
        f"{report['accuracy']['swarm']:.3f}" if "accuracy" in report else "-",
        f"{report['max_parameter_difference']:g}" if "max_parameter_difference" in report else "-",
        "yes" if killed.get("took_snapshot") else "no",
        f"{sum(peer['bytes']['sent'] for peer in peers) / 1e6:.1f}",
        f"{report.get('seconds', 0):.0f}",
        "pass" if report.get("passed") else "FAIL " + ", ".join(failed),
    )


if __name__ == "__main__":
    sys.exit(main())
