"""The documents say what the code does: what is generated is current, what is shown runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreted import PLACE, interpreted
from torch_evt.report.explain import explain
from torch_evt.runtime import counters

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import generate  # noqa: E402
import linear_layer  # noqa: E402

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LIFE = generate.LIFE.read_text(encoding="utf-8")
STALE = "is stale: run `make docs`, then read what changed"

shows_this_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="the documents show the graphs and prices of torch 2.13",
)


def anchor(heading: str) -> str:
    """The name by which a link reaches a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def block(name: str) -> str:
    """A generated block of the document."""
    found = re.search(rf"<!-- generated: {name} -->\n```\n(.*?)\n```$", LIFE, re.DOTALL | re.M)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target, fragment in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        path = (document.parent / target).resolve() if target else document
        assert path.is_file(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{target}#{fragment}"


def test_the_page_of_devices_is_the_codes() -> None:
    page = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    assert page == generate.devices_page(), f"docs/devices.md {STALE}"


def test_the_page_of_options_is_the_codes() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == generate.options_page(), f"docs/options.md {STALE}"


def test_the_page_of_reasons_is_the_codes() -> None:
    page = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    assert page == generate.reasons_page(), f"docs/reasons.md {STALE}"


@shows_this_torch
def test_every_block_of_the_life_of_a_layer_is_what_the_compiler_prints() -> None:
    blocks = linear_layer.blocks()
    assert set(re.findall(r"<!-- generated: (.+?) -->", LIFE)) == set(blocks)
    for name, text in blocks.items():
        assert block(name) == text, f"block {name} of {generate.LIFE.name} {STALE}"


def test_the_trees_and_the_number_of_regions_of_the_life_of_a_layer() -> None:
    model, inputs, loss = linear_layer.make()
    options = {"evt.target": linear_layer.TARGET, "evt.place": "always"}
    (graph,) = explain(model, *inputs, loss=loss, options=options).graphs
    found = Counter(region.half for region in graph.regions)
    said = re.search(r"(\d+) regions, (\d+) in\s+forward and (\d+) in\s+backward", LIFE)
    assert said is not None
    assert [int(number) for number in said.groups()] == [
        len(graph.regions),
        found["forward"],
        found["backward"],
    ]
    for region in graph.regions:
        assert block(f"{region.half} tree") == region.tree


def test_the_two_regions_of_the_life_of_a_layer_run_once_each() -> None:
    torch._dynamo.reset()
    counters.reset()
    model, (x,), _ = linear_layer.make(rows=(2, 8))
    compiled: Any = torch.compile(model, backend=interpreted, options=dict(PLACE))
    output = compiled(x)
    output.backward(torch.randn_like(output))
    assert counters.region_runs == {block("forward tree"): 1, block("backward tree"): 1}


def test_what_the_life_of_a_layer_says_that_a_tree_computes() -> None:
    torch.manual_seed(0)
    examples = re.findall(r"```python\n(.*?)```", LIFE, re.DOTALL)
    code = "\n".join(example for example in examples if "evaluate(" in example)
    assert code.count("assert ") == 4
    names: dict[str, Any] = {}
    exec(compile(code, generate.LIFE.name, "exec"), names)
    for half in ("forward", "backward"):
        assert names["to_text"](names[half]) == block(f"{half} tree")


def test_every_dumped_stage_runs_alone_and_computes_the_same(tmp_path: Path) -> None:
    model, inputs, loss = linear_layer.make(rows=(2, 8))
    options = {"evt.target": "h200", "evt.place": "always", "evt.dump": str(tmp_path)}
    explain(model, *inputs, loss=loss, options=options)
    program = (
        "import pathlib, runpy, sys\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*/*.py')):\n"
        "    print('stage', path.stem)\n"
        "    runpy.run_path(str(path), run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    stages = [stage.splitlines() for stage in done.stdout.split("stage ")[1:]]
    assert len(stages) == 21
    for half, results in (("joint", 5), ("forward", 5), ("backward", 4)):
        norms = [
            [float(line.split()[-1]) for line in stage[1:] if not line.endswith("None")]
            for stage in stages
            if f"_{half}_" in stage[0]
        ]
        for stage in norms:
            assert len(stage) in (results, results - 1)
            assert stage == pytest.approx(norms[0], rel=1e-2)


@pytest.mark.slow
@shows_this_torch
def test_what_the_readme_shows_of_explain_is_what_it_prints() -> None:
    readme = generate.README.read_text(encoding="utf-8")
    now = generate.filled(readme, generate.readme_blocks())

    def without_versions(text: str) -> str:
        return re.sub(r"^versions .*\n", "", text, flags=re.MULTILINE)

    assert without_versions(readme) == without_versions(now), f"README.md {STALE}"
