"""What outlives the process: bytes by key, in a folder beside Inductor's own caches.

    <Inductor's cache folder>/torch_evt/<namespace>/<two letters>/<key>

This module alone knows that folder, so clearing Inductor's caches clears it, too. An entry is
written to a file of its own and renamed, so a reader sees a whole entry or none, whatever was
killed and however many processes write; of two writers the last one wins. The head of an entry has
the version of its form and a digest of its contents: what does not match counts as absent, and the
next `put` replaces it. Nothing here raises for a folder that is missing, full or read-only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from torch_evt.torch_compat import cache_folder

log = logging.getLogger("torch_evt")

_HEAD = b"torch_evt store 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


class UnstableKeyError(ValueError):
    """A part of a key names an object by its address, which another process would not find."""


def key(parts: Iterable[str]) -> str:
    """The key of an entry that depends on all of `parts`, in their order.

    Raises UnstableKeyError where a part holds an address, as the text of an object without a text
    of its own does.
    """
    digest = hashlib.sha256()
    for part in parts:
        if found := _ADDRESS.search(part):
            raise UnstableKeyError(f"{found[0]} in {part[:200]!r}")
        text = part.encode()
        digest.update(b"%d:" % len(text))
        digest.update(text)
    return digest.hexdigest()


def get(namespace: str, key: str) -> bytes | None:
    """The value put under a key; None where there is none, or none that is whole."""
    try:
        entry = _path(namespace, key).read_bytes()
    except OSError:
        return None
    start = len(_HEAD) + _DIGEST_BYTES
    value = entry[start:]
    if entry[:start] != _HEAD + hashlib.sha256(value).digest():
        log.debug("the entry %s of %s is of another version or damaged", key, namespace)
        return None
    return value


def put(namespace: str, key: str, value: bytes) -> bool:
    """Keep a value under a key; whether that was possible."""
    temporary: str | None = None
    try:
        path = _path(namespace, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        file, temporary = tempfile.mkstemp(dir=path.parent, prefix=".unfinished_")
        with os.fdopen(file, "wb") as out:
            out.write(_HEAD + hashlib.sha256(value).digest() + value)
        os.replace(temporary, path)
    except OSError as failure:
        log.debug("nothing was kept in %s: %s", namespace, failure)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def _path(namespace: str, key: str) -> Path:
    return Path(cache_folder()) / "torch_evt" / namespace / key[:2] / key
