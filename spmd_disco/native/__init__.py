"""The part of the package that is written in C, where it could be built.

Without it everything works, over MPI alone and slower. `SPMD_DISCO_NATIVE=0` leaves it unused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import flag

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["available", "core", "why_not"]

#: The native module, or None.
core: ModuleType | None = None
#: Why there is none; empty where there is.
why_not = ""

if flag("NATIVE", True):
    try:
        from . import _native as core
    except ImportError as e:
        why_not = (
            f"not built ({e}): a C compiler and Python's headers were missing when the package "
            "was installed"
        )
else:
    why_not = "switched off by SPMD_DISCO_NATIVE"


def available() -> bool:
    """Whether the native module is there and wanted."""
    return core is not None
