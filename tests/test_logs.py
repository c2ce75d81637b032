"""TORCH_LOGS in fresh processes: decisions are logged when compiled, and when loaded from a cache.

Two processes share a cache folder, as two runs of a program do. The first compiles and shows one
line for each graph; the second, with "+torch_evt", finds both graphs in Inductor's cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from interpreted import interpreted
from torch_evt.decisions import observed
from torch_evt.partition.plan import GraphPlan

PROGRAM = Path(__file__).parent / "programs" / "logged_steps.py"


def run(*command: str, logs: str, cache: Path) -> list[str]:
    """What of torch_evt's a process logs, without time, place and compilation."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TORCH_LOGS": logs, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^([VIWE]\d{4}) .* torch_evt/\w+\.py:\d+\] (.*)$", done.stderr, re.M)
    return [f"{level[0]} {text.removeprefix('[0/0] ')}" for level, text in lines]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    cache = tmp_path_factory.mktemp("cache")
    return [run(str(PROGRAM), logs=logs, cache=cache) for logs in ("torch_evt", "+torch_evt")]


@pytest.fixture(scope="module")
def plans() -> list[GraphPlan]:
    """The two plans, made in this process."""
    torch._dynamo.reset()
    found: list[GraphPlan] = []
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(4, 8)
    compiled = torch.compile(model, backend=interpreted, options={"evt.place": "always"})
    with observed(found.append):
        compiled(x).sum().backward()
        with torch.no_grad():
            compiled(x)
    return found


def test_info_has_one_line_for_each_graph_that_is_compiled(logged: list[list[str]]) -> None:
    joint, inference = logged[0]
    assert re.fullmatch(
        r"I 0/0 joint: 2 regions placed \(1 forward, 1 backward\); 3 left to Inductor; "
        r"plan [0-9a-f]{8}",
        joint,
    )
    assert re.fullmatch(
        r"I (\[0/1\] )?0/1 inference: 1 region placed \(1 inference\); 1 left to Inductor; "
        r"plan [0-9a-f]{8}",
        inference,
    )


def test_a_second_process_logs_every_decision_and_marks_it(
    logged: list[list[str]], plans: list[GraphPlan]
) -> None:
    text = "\n".join(logged[1])
    for line in logged[0]:  # the digests say that they are the same plans
        assert f"{line} (from the cache)" in text
    assert [len(plan.regions) for plan in plans] == [2, 1]
    for plan in plans:
        for region in plan.regions:
            assert re.search(
                rf"V .*{region.half} {region.anchor} \(placed\): .*: {re.escape(region.tree)} "
                r"\(from the cache\)$",
                text,
                re.M,
            ), region
        for entry in plan.unfused:
            said = f"{entry.half} {entry.node} is left to Inductor: {entry.reason}"
            assert f"{said} (from the cache)" in text
    assert all(line.endswith("(from the cache)") for line in logged[1])  # and no pass ran


def test_the_level_is_set_when_the_package_is_imported_first(tmp_path: Path) -> None:
    """`import torch` then runs inside of our own import, and imports the package for its logs."""
    program = (
        "import torch_evt, logging; log = logging.getLogger('torch_evt');"
        "assert log.level == logging.DEBUG and log.handlers, (log.level, log.handlers);"
        "log.debug('here')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TORCH_LOGS": "+torch_evt", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("here")
