"""The prompt of ``python -m spmd_disco -i``, on rank 0."""

from __future__ import annotations

import code
import contextlib
import sys
from typing import Any

__all__ = ["interact"]


class _Console(code.InteractiveConsole):
    """Reads lines from standard input, which is a pipe under ``mpirun``."""

    def raw_input(self, prompt: str = "") -> str:
        if sys.stdin.isatty():
            return input(prompt)
        # Python itself writes its prompt there when it is interactive without a terminal.
        sys.stdout.flush()
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def interact(names: dict[str, Any], banner: bool) -> SystemExit | None:
    """Read and run lines until end of file, ``exit()`` or ``quit()``.

    Parameters
    ----------
    names : dict
        The namespace of ``__main__``.
    banner : bool
        Whether to say which Python this is: not after a program.

    Returns
    -------
    SystemExit or None
        What ``exit()`` has raised; None at the end of file.
    """
    if sys.stdin.isatty():
        # It gives input() its history and editing. Some builds of Python lack it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    text = ""
    if banner:
        text = (
            f"Python {sys.version} on {sys.platform}\n"
            'Type "help", "copyright", "credits" or "license" for more information.'
        )
    try:
        _Console(names, filename="<stdin>").interact(banner=text, exitmsg="")
    except SystemExit as e:
        return e
    return None
