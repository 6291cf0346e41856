"""One line of JSON in, one out. One rule: an order that fails is an answer with `error`, and only
the end of stdin ends the process."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Answer = dict[str, Any]
Order = Callable[[dict[str, Any]], Answer]


def serve(orders: Mapping[str, Order]) -> None:
    """Carry out the orders on stdin, by their `do`, until it ends."""
    # A library that prints must not end up between our lines: what it prints goes to the log.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _tell(out, {"ready": True, "pid": os.getpid()})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = orders[order["do"]](order)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _tell(out, answer)


def _tell(out: Any, answer: Answer) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()
