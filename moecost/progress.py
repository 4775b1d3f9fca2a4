"""A bar on stderr for work that takes long: with rich (extra `[cli]`), where a person looks on."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Final, TypeAlias

SHORT_S: Final = 1.0
"""Work that is done by then shows no bar unless asked to. [s]"""

Advance: TypeAlias = Callable[[int], object]


@contextlib.contextmanager
def progress_bar(total: int, unit: str, shown: bool | None) -> Iterator[Advance]:
    """Gives the function that is told how much more is done.

    Parameters
    ----------
    total : how much there is to do.
    unit : what is counted.
    shown : True, False, or None: where stderr is a terminal, and after a second.
    """
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    if shown is False or (shown is None and not on_terminal) or find_spec("rich") is None:
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns: list[Any] = [BarColumn(), MofNCompleteColumn(), unit, TimeRemainingColumn()]
    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
    task = bar.add_task(unit, total=total)
    start = time.monotonic()
    if shown:
        bar.start()

    def advance(more: int) -> None:
        bar.advance(task, more)
        if not bar.live.is_started and time.monotonic() - start > SHORT_S:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


EVERY_S: Final = 5.0
"""Where stderr is a file, a line is written so often. [s]"""


@contextlib.contextmanager
def counter() -> Iterator[Callable[[int, int, str], None]]:
    """Gives the function that is told (number done, of all, at what), and says so on stderr.

    One line that is written anew where a person looks on, else a line now and then.
    """
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    last = -EVERY_S

    def show(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if sys.stderr is not None and (on_terminal or now - last >= EVERY_S):
            last = now
            sys.stderr.write(f"\r\033[K{done}/{total} {what}" if on_terminal else f"{done}/{total} {what}\n")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if on_terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
