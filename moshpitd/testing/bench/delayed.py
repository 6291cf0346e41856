"""Proxies in front of nodes, for `bench algorithms` and `bench delay`: whoever dials a node there
meets a delay before it, and one on the way back.

One rule: a namespace's line is capped by the kernel and delayed here, because `netem`, which does
both, is not in every kernel. TCP's own windows see the line without its delay: the kernel answers
its acknowledgements before the proxy holds the bytes back.
"""

from __future__ import annotations

import argparse

from moshpitd.testing.bench.orders import serve
from moshpitd.testing.proxy import Proxies


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moshpitd.testing.bench.delayed")
    parser.add_argument("--host", required=True, help="the address that others dial")
    parser.add_argument("--delay-s", type=float, required=True, help="one way")
    parser.add_argument(
        "--path", nargs=2, action="append", required=True, metavar=("PORT", "TARGET"),
        help="from a port of the host to a listener on the loopback",
    )  # fmt: skip
    args = parser.parse_args()
    with Proxies() as proxies:
        for port, target in args.path:
            proxies.to(target, port=int(port), host=args.host).slow(args.delay_s)
        serve({})  # until whoever started it goes


if __name__ == "__main__":
    main()
