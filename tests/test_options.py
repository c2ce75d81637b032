"""The options: every value that is documented is taken, every mistake says what to do instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import torch_evt
from torch_evt import check_options, options
from torch_evt.errors import EvtError, OptionError
from torch_evt.options import Options, describe, split

GOOD: dict[str, tuple[Any, ...]] = {
    "target": (None, "h200", "cpu"),
    "place": ("auto", "always", "never"),
    "precision": ("fused", "eager"),
    "rng": ("inductor", "eager"),
    "tune": ("auto", "off"),
    "strict": (False, True),
    "poison": (False, True),
    "verify": (False, True),
    "disable": ((), ["plan"], ("plan", "gelu_erf")),
    "dump": (None, "folder"),
    "memory_budget": (None, 0, 2**30),
    "loss_chunk": (None,),
    "save_weight": (1e-7, 0, 0.5),
    "solver_nodes": (1000, 0),
}
"""Every documented option with the values that it takes, the default first."""

UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    "rng": ("grouped",),
    "tune": ("full",),
    "loss_chunk": (128,),
}
NOT_IN_KEY = {"dump"}
NAMES = [field.name for field in dataclasses.fields(Options)]


def test_these_are_all_options() -> None:
    assert list(GOOD) == NAMES


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in GOOD for value in GOOD[name]]
)
def test_a_documented_value_is_taken(name: str, value: Any) -> None:
    ours, rest = split({f"evt.{name}": value})
    wanted = tuple(value) if name == "disable" else value
    assert getattr(ours, name) == wanted
    assert rest == {}
    for other in NAMES:
        if other != name:
            assert getattr(ours, other) == GOOD[other][0]
    check_options({f"evt.{name}": value})


def test_without_options_everything_is_at_its_default() -> None:
    for given in (None, {}):
        ours, rest = split(given)
        assert ours == Options() and rest == {}
    for name, values in GOOD.items():
        assert getattr(Options(), name) == values[0]


def test_the_rest_is_inductors() -> None:
    given = {"evt.place": "never", "max_autotune": True, "triton.cudagraphs": False, "evtx": 1}
    ours, rest = split(given)
    assert ours.place == "never"
    assert rest == {"max_autotune": True, "triton.cudagraphs": False, "evtx": 1}
    assert "evt.place" in given  # the user's dict is not changed


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("plase", "place"), ("placing", "place"), ("precison", "precision"), ("seed", "strict"),
     ("solver", "solver_nodes"), ("PLACE", "place"), ("", None)],
)  # fmt: skip
def test_an_unknown_option_names_the_nearest_and_all(wrong: str, nearest: str | None) -> None:
    with pytest.raises(OptionError) as caught:
        split({f"evt.{wrong}": 1})
    message = str(caught.value)
    assert message.startswith(f"unknown option evt.{wrong};")
    for name in NAMES:
        assert f"evt.{name}" in message
    if nearest in ("place", "precision", "solver_nodes") and wrong.islower():
        assert f"the nearest is evt.{nearest}." in message


WRONG_TYPE = {
    "target": (1, "takes str or None, not 1 (int)"),
    "place": (None, "takes str, not None (NoneType)"),
    "precision": (True, "takes str, not True (bool)"),
    "rng": (["eager"], "takes str, not ['eager'] (list)"),
    "tune": (0, "takes str, not 0 (int)"),
    "strict": (1, "takes bool, not 1 (int)"),
    "poison": ("yes", "takes bool, not 'yes' (str)"),
    "verify": (None, "takes bool, not None (NoneType)"),
    "disable": ("plan", "takes tuple or list, not 'plan' (str)"),
    "dump": (3.5, "takes str or None, not 3.5 (float)"),
    "memory_budget": ("1GB", "takes int or None, not '1GB' (str)"),
    "loss_chunk": (True, "takes int or None, not True (bool)"),
    "save_weight": (None, "takes int or float, not None (NoneType)"),
    "solver_nodes": (0.0, "takes int, not 0.0 (float)"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_type_says_what_the_option_takes(name: str) -> None:
    value, said = WRONG_TYPE[name]
    with pytest.raises(OptionError) as caught:
        split({f"evt.{name}": value})
    assert str(caught.value) == f"evt.{name} {said}"


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["memory_budget", "save_weight", "solver_nodes"])
def test_a_bool_is_no_number(name: str, value: bool) -> None:
    with pytest.raises(OptionError, match="takes"):
        split({f"evt.{name}": value})


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Options)])
def test_an_option_without_its_prefix_says_how_to_write_it(name: str) -> None:
    assert name not in torch._inductor.config._config  # or it would be Inductor's
    with pytest.raises(OptionError, match=f"{name} is an option of evt: write evt.{name}"):
        split({name: 1})


def test_a_value_near_to_no_choice_names_none() -> None:
    with pytest.raises(OptionError) as caught:
        split({"evt.place": "sometimes"})
    assert str(caught.value).endswith("is not one of auto, always, never")


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf")])
def test_a_price_or_limit_is_not_negative(value: float) -> None:
    names = ["save_weight"] if isinstance(value, float) else ["memory_budget", "solver_nodes"]
    for name in names:
        with pytest.raises(OptionError, match=f"evt.{name} takes a finite number that is not"):
            split({f"evt.{name}": value})


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [("place", "alway", "always"), ("place", "Never", "never"), ("precision", "eagre", "eager"),
     ("rng", "inductr", "inductor"), ("tune", "ful", "full")],
)  # fmt: skip
def test_a_wrong_value_names_the_choices_and_the_nearest(
    name: str, value: str, nearest: str
) -> None:
    with pytest.raises(OptionError) as caught:
        split({f"evt.{name}": value})
    message = str(caught.value)
    field = next(f for f in dataclasses.fields(Options) if f.name == name)
    assert message == (
        f"evt.{name}={value!r} is not one of {', '.join(field.metadata['choices'])}; "
        f"the nearest is {nearest!r}"
    )


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in UNAVAILABLE for value in UNAVAILABLE[name]]
)
def test_what_is_not_there_yet_says_so(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        split({f"evt.{name}": value})
    message = str(caught.value)
    assert f"evt.{name}={value!r} is not available in this version" in message
    assert f"use {', '.join(repr(v) for v in _available(name))}" in message
    for possible in _available(name):
        check_options({f"evt.{name}": possible})


def _available(name: str) -> tuple[Any, ...]:
    field = next(f for f in dataclasses.fields(Options) if f.name == name)
    return field.metadata["available"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", [[1], ["plan", None]])
def test_disable_takes_names(value: Any) -> None:
    with pytest.raises(OptionError, match="evt.disable takes a list of names"):
        split({"evt.disable": value})


def test_an_empty_folder_is_a_mistake() -> None:
    with pytest.raises(OptionError, match="evt.dump takes a folder, not an empty name"):
        split({"evt.dump": ""})


def test_the_options_themselves_must_be_a_dict_of_names() -> None:
    with pytest.raises(OptionError, match=r"options takes a dict, not \['evt.place'\] \(list\)"):
        split(["evt.place"])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="takes names as keys, not 3"):
        split({3: "always"})  # type: ignore[dict-item]


def test_an_error_of_options_is_one_of_ours() -> None:
    with pytest.raises(EvtError):
        torch_evt.check_options({"evt.plce": "always"})
    assert torch_evt.check_options({"evt.place": "always"}) is None


def test_options_cannot_be_changed_and_can_be_hashed() -> None:
    ours, _ = split({"evt.disable": ["plan"]})
    with pytest.raises(dataclasses.FrozenInstanceError):
        ours.place = "never"  # type: ignore[misc]
    assert hash(ours) == hash(split({"evt.disable": ("plan",)})[0])


def test_describe_covers_every_option_as_it_is() -> None:
    rows = describe()
    assert [row[0] for row in rows] == [f"evt.{name}" for name in NAMES]
    for (_, values, default, doc, in_key), field in zip(
        rows, dataclasses.fields(Options), strict=True
    ):
        assert default == str(GOOD[field.name][0])
        assert len(doc) > 20
        assert in_key == (field.name not in NOT_IN_KEY)
        for choice in field.metadata["choices"]:
            assert choice in values.split(" | ")
            assert f"{choice}: " in doc or choice in doc
        assert ("not available yet" in doc) == (field.name in UNAVAILABLE)
    texts = {row[0]: row[1] for row in rows}
    assert texts["evt.place"] == "auto | always | never"
    assert texts["evt.dump"] == "str or none"
    assert texts["evt.save_weight"] == "int or float"


CHANGES = {
    "target": "cpu", "place": "always", "precision": "eager", "rng": "eager", "tune": "off",
    "strict": True, "poison": True, "verify": True, "disable": ("plan",), "dump": "folder",
    "memory_budget": 5, "loss_chunk": 5, "save_weight": 0.5, "solver_nodes": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_key_changes_with_what_changes_a_graph_and_nothing_else(name: str) -> None:
    changed = dataclasses.replace(Options(), **{name: CHANGES[name]})
    assert changed != Options()
    same = changed.cache_key() == Options().cache_key()
    assert same == (name in NOT_IN_KEY)


def test_keys_of_different_options_differ() -> None:
    keys = [
        dataclasses.replace(Options(), **{name: CHANGES[name]}).cache_key()
        for name in NAMES
        if name not in NOT_IN_KEY
    ]
    assert len(set(keys)) == len(keys)


def test_the_prefix_is_what_the_documents_say() -> None:
    assert options.PREFIX == "evt."
