"""The command line: `evt doctor | demo | explain | bench | verify`.

An error that torch_evt raises on purpose is printed as one line and ends the program with 2. What
a command needs is imported when it runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from torch_evt.errors import EvtError
from torch_evt.version import __version__

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class _Failure(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except EvtError as error:
            raise _Failure(" ".join(str(error).split())) from error


def _check_parent(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse a file in a folder that does not exist before any work is done."""
    if path not in (None, "-") and not Path(str(path)).absolute().parent.is_dir():
        raise click.BadParameter(f"the folder of {path} does not exist")
    return path


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """A training compiler for PyTorch: torch.compile(model, backend="evt")."""


@main.command()
def doctor() -> None:
    """Report versions, device, compiler and backend; exits with 1 if something is broken."""
    from rich.console import Console

    from torch_evt.report import doctor as report

    checks = report.examine()
    Console().print(report.render(checks))
    sys.exit(report.exit_code(checks))


@main.command()
def demo() -> None:
    """Train a small GPT with the backend and with eager, and compare everything."""
    from torch_evt.report.demo import run

    sys.exit(run())


def _parse_options(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """NAME=VALUE pairs as the options of torch.compile; a value is a Python literal, else text."""
    options: dict[str, Any] = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not of the form NAME=VALUE")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


_compile_options = click.option(
    "-o",
    "--option",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_parse_options,
    help="An option of torch.compile, evt's or Inductor's: -o evt.memory_budget=1000000000. May be "
    "given several times.",
)


def _json_option(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--json",
        "json_path",
        metavar="FILE",
        type=click.Path(dir_okay=False, writable=True, allow_dash=True),
        callback=_check_parent,
        help=f"Write the {what} as JSON; - is stdout.",
    )


@main.command()
@click.argument("what", metavar="WORKLOAD|MODULE:FUNCTION")
@click.option("--size", default="tiny", show_default=True, help="tiny, small or paper.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="fp32",
    show_default=True,
    help="Of weights.",
)
@click.option("--target", help="Device to price for; by default the one present, else h200.")
@click.option(
    "--place",
    type=click.Choice(["auto", "always", "never"]),
    help="Where regions are put into the graph.",
)
@_compile_options
@click.option("--inference", is_flag=True, help="Plan the forward graph alone, in eval mode.")
@_json_option("plan")
def explain(
    what: str,
    size: str,
    dtype: str,
    target: str | None,
    place: str | None,
    options: dict[str, Any],
    inference: bool,
    json_path: str | None,
) -> None:
    """Show what is fused in a model, what is not and why, and what it is modelled to cost.

    WORKLOAD is mlp, gpt2-medium, bert-large, llama-1b, vit-b14 or xmlcnn; MODULE:FUNCTION a
    function of yours, found from the current folder, that returns (model, inputs, loss). --size and
    --dtype are for workloads only.
    """
    import torch
    from rich.console import Console
    from torch._subclasses.fake_tensor import FakeTensorMode

    from torch_evt import workloads
    from torch_evt.partition.plan_json import to_json_text
    from torch_evt.report.explain import explain as plan_of
    from torch_evt.report.render import render

    if ":" in what:
        model, inputs, loss = workloads.load(what)
    else:
        with FakeTensorMode():  # shapes alone: a model of any size takes no memory
            made = workloads.get(what, size).make(dtype=getattr(torch, DTYPES[dtype]))
        model, inputs, loss = made
    if target is not None:
        options["evt.target"] = target
    if place is not None:
        options["evt.place"] = place
    if inference:
        with torch.no_grad():
            plan = plan_of(model.eval(), *inputs, options=options)
    else:
        plan = plan_of(model, *inputs, loss=loss, options=options)

    if json_path == "-":
        click.echo(to_json_text(plan), nl=False)
        return
    Console().print(render(plan))
    if json_path is not None:
        Path(json_path).write_text(to_json_text(plan), encoding="utf-8")


@main.command()
@click.argument("what", metavar="WORKLOAD|MODULE:FUNCTION")
@click.option(
    "--against",
    default="eager,inductor",
    show_default=True,
    help="Other modes to measure: of eager, inductor, max-autotune, with commas between.",
)
@click.option("--size", help="tiny, small or paper; by default tiny.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Of weights; by default fp32.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="By default the GPU where there is one.",
)
@click.option(
    "--cuda-graphs/--no-cuda-graphs",
    default=None,
    help="Capture every mode as a CUDA graph, or none; by default yes on a GPU.",
)
@click.option(
    "--place",
    type=click.Choice(["auto", "always", "never"]),
    help="Where evt puts regions into the graph; always: by the reference where there is no "
    "emitter.",
)
@_compile_options
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Samples of every mode.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of weights, inputs and dropout."
)
@click.option(
    "--compile-time/--no-compile-time",
    default=True,
    show_default=True,
    help="Measure compile times, in processes of their own.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare gradients with fp64 eager, in processes of their own.",
)
@_json_option("result")
def bench(
    what: str,
    against: str,
    place: str | None,
    options: dict[str, Any],
    json_path: str | None,
    **arguments: Any,
) -> None:
    """Measure a training step with the backend, beside eager and Inductor.

    WORKLOAD is one of this package's; MODULE:FUNCTION a function of yours, found from the current
    folder, that returns (model, inputs, loss). --size, --dtype and --device are for workloads only.

    Ends with 1 if evt failed or its gradients fail the error standard.
    """
    from rich.console import Console

    from torch_evt.report.bench import bench as measure
    from torch_evt.report.bench import to_json_text
    from torch_evt.report.bench_table import render
    from torch_evt.report.progress import shown

    others = [name.strip() for name in against.split(",") if name.strip()]
    if place is not None:
        options["evt.place"] = place
    # with the JSON on stdout, whatever is for people goes to stderr
    console = Console(stderr=json_path == "-")
    with shown() as progress:
        result = measure(what, against=others, options=options, progress=progress, **arguments)
    console.print(render(result))
    if json_path == "-":
        click.echo(to_json_text(result), nl=False)
    elif json_path is not None:
        Path(json_path).write_text(to_json_text(result), encoding="utf-8")
    sys.exit(not result.sound)


@main.command()
@click.argument("what", metavar="WORKLOAD|MODULE:FUNCTION")
@click.option("--size", default="tiny", show_default=True, help="tiny, small or paper.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="fp32",
    show_default=True,
    help="Of weights.",
)
@click.option("--seed", default=0, show_default=True, help="Of weights, inputs and dropout.")
@click.option("--target", help="Device to price for; by default the one present, else h200.")
@_compile_options
@click.option("--inference", is_flag=True, help="Verify the forward pass alone, in eval mode.")
@click.option(
    "--folder",
    metavar="FOLDER",
    type=click.Path(file_okay=False),
    callback=_check_parent,
    help="Where to write a reproduction of what is wrong; by default a new temporary folder.",
)
@_json_option("verdict")
def verify(
    what: str,
    size: str,
    dtype: str,
    seed: int,
    target: str | None,
    options: dict[str, Any],
    inference: bool,
    folder: str | None,
    json_path: str | None,
) -> None:
    """Check every kernel of one training step, and the step, against fp64; 1 if any is wrong.

    WORKLOAD is one of this package's; MODULE:FUNCTION a function of yours, found from the current
    folder, that returns (model, inputs, loss). --size and --dtype are for workloads only.
    """
    import torch
    from rich.console import Console

    from torch_evt import workloads
    from torch_evt.report.progress import shown
    from torch_evt.report.verification import render, to_json_text
    from torch_evt.report.verify import verify as verified

    chosen = getattr(torch, DTYPES[dtype])
    if ":" in what:
        model, inputs, loss = workloads.load(what)
    else:
        model, inputs, loss = workloads.get(what, size).make(seed, dtype=chosen)
    if target is not None:
        options["evt.target"] = target
    with torch.set_grad_enabled(not inference), shown() as progress:
        found = verified(
            model.eval() if inference else model,
            *inputs,
            loss=None if inference else loss,
            options=options,
            seed=seed,
            folder=folder,
            progress=progress,
        )
    if json_path == "-":
        click.echo(to_json_text(found), nl=False)
    else:
        Console().print(render(found))
        if json_path is not None:
            Path(json_path).write_text(to_json_text(found), encoding="utf-8")
    sys.exit(0 if found.passed else 1)


if __name__ == "__main__":
    main()
