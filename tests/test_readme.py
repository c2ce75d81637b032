"""The README's example is code that runs."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_without_the_backend() -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    code = example[1].replace('backend="evt"', 'backend="eager"')
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    model = names["model"]
    gradients = [p.grad for p in model.parameters()]  # type: ignore[attr-defined]
    assert len(gradients) == 4 and all(g.abs().max() > 0 for g in gradients)
