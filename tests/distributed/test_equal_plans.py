"""A plan is a function of the graph: neither hashes nor addresses of a process have a part in it.

Ranks plan for themselves. That they plan alike, without a word between them, rests on this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "programs" / "plan_text.py"
WORKLOADS = ("mlp", "gpt2-medium")


def test_processes_with_other_hashes_and_addresses_print_the_same_bytes() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(seed), *WORKLOADS],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": str(1000 + seed), "OMP_NUM_THREADS": "1"},
        )
        for seed in (1, 2)
    ]
    try:
        first, second = (process.communicate(timeout=600)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    assert first == second
    decoder, text = json.JSONDecoder(), first.decode()
    for _ in WORKLOADS:
        plan, end = decoder.raw_decode(text)
        text = text[end:].lstrip()
        (graph,) = plan["graphs"]
        assert {region["half"] for region in graph["regions"]} == {"forward", "backward"}
