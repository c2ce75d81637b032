"""Writes what is generated in the documents; `make docs` runs it.

    devices.md, options.md, reasons.md    whole, from the code's own descriptions
    life-of-a-linear-layer.md             the blocks after a line "<!-- generated: NAME -->"
    README.md                             likewise; takes a minute

`tests/test_docs.py` fails where a document is not what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import linear_layer
import torch

from torch_evt import pipeline, workloads
from torch_evt.devices import DEVICES, Device
from torch_evt.errors import REASONS
from torch_evt.options import describe
from torch_evt.report.explain import explain
from torch_evt.report.render import to_text
from torch_evt.tree.functions import FUNCTIONS

DOCS = Path(__file__).parent
LIFE = DOCS / "life-of-a-linear-layer.md"
README = DOCS.parent / "README.md"

_DEVICES = """\
# Devices

Generated from `src/torch_evt/devices.py` by `make docs`.

The names that `evt.target` and `evt explain --target` take. Without one, plans are priced for the
GPU that is present, found by what `torch.cuda.get_device_name` says, and for an h200 where there is
none that the table knows. Peak rates are for dense operands, in TFLOP/s; a format without a figure
is priced as f32. A price is a peak times the share of it that good kernels reach: `sustained`. The
datasheets' tables were read in published copies; of NVIDIA's tuning guides, Ampere's and Ada's were
read themselves. What says `assumed` was not looked up.

"""

_OPTIONS = """\
# Options

Generated from `src/torch_evt/options.py` by `make docs`.

    torch.compile(model, backend="evt", options={"evt.place": "always", "max_autotune": True})

Keys that start with `evt.` are the ones below. All others are Inductor's, and so is
`mode=`, which PyTorch does not take together with options. The
first value of a choice is its default. An option that does not exist, or has a wrong value, is an
error when the compiled model is first called; `torch_evt.check_options(options)` raises it at once.
A value that is not available yet is an error too.

The last column says whether the option is part of the key under which Inductor caches a compiled
graph. `evt.dump` is not: it switches the caches off instead, since a cached graph runs no pass.

"""

_REASONS = """\
# Reasons for not fusing

Generated from `src/torch_evt/errors.py` by `make docs`.

A product that no region takes stays with Inductor, and `explain` says why. Codes do not change;
texts may, and `explain` adds the operation that stood in the way where there is one.

"""


_DISABLE = """
## Names for evt.disable

Passes, in the order in which they first run: {passes}.

Functions of trees: {functions}. A node that computes one of them then stays outside of all regions.
"""


def devices_page() -> str:
    """docs/devices.md."""
    kinds = ("f64", "f32", "tf32", "bf16", "f16", "f8")
    head = ("name", "called", "SMs", "TB/s", "L2, MiB", *kinds, "launch, us", "sustained")
    rows = (_device_row(entry, kinds) for entry in DEVICES.values())
    sources = "".join(
        f"\n### {entry.name}\n\n"
        + "".join(f"- `{field}`: {source}\n" for field, source in entry.sources.items())
        for entry in DEVICES.values()
    )
    return f"{_DEVICES}{_table(head, rows)}\n## Where the figures come from\n{sources}"


def _device_row(entry: Device, kinds: tuple[str, ...]) -> tuple[str, ...]:
    return (
        f"`{entry.name}`",
        ", ".join(entry.product_names),
        str(entry.multiprocessors or "-"),
        f"{entry.memory_bandwidth / 1e12:g}",
        f"{entry.l2_bytes / 2**20:g}",
        *(f"{entry.peak_flops[k] / 1e12:.4g}" if k in entry.peak_flops else "-" for k in kinds),
        f"{entry.launch_us:g}",
        f"memory {entry.sustained['memory']:.0%}, flops {entry.sustained['flops']:.0%}",
    )


def options_page() -> str:
    """docs/options.md."""
    rows = [
        (f"`{name}`", values.replace(" | ", ", "), f"`{default}`", text, "yes" if in_key else "no")
        for name, values, default, text, in_key in describe()
    ]
    table = _table(("option", "values", "default", "what it does", "in the key"), rows)
    steps = (*pipeline.JOINT, *pipeline.BEFORE_CUT, *pipeline.HALF)
    return (
        _OPTIONS
        + table
        + _DISABLE.format(
            passes=_listed(step.name for step in steps),
            functions=_listed([*FUNCTIONS, "pow", "sign"]),
        )
    )


def reasons_page() -> str:
    """docs/reasons.md."""
    return _REASONS + _table(
        ("code", "why a node stays with Inductor"),
        ((f"`{reason.code}`", reason.text) for reason in REASONS),
    )


def readme_blocks() -> dict[str, str]:
    """What `evt explain` prints for GPT-2 medium, without the tables of the backward half."""
    model, inputs, loss = workloads.get("gpt2-medium", "paper").make(dtype=torch.bfloat16)
    options = {"evt.target": "h200", "evt.place": "always"}
    text = to_text(explain(model, *inputs, loss=loss, options=options))
    # the number of the compilation, as a new process counts
    lines = re.sub(r"^graph \d+/\d+", "graph 0/0", text, flags=re.MULTILINE).splitlines()
    end = lines.index("  backward: fused")
    return {"explain": "\n".join([*lines[:end], "  ...", lines[-1]])}


def filled(document: str, blocks: Mapping[str, str]) -> str:
    """The document with every marked block replaced; KeyError for a name that does not exist."""
    return re.sub(
        r"(<!-- generated: (.+?) -->\n```\n).*?^```$",
        lambda found: f"{found[1]}{blocks[found[2]]}\n```",
        document,
        flags=re.DOTALL | re.MULTILINE,
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write all of it."""
    (DOCS / "devices.md").write_text(devices_page(), encoding="utf-8")
    (DOCS / "options.md").write_text(options_page(), encoding="utf-8")
    (DOCS / "reasons.md").write_text(reasons_page(), encoding="utf-8")
    for document, blocks in ((LIFE, linear_layer.blocks()), (README, readme_blocks())):
        text = filled(document.read_text(encoding="utf-8"), blocks)
        document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
