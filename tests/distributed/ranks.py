"""Runs `program.py` as two ranks, each a process with its own hash seed; nothing here can hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "program.py"
WORLD = 2
LIMIT_S = 600.0
"""Far above what two ranks take on a busy machine: only a hang reaches it."""
EAGER_ERROR = {"f32": 1e-5, "bf16": 0.05}
"""What eager on two ranks may be off by, relatively: the error standard allows ours a share of it,
so it must not itself be wrong, as it is by far where a rank's part of the mean is missing."""


def run_ranks(
    folder: Path, *ways: str, cache: Path | None = None
) -> list[dict[str, dict[str, Any]]]:
    """For each rank: way -> what `program.try_way` found.

    folder: empty; receives the ranks' output and results. cache: Inductor's, by default inside of
    it. Raises AssertionError with the end of a rank's output where it fails, or all take too long.
    """
    processes, outputs = [], []
    for rank in range(WORLD):
        outputs.append(folder / f"output{rank}")
        with outputs[-1].open("w") as out:
            command = [sys.executable, str(PROGRAM), str(rank), str(WORLD), str(folder), *ways]
            env = _environment(cache or folder / "cache", rank)
            processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=env))
    try:
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:  # a rank whose partner is gone would wait for it
            process.kill()
            process.wait()
    assert codes == [0] * WORLD, f"exit codes {codes} (None: still running)\n" + "\n".join(
        output.read_text()[-3000:] for code, output in zip(codes, outputs, strict=True) if code
    )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


def _environment(cache: Path, rank: int) -> Mapping[str, str]:
    tests = PROGRAM.parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONHASHSEED": str(rank + 1),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }


def check(found: list[dict[str, dict[str, Any]]], way: str) -> dict[str, Any]:
    """Assert what holds for every way; rank 0's findings.

    Both ranks have one plan, byte for byte; regions were placed in both halves and ran; every
    gradient meets the error standard against one fp64 process on the whole batch.
    """
    first, second = (rank[way] for rank in found)
    assert json.dumps(first["plan"]) == json.dumps(second["plan"])
    for rank in (first, second):
        assert rank["failed"] == []
        assert rank["eager"] < EAGER_ERROR["bf16" if way.endswith("bf16") else "f32"]
        assert rank["tensors"] == 1 + 3 * 6 + 2  # the loss, six of each layer, two of the head
        for half in ("forward", "backward"):
            assert rank["ran"][half] >= rank["placed"][half] > 0
    return first
