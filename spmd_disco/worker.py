"""A worker: its register file, and the interpreter of commands.

A worker knows neither the session nor where its commands come from. What a command raises does not
stop it: the failure goes to a bounded list that the controller asks for, and the command's register
holds the failure from then on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from . import native, pickling, registry
from .codec import (
    REGISTER_REFERENCE_SIZE,
    FunctionKind,
    RegisterRef,
    decode_arguments,
    decode_function,
    decode_value,
    register_reference,
)
from .copying import copy_array
from .device import Device
from .errors import DiscoError, Failure, InheritedFailure
from .failures import describe_failure, function_name, total
from .protocol import ALL, Command, DiscoAction, Reply
from .transport.layout import viewed

if TYPE_CHECKING:
    from mpi4py import MPI

    from .transport.ccl import CCL
    from .transport.peer_memory import PeerMemory

__all__ = [
    "CODE_CACHE",
    "Failed",
    "Worker",
    "WorkerInfo",
    "current_worker",
    "forget_old_codes",
    "get_worker",
    "this_worker",
]

#: Failures that a worker keeps until the controller asks.
MAX_FAILURES = 64
#: Functions sent by value that both sides remember; the oldest is forgotten on both alike.
CODE_CACHE = 256
#: Their bytes altogether.
CODE_CACHE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class WorkerInfo:
    """Who a worker is; what `get_worker` returns.

    Attributes
    ----------
    worker_id, num_workers : int
        Worker i is rank i of the session's communicator.
    num_groups, group_id, group_size : int
        Groups are equal blocks of consecutive workers.
    device : Device
        The worker's default device.
    comm, group_comm : mpi4py.MPI.Intracomm
        Communicators for the user's own calls, over all workers and over the group's;
        ``comm.rank == worker_id``.
    """

    worker_id: int
    num_workers: int
    num_groups: int
    device: Device
    comm: MPI.Intracomm = field(repr=False)
    group_comm: MPI.Intracomm = field(repr=False)

    @property
    def group_size(self) -> int:
        return self.num_workers // self.num_groups

    @property
    def group_id(self) -> int:
        return self.worker_id // self.group_size


def forget_old_codes(codes: OrderedDict[bytes, Any], size_of: Callable[[Any], int]) -> None:
    """Drop the oldest functions above the bounds; controller and workers drop the same."""
    total_size = sum(map(size_of, codes.values()))
    while len(codes) > CODE_CACHE or (total_size > CODE_CACHE_BYTES and len(codes) > 1):
        total_size -= size_of(codes.popitem(last=False)[1])


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that a worker function has forked and that has come out of the function.

    It would go on as a second worker, over the same MPI.
    """
    if error is not None:
        traceback.print_exception(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0 if error is None else 1)


class Failed:
    """The content of a register whose command failed."""

    __slots__ = ("failure",)

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class _Current(threading.local):
    worker: Worker | None = None


_current = _Current()


def current_worker() -> Worker | None:
    """Return the worker whose function runs in this thread, or None."""
    return _current.worker


def _set_current(worker: Worker | None) -> Worker | None:
    """Change what `current_worker` returns in this thread; return what it was."""
    previous, _current.worker = _current.worker, worker
    return previous


class _PythonState:
    """What the native part of a worker does, where there is none."""

    def step(self, message: bytes | memoryview) -> bool:
        """Run the command in `message` if it is a plain call that needs nothing of Python's.

        Returns
        -------
        bool
            Whether it has been run; else `Worker.execute` is to do it.
        """
        return False

    def drain(self, ring: object, replies: object, once: bool) -> bool | None:
        """Run the plain calls that come through a ring.

        Returns
        -------
        bool or None
            None when no more comes for a while, False when the next message is not a plain call,
            and, if asked to stop after each, True after one.
        """
        return None

    def set_node(self, node: object) -> None:
        """Keep the status line in this memory up to date."""

    def _tell_begin(self, number: int) -> None:
        """Say in the status line that a function is called."""

    def _tell_left(self, number: int, failed: bool) -> None:
        """Say in the status line that a command is over."""


if not TYPE_CHECKING and native.core is not None:
    current_worker = native.core.current_worker
    _set_current = native.core.set_current_worker
    native.core.set_failed_type(Failed)
    _State = native.core.WorkerState
else:
    _State = _PythonState


def get_worker() -> WorkerInfo:
    """Return who the worker is that runs the calling function.

    Raises
    ------
    DiscoError
        The calling thread runs no worker function.
    """
    worker = current_worker()
    if worker is None:
        raise DiscoError(
            "there is no current worker here: get_worker() works in a function that a session "
            "calls on its workers, in the thread that runs it"
        )
    return worker.info


def this_worker() -> Worker:
    """Return the worker whose function runs in this thread.

    Raises
    ------
    DiscoError
        There is none.
    """
    worker = current_worker()
    if worker is None:
        raise DiscoError(
            "there is no current worker here: the runtime.disco functions work in a function that "
            "a session calls on its workers, in the thread that runs it"
        )
    return worker


class Worker(_State):
    """One worker of a session.

    Parameters
    ----------
    info : WorkerInfo
    ccl : CCL
        The data plane.
    reply : callable
        Takes a `Reply` and sends it to the controller; raises when the value cannot be sent.
    on_command : callable, optional
        Called after each command that ran a function.
    """

    #: Where its arrays go, if not into ordinary memory; set by whoever opens the session.
    memory: PeerMemory | None = None
    #: Whether it is in the controller's process, without being worker 0.
    is_thread = False

    def __init__(
        self,
        info: WorkerInfo,
        ccl: CCL,
        reply: Callable[[Reply], None],
        on_command: Callable[[], None] | None = None,
    ) -> None:
        self.info = info
        self.ccl = ccl
        self.registers: dict[int, Any] = {}
        self.functions = registry.functions
        self._worker_id = info.worker_id
        self._begin = ccl.begin
        self._leave = ccl.leave
        #: The command that runs or ran last, and the last that has been left.
        self.number = 0
        self.finished = 0
        #: What it calls; a name, or the callable.
        self.function: Any = None
        #: Whether a worker function is running, so that an interrupt may strike.
        self.running = False
        #: Commands up to this one are cancelled by an interrupt of the controller.
        self.interrupted_through = 0
        #: The thread that runs a worker function now.
        self.thread = 0
        #: Failures by command, for whoever asks why a peer does not come; bounded.
        self.recent_failures: OrderedDict[int, Failure] = OrderedDict()
        self.closed = False
        self.host = socket.gethostname()
        self._pid = os.getpid()
        self._failures: list[Failure] = []
        self._dropped = 0
        self._codes: OrderedDict[bytes, list[Any]] = OrderedDict()
        #: Code that was sent, by digest, in case an interrupt kept it out of `_codes`.
        self.code_source: dict[bytes, bytes] | None = None
        self._reply = reply
        self._on_command = on_command
        self._actions: dict[DiscoAction, Callable[[Command], None]] = {
            DiscoAction.SHUT_DOWN: self._shut_down,
            DiscoAction.KILL_REG: lambda command: None,
            DiscoAction.GET_GLOBAL_FUNC: self._get_global_func,
            DiscoAction.CALL_PACKED: self._call,
            DiscoAction.SYNC_WORKER: self._sync,
            DiscoAction.COPY_FROM_WORKER0: self._copy_from,
            DiscoAction.COPY_TO_WORKER0: self._copy_to,
            DiscoAction.DEBUG_GET_FROM_REMOTE: self._get,
            DiscoAction.DEBUG_SET_REGISTER: self._set,
        }

    # The interpreter ------------------------------------------------------------------------------

    def execute(self, command: Command) -> BaseException | None:
        """Run one command. Return the exception that it failed with, if any."""
        for register in command.kills:
            self.registers.pop(register, None)
        if command.target not in (ALL, self.info.worker_id):
            return None
        self.number = command.number
        self.ccl.begin(command.number)
        previous = _set_current(self)
        try:
            self._actions[command.action](command)
        except BaseException as e:
            self._fail(command, e)
            # Not in the `finally`: an interrupt in _fail must not pass for the end of the command.
            self.finished = command.number
            self._is_over(command.number, True)
            return e
        finally:
            self.running = False
            self.function = None
            _set_current(previous)
        self.finished = command.number
        self._is_over(command.number, False)
        return None

    def abandon(self, command: Command, error: BaseException) -> None:
        """Count a command as failed that was published but not, or not wholly, run here."""
        self.running = False
        self.function = None
        _set_current(None)
        for register in command.kills:
            self.registers.pop(register, None)
        self.number = command.number
        self.ccl.begin(command.number)
        self._fail(command, error)
        self.finished = command.number
        self._is_over(command.number, True)

    def _is_over(self, command: int, failed: bool) -> None:
        self._tell_left(command, failed)
        if self._leave is not None:
            self._leave(command)

    def lookup(self, register: int) -> Any:
        """Return the value of a register.

        Raises
        ------
        InheritedFailure
            The command that should have set it failed.
        DiscoError
            The register was never set here.
        """
        try:
            value = self.registers[register]
        except KeyError:
            raise DiscoError(
                f"register {register} is not set on worker {self.info.worker_id}"
            ) from None
        if type(value) is Failed:
            f = value.failure
            raise InheritedFailure(
                f"not run: register {register} holds the failure of command {f.command} "
                f"({f.function}): {f.type}: {f.message[:500]}"
            )
        return value

    # Actions --------------------------------------------------------------------------------------

    def _call(self, command: Command) -> None:
        function, end = self._function(command.payload)
        if callable(function):
            self.function = function
        if command.number <= self.interrupted_through:
            raise KeyboardInterrupt
        kwargs: dict[str, Any] = {}
        if command.local is not None:
            args: Sequence[Any] = [
                self.lookup(arg.id) if type(arg) is RegisterRef else arg for arg in command.local
            ]
        else:
            args, kwargs = decode_arguments(
                command.payload[end:], command.offset + end, self.lookup
            )
        if not callable(function):
            raise TypeError(f"{function!r} is not callable")
        self._tell_begin(command.number)
        self.thread = threading.get_ident()
        self.running = True
        try:
            value = function(*args, **kwargs)
        finally:
            self.running = False
            if os.getpid() != self._pid:
                _end_child(sys.exc_info()[1])
            if self._on_command is not None:
                self._on_command()
        self.registers[command.register] = value

    def _get_global_func(self, command: Command) -> None:
        function, _ = self._function(command.payload)
        self.registers[command.register] = function

    def _function(self, payload: memoryview) -> tuple[Any, int]:
        """Return the callable that a reference means, and where the payload goes on."""
        register = register_reference(payload)
        if register is not None:
            self.function = register
            return self.lookup(register), REGISTER_REFERENCE_SIZE
        kind, data, code, end = decode_function(payload)
        # Known before it is found, so that a failure to find it can name it.
        self.function = data
        if kind == FunctionKind.IMPORT:
            assert isinstance(data, str)
            function = registry.import_path(data)
            registry.keep_import(bytes(payload[:end]), data, function)
            return function, end
        if kind == FunctionKind.GLOBAL:
            assert isinstance(data, str)
            definition, _, _, _ = decode_function(payload, end)
            if definition == FunctionKind.NONE:
                function = registry.get_global_func(data, allow_missing=True)
                if function is None:
                    function = registry.resolve(data)
                elif not registry.is_foreign(data):
                    registry.functions[bytes(payload[: end + 1])] = function
                return function, end + 1
            function, size = self._function(payload[end:])
            publish = type(function) is registry.Published
            if publish:
                function = function.function
            # In the controller's process its own registration serves.
            elsewhere = self.info.worker_id != 0 and not self.is_thread
            if elsewhere or registry.get_global_func(data, True) is None:
                registry.register_func(data, function, override=True, publish=publish)
            self.function = data
            return registry.get_global_func(data), end + size
        assert isinstance(data, bytes)
        return self._code(data, code), end

    def _code(self, digest: bytes, code: memoryview | None) -> Any:
        entry = self._codes.get(digest)
        if entry is None:
            if code is None and self.code_source is not None:
                code = memoryview(self.code_source[digest])
            entry = self._codes[digest] = [code and bytes(code), None, len(code or b"")]
            forget_old_codes(self._codes, itemgetter(2))
        else:
            self._codes.move_to_end(digest)
        if entry[1] is None:
            if entry[0] is None:
                raise DiscoError("a function is called by value whose code never came")
            self.function = "a function sent by value"
            entry[1] = pickling.loads(entry[0])
            entry[0] = None
        return entry[1]

    def _sync(self, command: Command) -> None:
        self.ccl.sync_worker()
        self._answer(Reply(command.number))

    def _get(self, command: Command) -> None:
        value = self.registers.get(command.register)
        if type(value) is Failed:
            self._answer(Reply(command.number, failure=value.failure))
            return
        self.function = "get"
        try:
            value = self.lookup(command.register)
            self.ccl.sync_worker()
            self._answer(Reply(command.number, value))
        except BaseException as e:
            if not isinstance(e, DiscoError):
                kind, why = type(value).__name__, total(str, e)
                e = TypeError(f"the value, of type {kind}, cannot be pickled: {why}")
            # A value that cannot be sent; the reply that says so can.
            self._answer(Reply(command.number, failure=self._describe(command, e)))

    def _set(self, command: Command) -> None:
        self.function = "set"
        copy_into = command.payload[0]
        value = decode_value(command.payload[1:], command.offset + 1)
        target = self.registers.get(command.register)
        if copy_into and isinstance(viewed(target), np.ndarray):
            copy_array(target, value, f"register {command.register}")
        else:
            self.registers[command.register] = value

    def _copy_from(self, command: Command) -> None:
        self._get(command)

    def _copy_to(self, command: Command) -> None:
        self.function = "copy_to_worker_0"
        value = decode_value(command.payload, command.offset)
        copy_array(self.lookup(command.register), value, f"register {command.register}")

    def _shut_down(self, command: Command) -> None:
        self.closed = True
        try:
            self.ccl.close(command.number)
        finally:
            # The controller waits for this whatever happens here.
            self._answer(Reply(command.number))
            self.registers.clear()

    # What the native part asks for ----------------------------------------------------------------

    def _decode_arguments(self, payload: memoryview) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return decode_arguments(payload, 0, self.lookup)

    def _fail_call(self, number: int, register: int, error: BaseException) -> None:
        call = Command(number, DiscoAction.CALL_PACKED, 0, ALL, register, (), memoryview(b""), 0)
        self._fail(call, error)

    def _end_child(self, error: BaseException | None) -> NoReturn:
        _end_child(error)

    # Failures -------------------------------------------------------------------------------------

    def _fail(self, command: Command, error: BaseException) -> None:
        failure = self._describe(command, error)
        if command.action in (DiscoAction.CALL_PACKED, DiscoAction.GET_GLOBAL_FUNC) or (
            command.action == DiscoAction.DEBUG_SET_REGISTER
            and command.register not in self.registers
        ):
            self.registers[command.register] = Failed(failure)
        # Who pressed Ctrl-C knows that what ran then was cancelled, and what waited for it.
        cancelled = command.number <= self.interrupted_through and (
            failure.consequence or isinstance(error, KeyboardInterrupt)
        )
        if len(self._failures) < MAX_FAILURES:
            if not cancelled:
                self._failures.append(failure)
        else:
            self._dropped += not cancelled
        self.recent_failures[command.number] = failure
        if len(self.recent_failures) > MAX_FAILURES:
            self.recent_failures.popitem(last=False)
        self.ccl.fail(command.number)

    def _describe(self, command: Command, error: BaseException) -> Failure:
        return describe_failure(
            error, self.info.worker_id, self.host, function_name(self.function), command.number
        )

    def _answer(self, reply: Reply) -> None:
        reply.failures, reply.dropped = self._failures, self._dropped
        self._reply(reply)
        self._failures, self._dropped = [], 0
