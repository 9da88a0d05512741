"""TVM's own Disco, to run beside ours: the sessions in its wheel, whose import has to be repaired.

As a program, ``python -m bench_tvm …``, this is a worker of TVM's ProcessSession.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import time
from typing import Any

from bench_common import refuse


def load() -> Any:
    """Return the module `tvm.runtime.disco`.

    TVM 0.27 imports it before it loads the library that has its C++ part, takes that for lacking,
    and sets `tvm.runtime.disco` to None. By the end of ``import tvm`` the library is there.
    """
    try:
        importlib.import_module("tvm")
    except ModuleNotFoundError as e:
        if e.name != "tvm":
            raise
        refuse("--peer tvm wants TVM, which is not installed: pip install 'spmd-disco[tvm]'")
    disco = importlib.import_module("tvm.runtime.disco")
    # This part was imported at the first try, and found none of the functions.
    importlib.reload(importlib.import_module("tvm.runtime.disco._ffi_api"))
    return disco


def register_functions() -> None:
    """Register what the benchmark calls on each worker."""
    register = importlib.import_module("tvm_ffi").register_global_func
    register("bench.add_one", lambda x: x + 1)
    register("bench.process_time", time.process_time)


class TVMDisco:
    """What is measured, done by TVM.

    Parameters
    ----------
    kind : str
        "tvm" for worker processes, "tvm-threads" for worker threads. Worker 0 is a thread of this
        process in both.
    num_workers : int
        The number of workers, worker 0 included.
    commands : int
        Commands in one round of dispatches; of round trips a fifth of it.
    """

    def __init__(self, kind: str, num_workers: int, commands: int) -> None:
        self.disco = load()
        self.version = importlib.metadata.version("apache-tvm")
        self.kind, self.num_workers, self.commands = kind, num_workers, commands
        register_functions()
        # Where the workers find this file; added to what the user has.
        here = str(pathlib.Path(__file__).parent)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        self.session = self.open()
        self.add_one = self.session.get_global_func("bench.add_one")
        self.process_time = self.session.get_global_func("bench.process_time")
        self.session._sync_all()

    def open(self) -> Any:
        if self.kind == "tvm-threads":
            return self.disco.ThreadedSession(self.num_workers)
        return self.disco.ProcessSession(self.num_workers, entrypoint="bench_tvm")

    def close(self) -> None:
        self.session.shutdown()

    def dispatch(self, kept: bool = False, to_the_end: bool = False) -> float:
        """Return µs per call, without waiting for the workers, or until all have done the last."""
        refs = []
        self.session._sync_all()
        start = time.perf_counter()
        if kept:
            for i in range(self.commands):
                refs.append(self.add_one(i))
        else:
            for i in range(self.commands):
                self.add_one(i)
        spent = time.perf_counter() - start
        self.session._sync_all()
        if to_the_end:
            spent = time.perf_counter() - start
        return spent / self.commands * 1e6

    def call_and_sync(self) -> float:
        """Return µs per call and sync of all workers."""
        trips = self.commands // 5
        self.session._sync_all()
        start = time.perf_counter()
        for i in range(trips):
            self.add_one(i)
            self.session._sync_all()
        return (time.perf_counter() - start) / trips * 1e6

    def get_from_last(self) -> float:
        """Return µs per call and get of its result from the last worker."""
        trips, last = self.commands // 5, self.num_workers - 1
        self.session._sync_all()
        start = time.perf_counter()
        for i in range(trips):
            self.add_one(i).debug_get_from_remote(last)
        return (time.perf_counter() - start) / trips * 1e6

    def idle(self, seconds: float) -> float:
        """Return the CPU share of the last worker while nothing is asked of it, in percent."""
        last = self.num_workers - 1
        before = self.process_time().debug_get_from_remote(last)
        time.sleep(seconds)
        return (self.process_time().debug_get_from_remote(last) - before) / seconds * 100

    def start_up(self) -> float:
        """Open another session, wait until all workers have answered; return milliseconds."""
        start = time.perf_counter()
        session = self.open()
        session._sync_all()
        spent = (time.perf_counter() - start) * 1e3
        session.shutdown()
        return spent


def ccl_for_host_arrays() -> str | None:
    """Return the name of a collective library for arrays in host memory, if TVM has one."""
    load()
    names = importlib.import_module("tvm_ffi.registry").list_global_func_names()
    found = [name.split(".")[2] for name in names if name.endswith(".init_ccl")]
    return next((name for name in found if name not in ("nccl", "rccl")), None)


if __name__ == "__main__":
    load()
    register_functions()
    importlib.import_module("tvm.exec.disco_worker").main()
