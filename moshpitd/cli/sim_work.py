"""What the verbs of `sim` share: work spread over processes under one progress bar, and files
written or refused with a sentence. One rule: results come back in the order of the jobs, whoever
was faster, so that output depends on the seeds alone."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

PROCESSES = 2
"""More share the caches and memory of a small machine; a flag raises it."""

Job = TypeVar("Job")
Result = TypeVar("Result")


Print: TypeAlias = Callable[[Any], None]


def spread(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    title: str,
    processes: int,
    tell: Callable[[Print, Result], None] | None = None,
) -> list[Result]:
    """`work(job)` for every job. The first exception ends it, with what runs being waited for.

    `tell(print, result)` hears each result as it comes, in whatever order, and may print above the
    bar.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    results: dict[int, Result] = {}
    with _bar() as bar:
        task = bar.add_task(title, total=len(jobs))

        def done(number: int, result: Result) -> None:
            results[number] = result
            if tell is not None:
                tell(bar.console.print, result)
            bar.advance(task)

        if processes <= 1:
            for number, job in enumerate(jobs):
                done(number, work(job))
        else:
            # spawn, because the bar draws from a thread and a fork would copy its locks.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(
                min(processes, len(jobs)), mp_context=context, initializer=_end_with_parent
            ) as pool:
                numbers = {pool.submit(work, job): number for number, job in enumerate(jobs)}
                try:
                    for future in as_completed(numbers):
                        done(numbers[future], future.result())
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
    return [results[number] for number in range(len(jobs))]


def _end_with_parent() -> None:
    """A process of the pool that waits for its next job holds both ends of the pipe, so it would
    never learn that the one that it works for was killed."""

    def watch(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    if (parent := parent_process()) is not None:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def busy(words: str) -> AbstractContextManager[object]:
    """Shows on stderr that something long is going on, and for how long already."""
    bar = _bar()
    bar.add_task(words, total=None)
    return bar


def check_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{value} is out of range", key=key, expected=f"{low}..{high}")


def check_folder(key: str, path: Path | None) -> None:
    """Before minutes of work: can the result be written there at all?"""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: no such directory", key=key)


def write_json(path: Path | None, value: Any) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno or 0)}", key="--json") from None


def _bar() -> Progress:
    """On stderr, so that what is printed on stdout can be piped."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
