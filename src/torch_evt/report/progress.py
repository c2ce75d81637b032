"""What is being done, on stderr: a spinner on a terminal, elsewhere a line for each thing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

Progress = Callable[[str], None]
"""Called with what is done next, in a few words."""


def silent(_: str) -> None:
    """Shows nothing."""


@contextmanager
def shown(about: str = "") -> Iterator[Progress]:
    """What to call with each thing that is begun. The lines have the seconds since the start.

    about: stands in front of each.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(escape(about + text))
        return
    begin = time.monotonic()

    def line(text: str) -> None:
        print(f"{time.monotonic() - begin:4.0f} s  {about}{text}", file=sys.stderr, flush=True)

    yield line
