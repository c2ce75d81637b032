"""Who waits is told what is done: also where stderr is a file or a pipe."""

from __future__ import annotations

import errno
import io
import os
import pty
import sys

import pytest

from torch_evt import workloads
from torch_evt.report import demo
from torch_evt.report.progress import shown


class Piped(io.StringIO):
    """No terminal; keeps what had been written when it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


def test_without_a_terminal_each_thing_is_a_line_that_is_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Piped()
    monkeypatch.setattr(sys, "stderr", stream)
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    with shown("mlp: ") as progress:
        progress("the first thing [a]")
        assert stream.flushed[-1] == "   0 s  mlp: the first thing [a]\n"
        progress("the second")
        assert stream.flushed[-1].splitlines()[1:] == ["   0 s  mlp: the second"]


def _all_of(master: int) -> bytes:
    """What was written to a pseudo-terminal whose other end is closed; one read may get a part."""
    written = b""
    try:
        while part := os.read(master, 1 << 16):
            written += part
    except OSError as error:
        if error.errno != errno.EIO:  # how Linux says that the other end is closed
            raise
    finally:
        os.close(master)
    return written


def test_a_terminal_has_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with shown() as progress:
            progress("the first thing")
            progress("the second [b]")
    written = _all_of(master).decode()
    assert "the second [b]" in written and " s  the" not in written
    assert "\x1b[2K" in written  # erases the line


def test_training_says_every_tenth_step() -> None:
    workload = workloads.get("mlp")
    step = demo.Step(workload, workload.make()[0])
    said: list[str] = []
    demo.train(step, [workload.inputs(seed=seed) for seed in range(12)], step, said.append)
    assert said == ["step 1 of 12", "step 11 of 12"]
