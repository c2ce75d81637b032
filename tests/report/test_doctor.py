"""`evt doctor` says what is broken, and what to do about it."""

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from torch_evt.report import doctor
from torch_evt.report.doctor import Check


def _broken(check: Callable[[], Check]) -> Check:
    result = check()
    assert result.state == "broken" and result.action
    assert doctor.exit_code([Check("fine", "fine"), result]) == 1
    return result


def test_this_machine_passes_what_tests_need() -> None:
    for check in (doctor.check_python, doctor.check_torch, doctor.check_compiler):
        assert check().state == "ok"
    assert torch.__version__ in doctor.check_torch().value


def test_a_note_does_not_fail_and_a_broken_line_does() -> None:
    assert doctor.exit_code([Check("a", "b"), Check("c", "d", "note", "e")]) == 0
    assert doctor.exit_code([Check("a", "b"), Check("c", "d", "broken", "e")]) == 1


@pytest.mark.parametrize("version", [(3, 9), (3, 14), (4, 0)])
def test_an_undeclared_python_is_broken(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (*version, 0, "final", 0))
    assert "Python 3.10 to 3.13" in _broken(doctor.check_python).action


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.10.1", "broken"), ("2.11.0", "ok"), ("2.15.1+cu130", "ok"), ("2.16.0a0", "broken")],
)
def test_an_undeclared_torch_is_broken(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.check_torch().state == state


@pytest.mark.parametrize(
    ("python", "version", "value"),
    [
        ((3, 11), "2.13.0+cpu", "Python 3.11 with torch 2.13.0"),
        ((3, 12), "2.13.0", "Python 3.12 with torch 2.13.0: declared, untested"),
        ((3, 11), "2.14.0", "Python 3.11 with torch 2.14.0: declared, untested"),
    ],
)
def test_only_recorded_pairs_are_called_tested(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, int], version: str, value: str
) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (*python, 0, "final", 0))
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.check_pair().value == value


def test_no_compiler_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install g++" in _broken(doctor.check_compiler).action


def test_a_compiler_that_cannot_compile_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "fake-compiler"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo fake 1.0 && exit 0\n"
                    "echo '<stdin>:1: vector: No such file' >&2; exit 1\n")  # fmt: skip
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    assert "fake 1.0: <stdin>:1: vector: No such file" in _broken(doctor.check_compiler).value


def test_missing_python_headers_are_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "-dev" in _broken(doctor.check_headers).action


def test_a_cache_folder_that_cannot_be_made_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert doctor.check_cache().value == str(tmp_path / "cache")
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "TORCHINDUCTOR_CACHE_DIR" in _broken(doctor.check_cache).action


def test_the_backend_needs_to_be_importable_and_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("torch_evt.backend")
    monkeypatch.setitem(sys.modules, "torch_evt.backend", module)
    assert "AttributeError" in _broken(doctor.check_backend).value
    module.evt = lambda graph, inputs: graph  # type: ignore[attr-defined]
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert doctor.check_backend().state == "note"
    point = SimpleNamespace(name="evt")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    assert doctor.check_backend().state == "ok"


def test_a_gpu_that_the_table_lacks_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "NVIDIA Nothing")
    assert doctor.check_device().state == "note"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "NVIDIA H200")
    assert doctor.check_device() == Check("device", "NVIDIA H200, priced as h200")


def test_the_report_shows_every_value_and_action() -> None:
    console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    checks = [Check("one", "v1"), Check("two", "v[2]", "broken", "do [this] next")]
    console.print(doctor.render(checks))
    text = console.export_text()
    assert all(part in text for part in ("one", "v1", "two", "v[2]", "-> do [this] next"))
