"""The main program of a worker process of a `ProcessSession`, which starts it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import types

from . import native

__all__ = ["main"]


def main() -> None:
    """Serve the session that has started this process, to its end.

    A module that is given as `ProcessSession`'s `entrypoint` calls this when it has set up what it
    wants the workers to have.

    Raises
    ------
    DiscoError
        This process is no session's worker.
    """
    from .errors import DiscoError

    try:
        fd, parent = map(int, sys.argv[-2:])
    except ValueError:
        raise DiscoError(
            f"a worker process is started by a ProcessSession, not by {' '.join(sys.argv)!r}"
        ) from None
    # Before anything that takes time: the controller may have ended meanwhile.
    assert native.core is not None, native.why_not
    native.core.end_with_parent(parent)
    # The terminal's is the controller's affair; it tells the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        # Read by the controller, whatever the locale.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    # An empty one, as under the launcher: functions of the program's own come by value.
    sys.modules["__main__"] = types.ModuleType("__main__")

    from .process_member import serve
    from .processes import Link

    link = Link(socket.socket(fileno=fd))
    os.set_inheritable(fd, False)
    serve(link)


if __name__ == "__main__":
    main()
