"""The store: whole entries or none, whatever happens to its folder."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path

import pytest

from torch_evt.runtime import store


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "torch_evt"


KEY = store.key(["a test"])


def file_of(folder: Path, namespace: str = "things", key: str = KEY) -> Path:
    return folder / namespace / key[:2] / key


def test_a_value_is_found_under_its_own_key_and_namespace_only(folder: Path) -> None:
    value = random.randbytes(1000)
    assert store.put("things", KEY, value)
    assert store.get("things", KEY) == value
    assert store.get("others", KEY) is None
    assert store.get("things", store.key(["another test"])) is None
    assert file_of(folder).is_file()  # beside Inductor's caches, and so cleared with them


def test_the_last_value_stays() -> None:
    for number in range(3):
        store.put("things", KEY, b"%d" % number)
    assert store.get("things", KEY) == b"2"


def test_a_key_depends_on_every_part_and_on_where_parts_end() -> None:
    parts = [["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c", ""], ["ab", "d"]]
    assert len({store.key(each) for each in parts}) == len(parts)


def test_a_key_that_holds_an_address_is_refused() -> None:
    with pytest.raises(store.UnstableKeyError, match="0x"):
        store.key(["fine", repr(object())])


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_entry_counts_as_absent_and_is_replaced(folder: Path, seed: int) -> None:
    source = random.Random(seed)
    store.put("things", KEY, value := source.randbytes(200))
    path = file_of(folder)
    entry = bytearray(path.read_bytes())
    if seed % 2:
        entry[source.randrange(len(entry))] ^= 1 << source.randrange(8)
    else:
        del entry[source.randrange(len(entry)) :]
    path.write_bytes(entry)
    assert store.get("things", KEY) is None
    assert store.put("things", KEY, value)
    assert store.get("things", KEY) == value


def test_an_entry_of_another_version_counts_as_absent(folder: Path) -> None:
    store.put("things", KEY, b"value")
    path = file_of(folder)
    path.write_bytes(path.read_bytes().replace(b"store 1\n", b"store 2\n"))
    assert store.get("things", KEY) is None


def test_a_folder_that_cannot_be_written_keeps_nothing_and_raises_nothing(folder: Path) -> None:
    folder.write_bytes(b"a file stands where the folder should be")  # holds for root, too
    assert not store.put("things", KEY, b"value")
    assert store.get("things", KEY) is None


def test_a_write_that_fails_leaves_the_entry_before_and_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("things", KEY, b"before")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not store.put("things", KEY, b"after")
    assert store.get("things", KEY) == b"before"
    assert [p.name for p in file_of(folder).parent.iterdir()] == [KEY]


def test_what_a_killed_writer_left_is_no_entry(folder: Path) -> None:
    path = file_of(folder)
    path.parent.mkdir(parents=True)
    (path.parent / ".unfinished_1").write_bytes(b"torch_evt store 1\n half of it")
    assert store.get("things", KEY) is None
    assert store.put("things", KEY, b"value") and store.get("things", KEY) == b"value"


def _write_often(letter: bytes) -> None:
    for number in range(150):
        assert store.put("things", KEY, letter * (1000 + 97 * number))


def test_two_processes_that_write_at_once_leave_whole_entries() -> None:
    processes = [
        multiprocessing.get_context("fork").Process(target=_write_often, args=(letter,))
        for letter in (b"a", b"b")
    ]
    for process in processes:
        process.start()
    read = 0
    while any(process.is_alive() for process in processes):
        if (value := store.get("things", KEY)) is not None:
            assert set(value) in ({ord("a")}, {ord("b")})
            read += 1
        else:
            assert read == 0, "an entry vanished while it was replaced"
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    assert read > 0
