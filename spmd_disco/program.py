"""Run a program as ``python`` would: ``sys.argv``, ``sys.path``, ``__main__``, tracebacks."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import linecache
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable

from .options import Options

__all__ = ["Program", "report", "system_exit_status"]

#: The frames of these files are the launcher's own, not the program's.
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _without_own_frames(tb: types.TracebackType | None) -> types.TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        tb = tb.tb_next
    return tb


def report(error: BaseException) -> int | None:
    """Show an exception that nobody has caught, as the interpreter would.

    Returns
    -------
    int or None
        The exit status, where ``sys.excepthook`` has asked for one by `SystemExit`.
    """
    tb = _without_own_frames(error.__traceback__)
    error.__traceback__ = tb
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, tb)
    except SystemExit as e:
        return system_exit_status(e)
    except BaseException as e:
        print("Error in sys.excepthook:", file=sys.stderr)
        hook_tb = _without_own_frames(e.__traceback__)
        e.__context__ = None
        sys.__excepthook__(type(e), e.with_traceback(hook_tb), hook_tb)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, tb)
    return None


def system_exit_status(error: SystemExit) -> int:
    """Return the exit status that an uncaught `SystemExit` means; print its text if it has one."""
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code)
    if sys.stderr is not None:
        print(code, file=sys.stderr, flush=True)
    return 1


class Program:
    """The program that the command line names.

    Parameters
    ----------
    options : Options
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        #: Keeps the launcher's own ``__main__`` alive: its code is still running.
        self._launcher = sys.modules.get("__main__")
        self.module = types.ModuleType("__main__")

    def prepare(self) -> None:
        """Set up ``sys.argv``, ``sys.path`` and an empty ``__main__``, on every rank.

        Nothing of the program is opened, imported or run here, except that its path is resolved.
        """
        options = self.options
        first = {"file": options.program, "module": "-m", "code": "-c", "stdin": "-", None: ""}
        sys.argv[:] = [first[options.kind], *options.args]
        self._set_path()
        names = vars(self.module)
        names["__builtins__"] = builtins
        names["__loader__"] = importlib.machinery.BuiltinImporter
        if sys.version_info < (3, 14):
            names["__annotations__"] = {}
        sys.modules["__main__"] = self.module

    def _set_path(self) -> None:
        """Replace the launcher's ``sys.path[0]`` by what the program's would be."""
        options = self.options
        safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
        self._file = self._absolute(options.program) if options.kind == "file" else ""
        self._is_container = bool(self._file) and pkgutil.get_importer(self._file) is not None
        if self._is_container:
            # A folder or a zip file: it comes first in any case, since __main__ is found in it.
            entry = self._file
        elif options.kind == "file":
            entry = os.path.dirname(os.path.realpath(self._file))
        elif options.kind == "module":
            entry = os.getcwd()
        else:
            entry = ""
        if self._is_container and safe:
            sys.path.insert(0, entry)
        elif not safe:
            sys.path[:1] = [entry]

    @staticmethod
    def _absolute(path: str) -> str:
        # Not normalised, so that __file__ and tracebacks show the path that was given.
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)

    def run(self) -> int | None:
        """Run the program in ``__main__``.

        Returns
        -------
        int or None
            The exit status if there is no program that could run; else None.

        Raises
        ------
        BaseException
            Whatever the program raises, `SystemExit` and `KeyboardInterrupt` included.
        """
        options = self.options
        names = vars(self.module)
        if options.kind == "code":
            # Python 3.13 began to show the source lines of -c in tracebacks.
            if sys.version_info >= (3, 13):
                lines = options.program.splitlines(keepends=True)
                linecache.cache["<string>"] = (len(options.program), None, lines, "<string>")
            self._execute(lambda: compile(options.program, "<string>", "exec", 0, True))
        elif options.kind == "stdin":
            source = sys.stdin.buffer.read()
            names.update(__file__="<stdin>", __cached__=None)
            self._execute(lambda: compile(source, "<stdin>", "exec", 0, True))
        elif options.kind == "module":
            _run_as_main(options.program, True)
        elif self._is_container:
            _run_as_main("__main__", False)
        else:
            return self._run_file()
        return None

    def _run_file(self) -> int | None:
        path = self._file
        try:
            with io.open_code(path) as f:
                source = f.read()
        except OSError as e:
            shown = f"[Errno {e.errno}] {e.strerror}"
            print(f"{sys.executable}: can't open file {path!r}: {shown}", file=sys.stderr)
            return 2
        names = vars(self.module)
        names.update(__file__=path, __cached__=None)
        if path.endswith(".pyc"):
            loader = importlib.machinery.SourcelessFileLoader("__main__", path)
            names["__loader__"] = loader
            self._execute(lambda: loader.get_code("__main__"))
        else:
            names["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
            self._execute(lambda: compile(source, path, "exec", 0, True))
        return None

    def _execute(self, get_code: Callable[[], types.CodeType | None]) -> None:
        code = get_code()
        if code is not None:
            exec(code, vars(self.module))


def _run_as_main(name: str, is_module: bool) -> None:
    """Run a module, or the ``__main__`` of what is first on ``sys.path``.

    The interpreter itself calls this function of `runpy` for ``python -m`` and for folders and zip
    files, so errors and tracebacks are the same, down to the frames.
    """
    run: Callable[[str, bool], object] = getattr(runpy, "_run_module_as_main")  # noqa: B009
    run(name, is_module)
