"""`evt doctor`: what is installed, what of it was tested, and what to do about what is missing."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table
from rich.text import Text

from torch_evt.devices import device_of

TESTED = (("3.11", "2.13.0"),)
"""The (Python, torch) pairs on which the whole test suite has passed."""
PYTHONS = ((3, 10), (3, 13))
TORCHES = ((2, 11), (2, 15))

State = Literal["ok", "note", "broken"]
_STYLE: dict[State, str] = {"ok": "green", "note": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the report. action: what to do next, where there is something to do."""

    name: str
    value: str
    state: State = "ok"
    action: str = ""


def examine() -> list[Check]:
    """Every check, run now. Never raises: a check that fails is a broken line."""
    checks: list[Callable[[], Check]] = [
        check_python,
        check_torch,
        check_pair,
        lambda: check_optional("triton", "kernels for NVIDIA GPUs"),
        lambda: check_optional("quack-kernels", "fused products on Hopper and later"),
        lambda: check_optional("nvidia-cutlass-dsl", "fused products on Hopper and later"),
        check_device,
        check_compiler,
        check_headers,
        check_cache,
        check_backend,
        check_emitter,
    ]
    return [check() for check in checks]


def render(checks: Iterable[Check]) -> Table:
    """The report as a table of name, value and what to do."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in checks:
        text = Text(check.value)
        if check.action:
            text.append(f"\n-> {check.action}", style=_STYLE[check.state])
        table.add_row(Text(check.state, style=_STYLE[check.state]), check.name, text)
    return table


def exit_code(checks: Iterable[Check]) -> int:
    """1 if something is broken, else 0."""
    return int(any(check.state == "broken" for check in checks))


def check_python() -> Check:
    """Python's version against the declared range."""
    found = sys.version_info[:2]
    low, high = PYTHONS
    if low <= found <= high:
        return Check("python", platform.python_version())
    action = f"use Python {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return Check("python", platform.python_version(), "broken", action)


def check_torch() -> Check:
    """PyTorch's version against the declared range."""
    found = tuple(int(part) for part in _release(torch.__version__).split(".")[:2])
    low, high = TORCHES
    if low <= found <= high:
        return Check("torch", torch.__version__)
    action = f'pip install "torch>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"'
    return Check("torch", torch.__version__, "broken", action)


def check_pair() -> Check:
    """Whether this pair of Python and torch is one that the tests have run on."""
    pair = ("{}.{}".format(*sys.version_info[:2]), _release(torch.__version__))
    name = "Python {} with torch {}".format(*pair)
    if pair in TESTED:
        return Check("tested", name)
    known = ", ".join("{} with {}".format(*each) for each in TESTED)
    return Check("tested", f"{name}: declared, untested", "note", f"tested: Python {known}")


def check_optional(package: str, purpose: str) -> Check:
    """The version of a package that only some machines need."""
    try:
        return Check(package, metadata.version(package))
    except metadata.PackageNotFoundError:
        return Check(package, f"not installed; for {purpose}")


def check_device() -> Check:
    """The device that runs, and whether plans can be priced for it."""
    if not torch.cuda.is_available():
        return Check("device", f"CPU, {os.cpu_count()} cores; no CUDA GPU")
    where = torch.device("cuda", torch.cuda.current_device())
    product = torch.cuda.get_device_name(where)
    entry = device_of(where)
    if entry is not None:
        return Check("device", f"{product}, priced as {entry.name}")
    action = "set evt.target, or add its figures to torch_evt/devices.py"
    return Check("device", f"{product}, not in the device table", "note", action)


def check_compiler() -> Check:
    """A C++ compiler that works: Inductor compiles its CPU code with it."""
    action = "install g++ (Debian, Ubuntu: apt-get install g++), or point CXX to a C++ compiler"
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return Check("C++ compiler", "none found", "broken", action)
    version = _run([found, "--version"]).stdout.partition("\n")[0]
    trial = _run([found, "-x", "c++", "-fsyntax-only", "-"], "#include <vector>\n")
    if trial.returncode != 0:
        message = trial.stderr.strip().partition("\n")[0]
        return Check("C++ compiler", f"{version or found}: {message}", "broken", action)
    return Check("C++ compiler", version or found)


def check_headers() -> Check:
    """Python.h, which Inductor's CPU code includes."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Check("Python headers", str(header.parent))
    version = "{}.{}".format(*sys.version_info[:2])
    action = f"install Python's headers (Debian, Ubuntu: apt-get install python{version}-dev)"
    return Check("Python headers", f"no {header}", "broken", action)


def check_cache() -> Check:
    """Whether Inductor's cache folder, which holds compiled graphs, can be written."""
    from torch_evt.torch_compat import cache_folder

    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "the default folder")
    try:
        folder = cache_folder()
        with tempfile.TemporaryFile(dir=folder):
            return Check("cache", folder)
    except OSError as error:
        action = "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        return Check("cache", f"{folder}: {error.strerror}", "broken", action)


def check_backend() -> Check:
    """Whether torch.compile finds the backend by its name."""
    points = metadata.entry_points(group="torch_dynamo_backends")
    visible = any(point.name == "evt" for point in points)
    try:
        backend = importlib.import_module("torch_evt.backend")
        works = callable(backend.evt)
    except Exception as error:  # whatever a broken installation raises belongs into the report
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Check("backend", message, "broken", "install again: pip install torch-evt")
    if visible and works:
        return Check("backend", "evt, found by its entry point")
    action = "import torch_evt before torch.compile, or pip install the package"
    return Check("backend", "evt, but its entry point is not installed", "note", action)


def check_emitter() -> Check:
    """Whether regions can be compiled for the present device, or stay with Inductor."""
    from torch_evt.emit import emitter_for

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    emitter = emitter_for(where)
    if emitter is not None:
        return Check("emitter", f"{emitter.name} for {where.type}")
    value = f"none for {where.type}: with default options everything is left to Inductor"
    return Check("emitter", value, "note", "evt.place=always runs regions by the reference")


def _release(version: str) -> str:
    """A version without its local part: 2.13.0+cpu -> 2.13.0."""
    return version.partition("+")[0]


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)
