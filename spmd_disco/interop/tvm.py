"""The bridge to TVM: compiled modules run over our data plane.

TVM's global functions belong to the process. From `enable` on, those by which compiled code and
TVM's users reach a Disco runtime find the worker of ours whose function runs in the calling thread;
where there is none, they do what they did before. So TVM's own sessions, ours, and several of ours
can live in one process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading

__all__ = ["check", "enable", "enabled"]

MISSING = (
    "TVM is not installed here, and tvm=True, --tvm, load_vm_module() and spmd_disco.interop want "
    'it: pip install "spmd-disco[tvm]"'
)

_enabling = threading.Lock()
_enabled = False


def enabled() -> bool:
    """Whether the bridge is there in this process."""
    return _enabled


def check() -> None:
    """Check that TVM is installed; it is not imported for that.

    Raises
    ------
    ImportError
        It is not; the text says how to install it.
    """
    for name in ("tvm", "tvm_ffi"):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise ImportError(MISSING, name=name)


def enable() -> None:
    """Serve TVM's Disco functions in this process, from now on. A second call does nothing.

    Sessions that are opened with ``tvm=True`` call it on every worker.

    Raises
    ------
    ImportError
        TVM is not installed, or cannot be imported.
    """
    global _enabled
    with _enabling:
        if _enabled:
            return
        check()
        # Before any of its names is registered: its library ends the process over a name that is
        # taken already.
        importlib.import_module("tvm")
        _complete_disco()
        from .tvm_functions import install

        install()
        _enabled = True


def _complete_disco() -> None:
    """Import the Python part of TVM's Disco, as far as this TVM has one.

    TVM 0.27 imports it before the library with its types, takes that for lacking, and goes without.
    It registers functions of its own, and a later import of it would find their names taken.
    """
    runtime = importlib.import_module("tvm.runtime")
    if getattr(runtime, "disco", None) is not None:
        return
    # As TVM has it: without the library it is optional, and says so by one of these.
    with contextlib.suppress(ImportError, ValueError):
        importlib.import_module("tvm.runtime.disco")
        # This part was imported at the first try, and found none of the functions then.
        importlib.reload(importlib.import_module("tvm.runtime.disco._ffi_api"))
