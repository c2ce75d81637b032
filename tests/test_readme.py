"""The README keeps up with the code."""

import re
from pathlib import Path

from torch_evt.options import describe

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def options_table() -> str:
    """The table of all options as the README has it."""
    rows = ["| option | values | default | what it does |", "|---|---|---|---|"]
    for name, values, default, text, _ in describe():
        cells = [f"`{name}`", values.replace("|", "or"), f"`{default}`", text]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def test_the_options_table_is_the_codes() -> None:
    assert options_table() in README, f"the README should have:\n{options_table()}"


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parent.parent / link).is_file(), link


def test_the_example_runs_without_the_backend() -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    code = example[1].replace('backend="evt"', 'backend="eager"')
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    model = names["model"]
    gradients = [p.grad for p in model.parameters()]  # type: ignore[attr-defined]
    assert len(gradients) == 4 and all(g.abs().max() > 0 for g in gradients)
