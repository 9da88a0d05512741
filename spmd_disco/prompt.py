"""The prompt of ``python -m spmd_disco -i``, on rank 0."""

from __future__ import annotations

import code
import contextlib
import sys
from typing import Any

__all__ = ["interact"]


class _Console(code.InteractiveConsole):
    """Reads lines from a terminal, or from the pipe that standard input is under ``mpirun``."""

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


def _edit_lines(names: dict[str, Any]) -> None:
    """Give `input` its editing, history and completion, as Python's own prompt has them."""
    # Some builds of Python lack it.
    with contextlib.suppress(ImportError):
        import readline
        import rlcompleter

        readline.set_completer(rlcompleter.Completer(names).complete)
        # The other library that may stand behind the module has a language of its own.
        editline = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if editline else "tab: complete")


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
        _edit_lines(names)
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
