"""Check many random programs: python -m tests.random_graphs --count 2000 --seed 7

Run in the repository's root with src, tests and the root itself on PYTHONPATH. Each failure is made
small and printed as a program that runs.
"""

from __future__ import annotations

import ast
import random
import signal
import sys
import time
from typing import Any

import click
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .checking import Outcome, TooLong, Wrong, check
from .program import Program
from .statistics import report
from .strategies import generate, programs


def smaller(seed: int, options: dict[str, Any], seconds: int) -> str:
    """The message of the smallest program that fails as the seed's does."""
    found: list[str] = []

    @settings(
        max_examples=20,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(st.just(seed)))
    def again(program: Program) -> None:
        try:
            check(program, options, seconds=seconds)
        except (Wrong, TooLong) as error:
            found.append(f"{type(error).__name__}: {error}")
            raise

    try:
        again()
    except Exception:
        return found[-1]
    return "it did not fail again"


@click.command()
@click.option("--count", default=100, show_default=True, help="how many programs")
@click.option("--seed", default=None, type=int, help="of the run; a new one by default")
@click.option("--only", default=None, type=int, help="check the program of this number alone")
@click.option("--options", "given_options", multiple=True, help="evt.precision=eager and the like")
@click.option("--seconds", default=120, show_default=True, help="time limit of a program")
@click.option("--shrink/--no-shrink", default=True, show_default=True)
def main(
    count: int,
    seed: int | None,
    only: int | None,
    given_options: tuple[str, ...],
    seconds: int,
    shrink: bool,
) -> None:
    """Check COUNT random training graphs against fp64."""
    torch.set_num_threads(1)
    options = dict(_option(text) for text in given_options)
    if seed is None:
        seed = random.randrange(2**16)
    source = random.Random(seed)
    numbers = [source.randrange(2**24) for _ in range(count)] if only is None else [only]
    outcomes: list[Outcome] = []
    failures = 0
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stopped run reports, too
    try:
        for i, number in enumerate(numbers):
            try:
                outcomes.append(check(generate(number), options, seconds=seconds))
            except (Wrong, TooLong) as error:
                failures += 1
                text = smaller(number, options, seconds) if shrink else f"{error}"
                print(f"\n==== program {number} is wrong ====\n{text}", flush=True)
            if (i + 1) % 20 == 0:
                print(f"{i + 1} of {len(numbers)}, {failures} wrong", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped")
    print(report(outcomes))
    print(f"seed {seed}: {failures} wrong, {time.monotonic() - started:.0f} s")
    sys.exit(1 if failures else 0)


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    main()
