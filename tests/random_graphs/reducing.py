"""A program with parts left out, for making a failure small."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .program import Leaf, Program, Statement, names_in

_SWITCHES = 4


def parts(program: Program) -> int:
    """How many parts there are to keep or to leave out."""
    lists = (program.statements, program.inside, program.outside, program.results)
    return sum(map(len, lists)) + _SWITCHES


def keeping(program: Program, kept: Sequence[bool]) -> Program:
    """The program with the parts that `kept` names. What reads a value that is left out reads the
    one that stood in its place before, and is left out where there is none."""
    flags = iter(kept)
    statements, numbers, names = _statements(program, flags)
    known = {leaf.name for leaf in program.inputs} | {n for s in statements for n in s.binds()}

    def renamed(text: str) -> str:
        return _renamed(text, names)

    def stands(text: str) -> bool:
        return all(n in known for n in names_in(text))

    inside = [renamed(term) for term in program.inside if next(flags)]
    outside = [(renamed(n), renamed(term)) for n, term in program.outside if next(flags)]
    results = [renamed(name) for name in program.results if next(flags)]
    inside = [term for term in inside if stands(term)]
    outside = [(n, term) for n, term in outside if stands(term)]
    if not inside and not outside:
        last = next((s.binds()[-1] for s in reversed(statements) if s.binds()), "x0")
        inside = [f"{last}.float().square().sum()"]
    checkpoint, autocast, dynamic, options = (next(flags) for _ in range(_SWITCHES))
    results = [name for name in results if stands(name)]
    ends = [*inside, *(n for n, _ in outside), *results]
    live = _live(statements, ends)
    statements, numbers = [statements[i] for i in live], [numbers[i] for i in live]
    found = replace(
        program,
        statements=tuple(statements),
        inside=tuple(inside),
        outside=tuple(dict.fromkeys(outside)),
        results=tuple(results),
        checkpointed=_block(program, statements, numbers) if checkpoint else None,
        autocast=program.autocast if autocast else None,
        dynamic=program.dynamic and dynamic,
        sizes=program.sizes if dynamic else program.sizes[:1],
        options=program.options if options else _needed(program),
    )
    return _without_unused(found)


def _statements(
    program: Program, flags: object
) -> tuple[list[Statement], list[int], dict[str, str]]:
    """What stays, its numbers in the whole program, and who stands in for whom."""
    names: dict[str, str] = {}
    missing: set[str] = set()
    statements, numbers = [], []
    for number, statement in enumerate(program.statements):
        keep = next(flags)  # type: ignore[call-overload]
        text = _renamed(statement.text, names)
        if keep and not missing.intersection(names_in(text)):
            statements.append(replace(statement, text=text))
            numbers.append(number)
            continue
        other = names.get(statement.stand_in, statement.stand_in)
        if other and other not in missing:
            names |= {name: other for name in statement.binds()}
        else:
            missing.update(statement.binds())
    return statements, numbers, names


def _live(statements: list[Statement], ends: list[str]) -> list[int]:
    """The statements that the ends depend on, and those that change a buffer."""
    wanted = {name for end in ends for name in names_in(end)}
    found = []
    for i in reversed(range(len(statements))):
        statement = statements[i]
        changed = statement.binds() or statement.reads()[:1]
        if statement.text.startswith("self.") or wanted.intersection(changed):
            found.append(i)
            wanted.update(statement.reads())
    return found[::-1]


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub(r"\b[vx]\d+\b", lambda found: names.get(found[0], found[0]), text)


def _block(
    program: Program, statements: list[Statement], numbers: list[int]
) -> tuple[int, int] | None:
    if program.checkpointed is None:
        return None
    first, last = program.checkpointed
    inside = [i for i, number in enumerate(numbers) if first <= number <= last]
    if any(statements[i].in_place for i in inside):
        return None
    bound = {n for i in inside for n in statements[i].binds()}
    if not {n for i in inside for n in statements[i].reads()} - bound:
        return None
    return inside[0], inside[-1]


def _needed(program: Program) -> tuple[tuple[str, object], ...]:
    """The options without which nothing could be compared."""
    return tuple(option for option in program.options if option[0] == "evt.rng")


def _without_unused(program: Program) -> Program:
    """Inputs, parameters and buffers that are still read; x0 always stays."""
    terms = [*program.inside, *(term for _, term in program.outside)]
    text = " ".join([*(s.text for s in program.statements), *terms, *program.results])

    def used(leaf: Leaf) -> bool:
        return leaf.name == "x0" or re.search(rf"\b{leaf.name}\b", text) is not None

    return replace(
        program,
        parameters=tuple(filter(used, program.parameters)),
        buffers=tuple(filter(used, program.buffers)),
        inputs=tuple(filter(used, program.inputs)),
    )
