"""What is checked of the text of index files, which may come from anywhere."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = ["data_file", "field", "file_size", "natural", "parse_json", "read_json"]

T = TypeVar("T")

#: The longest value that is shown in full in a message.
SHOWN = 80


def shown(value: object) -> str:
    """Return a value for a message, cut short."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def read_json(path: str) -> Any:
    """Return what is in a JSON file.

    Raises
    ------
    ValueError
        It is no JSON, or no regular file.
    """
    file_size(path)
    with open(path, "rb") as stream:
        raw = stream.read()
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8: {e}") from None
    return parse_json(text, path)


def parse_json(text: str, where: str) -> Any:
    """Return what a JSON text says.

    Raises
    ------
    ValueError
        It is no JSON, or an object has a key twice, or it is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as e:
        raise ValueError(f"{where} is not the JSON that it should be: {e}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} is there twice in one object")
            seen.add(key)
    return found


def field(record: Any, key: str, kind: type[T], where: str) -> T:
    """Return a value of an object, which has to be of a type.

    Raises
    ------
    ValueError
        `record` is no object, or has no such key, or its value is of another type: a bool is no
        int, and neither is 1.0.
    """
    names = {dict: "an object", list: "a list", str: "a string", int: "an integer"}
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {shown(record)}: it has to be an object")
    if key not in record:
        raise ValueError(f"{where} has no {key!r}, which has to be {names[kind]}")
    value = record[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key!r} of {where} is {shown(value)}: it has to be {names[kind]}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key!r} of {where} is no Unicode: {shown(value)}") from None
    return value


def natural(record: Any, key: str, where: str) -> int:
    """Return an integer of an object that is not negative and fits into 63 bits."""
    value = field(record, key, int, where)
    if not 0 <= value < 2**63:
        raise ValueError(f"{key!r} of {where} is {shown(value)}: allowed are 0 to 2**63 - 1")
    return value


def dimensions(record: Any, key: str, where: str) -> tuple[int, ...]:
    """Return a list of dimensions of an object."""
    values: Sequence[Any] = field(record, key, list, where)
    for n in values:
        if type(n) is not int or not 0 <= n < 2**63:
            raise ValueError(
                f"{key!r} of {where} has {shown(n)} among its dimensions: they have to be integers "
                "from 0 to 2**63 - 1"
            )
    return tuple(values)


def data_file(folder: str, name: str, where: str) -> str:
    """Return the path of a file that an index names, which has to be in the folder of the index.

    It need not exist. In a snapshot of the Hugging Face cache, ``…/snapshots/REVISION``, links
    lead to ``…/blobs``, and may.

    Raises
    ------
    ValueError
        The name leads elsewhere: it is absolute, or has ``..`` in it, or there is a link.
    """
    given = f"{where} names the data file {shown(name)}"
    if not name or "\0" in name:
        raise ValueError(f"{given}: that is no name of a file")
    if os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise ValueError(f"{given}, which is not within the folder of the index")
    base = os.path.realpath(folder)
    path = os.path.join(folder, name)
    allowed = [base]
    repository, snapshots = os.path.split(os.path.dirname(base))
    if snapshots == "snapshots":
        allowed.append(os.path.join(repository, "blobs"))
    real = os.path.realpath(path)
    if not any(real.startswith(os.path.join(parent, "")) for parent in allowed):
        raise ValueError(
            f"{given}, a link to {real}, which is not within the folder of the index: copy the "
            "file there"
        )
    return path


def file_size(path: str) -> int:
    """Return the bytes of a file.

    Raises
    ------
    ValueError
        It is no regular file.
    OSError
        There is none.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file")
    return status.st_size
