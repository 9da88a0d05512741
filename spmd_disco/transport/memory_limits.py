"""How much memory this process can have: what the system and its control groups have left."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Limit", "available", "limits"]

PROC = pathlib.Path("/proc")
#: Version 1 writes «no limit» as the largest number of pages; nothing real is above this.
NO_LIMIT = 1 << 60


class Limit(NamedTuple):
    """The limit of one control group: the files that tell its usage, and the bytes allowed."""

    usage: str
    statistics: str
    limit: int

    def left(self) -> int:
        """Return how many bytes may still be taken."""
        usage = _number(pathlib.Path(self.usage)) or 0
        statistics = _table(pathlib.Path(self.statistics), " ")
        # File pages that are not in use count as used, and go when memory is wanted.
        idle = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        return max(0, self.limit - max(0, usage - idle))


def available(proc: pathlib.Path = PROC) -> int:
    """Return how many bytes this process can take, all limits considered."""
    meminfo = _table(proc / "meminfo", ":")
    # MemAvailable is there since Linux 3.14.
    of_system = 1024 * meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    return min([of_system, *(limit.left() for limit in limits(proc))])


def limits(proc: pathlib.Path = PROC) -> list[Limit]:
    """Return the limits of the control groups that this process is in, of both versions."""
    found = []
    for folder, version in _groups(proc):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, usage = names if version == 1 else ("memory.max", "memory.current")
        allowed = _number(folder / limit)
        if allowed is not None and allowed < NO_LIMIT:
            found.append(Limit(str(folder / usage), str(folder / "memory.stat"), allowed))
    return found


def _groups(proc: pathlib.Path) -> Iterator[tuple[pathlib.Path, int]]:
    """Yield the folders of this process's control groups, up to the root, and their version."""
    paths: dict[int, str] = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in _lines(proc / "self" / "mountinfo"):
        # «36 35 0:33 /root/of/it /where/it/is rw,… [tags] - cgroup2 source options»
        before, dash, behind = line.partition(" - ")
        fields, kinds = before.split(" "), behind.split(" ")
        if not dash or len(fields) < 5 or len(kinds) < 3:
            continue
        version = {"cgroup": 1, "cgroup2": 2}.get(kinds[0], 0)
        if version not in paths or (version == 1 and "memory" not in kinds[2].split(",")):
            continue
        root, mounted = fields[3].rstrip("/"), pathlib.Path(fields[4])
        path = paths[version]
        # In a container the path may be one of the host, of which the mount shows the end.
        inside = path == root or path.startswith(root + "/")
        folder = mounted / (path[len(root) :].strip("/") if inside else "")
        while True:
            yield folder, version
            if folder == mounted or mounted not in folder.parents:
                break
            folder = folder.parent


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []  # no such limit then


def _number(path: pathlib.Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _table(path: pathlib.Path, separator: str) -> dict[str, int]:
    """Return the numbers of a file of lines «name value» or «name: value kB»."""
    numbers = {}
    for line in _lines(path):
        name, _, value = line.partition(separator)
        words = value.split()
        if words and words[0].isdecimal():
            numbers[name] = int(words[0])
    return numbers
