"""Fail when the tests take too few branches of moshpitd/core.

One rule: count branches only. coverage's own `fail_under` mixes them with lines, which are the
easier half, so 95 % there can hide a table of refusals that no test reaches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import CoverageException

WORST_SHOWN = 8
ARCS_SHOWN = 6


def main() -> int:
    parser = argparse.ArgumentParser(description="branch coverage of moshpitd/core")
    parser.add_argument("--at-least", type=float, default=95.0, metavar="PERCENT")
    least: float = parser.parse_args().at_least

    coverage = Coverage()
    coverage.load()
    with tempfile.TemporaryDirectory(prefix="moshpitd-coverage-") as scratch:
        report = Path(scratch) / "coverage.json"
        try:
            coverage.json_report(outfile=str(report))
        except CoverageException as error:
            print(f"core_branches: {error} (run pytest with --cov first)", file=sys.stderr)
            return 2
        measured = json.loads(report.read_text(encoding="utf-8"))

    totals = measured["totals"]
    taken, known = totals.get("covered_branches", 0), totals.get("num_branches", 0)
    if not known:
        print("core_branches: the tests imported nothing of moshpitd/core", file=sys.stderr)
        return 2
    percent = 100.0 * taken / known
    files = [(name, file["missing_branches"]) for name, file in measured["files"].items()]
    for name, missing in sorted(files, key=lambda item: -len(item[1]))[:WORST_SHOWN]:
        if missing:
            arcs = ", ".join(f"{start}->{end}" for start, end in missing[:ARCS_SHOWN])
            more = " ..." if len(missing) > ARCS_SHOWN else ""
            print(f"  {name}: {len(missing)} branches not taken: {arcs}{more}")
    print(f"branches of core: {taken} of {known} taken, {percent:.1f} % (at least {least:.0f} %)")
    return 0 if percent >= least else 1


if __name__ == "__main__":
    sys.exit(main())
