"""Settings from the environment: ``SPMD_DISCO_<NAME>``. A keyword argument beats them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeVar

__all__ = ["byte_count", "flag", "seconds", "setting"]

T = TypeVar("T")

PREFIX = "SPMD_DISCO_"


def setting(name: str, default: T, parse: Callable[[str], T]) -> T:
    """Return the setting `name`, or `default` where it is unset or empty.

    Raises
    ------
    ValueError
        The text in the environment is not what `parse` takes.
    """
    text = os.environ.get(PREFIX + name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as e:
        raise ValueError(f"{PREFIX}{name}={text!r} in the environment: {e}") from None


def seconds(text: str) -> float:
    """Parse a number from 0, as of seconds; not a number is refused, too."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("a finite number from 0 is allowed")
    return value


def byte_count(text: str) -> int:
    """Parse a number of bytes: ``0``, ``1048576``, ``512M``, ``1.5G``."""
    match = re.fullmatch(r"(\d+|\d*\.\d+)\s*([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise ValueError("a number of bytes is allowed, with K, M, G or T behind it if wanted")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def flag(name: str, default: bool) -> bool:
    """Return the setting `name` as a bool: 1/0, true/false, yes/no, on/off."""

    def parse(text: str) -> bool:
        value = {"1": True, "true": True, "yes": True, "on": True}.get(text.lower())
        if value is None and text.lower() not in ("0", "false", "no", "off"):
            raise ValueError("allowed are 1, true, yes, on and 0, false, no, off")
        return bool(value)

    return setting(name, default, parse)
