"""The controller's side of a session: one ordered stream of commands, replies, failures.

Worker 0 runs its half of each command on the thread that publishes it, right after it has been
handed to the channel. One lock covers both.
"""

from __future__ import annotations

import contextlib
import itertools
import numbers
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import native, pickling, registry
from .codec import HAS_BUFFERS, Part, assemble, decode_value, encode_value
from .dref import DRef
from .errors import DiscoError, DiscoTimeout, Failure, SessionClosedError, WorkerError
from .interrupt import ControllerInterrupts
from .protocol import (
    ALL,
    Command,
    DiscoAction,
    Reply,
    decode_command,
    decode_reply,
    decode_reply_value,
    encode_command,
    payload_offset,
    reply_number,
)
from .transport.arrival import name_workers
from .transport.atomic import try_lock
from .worker import Worker, current_worker, forget_old_codes

if TYPE_CHECKING:
    from .output import WorkerOutput
    from .transport.channel import ControllerChannel
    from .transport.wait import Waiter
    from .transport.watch import Watcher

__all__ = ["Controller"]

#: When one worker reports a failure, the others are asked for theirs, and waited for so long.
PATIENCE = 1.0

#: Values that need no copy to be handed out: nobody can change them.
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


class _PythonState:
    """What the native part of a controller does, where there is none."""

    def __init__(self) -> None:
        self.closed = False
        #: Whether a command is on its way out; under the lock only its own thread can see that.
        self._submitting = False
        #: Registers by weak references to their handles, and those of them that have died. Their
        #: call-back is code in C, so that no interrupt can strike in it and be lost.
        self._alive: dict[weakref.ref[DRef], int] = {}
        self._dead: deque[weakref.ref[DRef]] = deque()
        self._registers = itertools.count(1)
        #: Failures that came with replies that nobody waited for any more.
        self._unreported: list[Failure] = []
        self._alone = False
        #: How many commands had failed on the other workers when all were last asked.
        self._failures_seen = 0

    def new_register(self) -> int:
        """Return the number of a register that nobody has used."""
        return next(self._registers)

    def adopt(self, dref: DRef) -> None:
        """Drop the register of `dref` with one of the next commands after `dref` has died."""
        self._alive[weakref.ref(dref, self._dead.append)] = dref.reg_id

    def _dead_registers(self) -> list[int]:
        """Return the registers whose handles have died; `_forget_dead` drops the first ones."""
        return [self._alive.get(ref, 0) for ref in list(self._dead)]

    def _forget_dead(self, count: int) -> None:
        # Registers are numbered once and for all, so one that is reported dead twice, since an
        # interrupt came in here, does no harm; nor does number 0, which none has.
        for _ in range(count):
            self._alive.pop(self._dead[0], None)
            self._dead.popleft()

    def _set_context(self, path: tuple[str, ...], level: int) -> None:
        pass

    def _set_ring(self, ring: object, replies: object) -> None:
        pass

    def _all_left(self, number: int) -> bool:
        """Whether all other workers have left a command."""
        return True

    def _failure_count(self) -> int:
        """Return how many commands have failed on the other workers, where that is known."""
        return 0

    def _all_is_well(self) -> bool:
        """Whether all workers are known to have left all commands, and nothing is to be reported.

        It may wait for some microseconds. False says nothing.
        """
        return False

    def _set_known(
        self, known: Callable[[Any], bytes | None], codes: OrderedDict[bytes, bytes]
    ) -> None:
        pass


if not TYPE_CHECKING and native.core is not None:
    _State = native.core.ControllerState
else:
    _State = _PythonState


class Controller(_State):
    """Publish commands, run worker 0's half, and wait for what workers answer.

    Parameters
    ----------
    channel : ControllerChannel
    make_worker : callable
        Makes worker 0, given the function that takes its replies.
    waiter : Waiter
    output : WorkerOutput
        Labels what worker 0's functions print.
    name : callable
        Gives how error texts call the session.
    """

    def __init__(
        self,
        channel: ControllerChannel,
        make_worker: Callable[[Callable[[Reply], None]], Worker],
        waiter: Waiter,
        output: WorkerOutput,
        name: Callable[[], str],
    ) -> None:
        super().__init__()
        self.channel = channel
        self.worker = make_worker(self._take_reply_of_worker_0)
        self.num_workers = self.worker.info.num_workers
        self._alone = self.num_workers == 1
        self.waiter = waiter
        self.watcher: Watcher | None = None
        self.interrupts = ControllerInterrupts(self._cancel_own_half)
        self.lock = threading.RLock()
        #: Functions sent by value, as the workers remember them.
        self.codes: OrderedDict[bytes, bytes] = OrderedDict()
        self.worker.code_source = self.codes
        self._output = output
        self.name = name
        #: Held by whoever uses the channel to receive.
        self.polling = threading.Lock()
        #: By worker and command number. Worker 0's are decoded already.
        self._replies: dict[tuple[int, int], Reply | memoryview] = {}
        #: Commands whose replies nobody waits for any more.
        self._given_up: set[int] = set()
        self._unreported = []
        self._unreported_dropped = 0
        waiter.add_hook(self._pump)
        if native.core is not None:
            native.core.ControllerState._prepare(
                self,
                self.lock,
                channel,
                self.worker,
                output,
                self.interrupts,
                DRef,
                registry.references,
            )
            self._set_ring(channel.ring, channel.boxes)

    # Publishing -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse use of a closed session, of one of another process, and inside worker functions.

        Raises
        ------
        SessionClosedError
        DiscoError
        """
        if self.closed:
            raise SessionClosedError(f"the session is shut down ({self.name()}): open a new one")
        if self.is_forked():
            raise DiscoError(
                f"{self.name()} belongs to process {os.getppid()}, from which this one was "
                "forked: use the session there"
            )
        if current_worker() is not None:
            raise DiscoError(
                "the session was used inside a worker function: commands come from the controller "
                "alone; return a value, and let the program go on from there"
            )

    @staticmethod
    def is_forked() -> bool:
        """Whether this process has been forked from the controller's."""
        return _forked

    def submit(
        self,
        action: DiscoAction,
        payload: Sequence[Part] = (),
        *,
        flags: int = 0,
        target: int = ALL,
        register: int = 0,
        code: tuple[bytes, bytes] | None = None,
        local: Sequence[Any] | None = None,
    ) -> int:
        """Publish one command and run worker 0's half of it. Return its number.

        Parameters
        ----------
        code : tuple of bytes, optional
            Digest and pickle of the function that the payload brings.
        local : sequence, optional
            The arguments, if worker 0 can take them as they are.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C struck. If the command had been published by then, worker 0's half has failed,
            and the others are told to cancel theirs.
        """
        with self.lock:
            self.check()
            if self._submitting:
                raise DiscoError(
                    "the session was used in the middle of one of its own commands, by a signal "
                    "handler or a finaliser: let that set a flag, and use the session later"
                )
            self._submitting = True
            try:
                return self._submit(action, payload, flags, target, register, code, local)
            finally:
                self._submitting = False

    def _submit(
        self,
        action: DiscoAction,
        payload: Sequence[Part],
        flags: int,
        target: int,
        register: int,
        code: tuple[bytes, bytes] | None,
        local: Sequence[Any] | None,
    ) -> int:
        kills = self._dead_registers()
        channel, worker = self.channel, self.worker
        number = channel.published + 1
        message = encode_command(number, action, payload, flags, target, register, kills)
        channel.reserve(len(message))
        self.interrupts.hit = False
        try:
            channel.publish(number, target, message)
            self._forget_dead(len(kills))
            if code is not None:
                self._remember(*code)
            if local is None:
                command = self._own_copy(message, flags)
            else:
                offset = payload_offset(kills)
                command = Command(
                    number,
                    action,
                    flags,
                    target,
                    register,
                    kills,
                    memoryview(message)[offset:],
                    offset,
                    local,
                )
            if action is DiscoAction.CALL_PACKED:
                try:
                    self._output.enter()
                    error = worker.execute(command)
                finally:
                    self._output.leave()
            else:
                error = worker.execute(command)
        except BaseException as e:
            self._recover(number, message, e)
            raise
        if error is not None:
            self._after_failure(error)
        return number

    def _recover(self, number: int, message: bytes, error: BaseException) -> None:
        """Bring worker 0 to where the others will be, after an interrupt in between."""
        self._output.give_back()
        if self.channel.published == number and self.worker.finished != number:
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted:
                self.worker.interrupted_through = number
            self.worker.abandon(decode_command(message), error)
            if interrupted:
                self._interrupt_workers()

    def _after_failure(self, error: BaseException) -> None:
        """Raise what is not just worker 0's failure, but an interrupt of the whole program."""
        if isinstance(error, KeyboardInterrupt) and self.interrupts.hit:
            self._interrupt_workers()
            raise error  # where it struck shows in its traceback

    @staticmethod
    def _own_copy(message: bytes, flags: int) -> Command:
        """Decode the command for worker 0, whose arrays must be writable and nobody else's."""
        if not flags & HAS_BUFFERS:
            return decode_command(message)
        return decode_command(memoryview(bytearray(message)))

    def _remember(self, digest: bytes, code: bytes) -> None:
        if digest in self.codes:
            self.codes.move_to_end(digest)
        else:
            self.codes[digest] = code
            forget_old_codes(self.codes, len)

    def _cancel_own_half(self) -> None:
        if self.worker.running:
            self.worker.interrupted_through = self.worker.number

    def _interrupt_workers(self) -> None:
        if self.watcher is not None:
            self.watcher.interrupt()

    # Waiting --------------------------------------------------------------------------------------

    def _pump(self, idle: bool) -> None:
        # While another thread publishes or runs worker 0's half, both planes are that thread's.
        got: list[bool] = []
        try:
            try_lock(self.lock, got)
            if got[0] and not self.closed:
                self.channel.pump()
                self.worker.ccl.pump(idle and current_worker() is None)
        finally:
            if got and got[0]:
                self.lock.release()

    def _take_reply_of_worker_0(self, reply: Reply) -> None:
        reply.value = copy_value(reply.value)
        self._record(0, reply.number, reply)

    def _record(self, worker: int, number: int, reply: Reply | memoryview) -> None:
        if number in self._given_up:
            self._keep_failures(decode_reply(reply) if isinstance(reply, memoryview) else reply)
        else:
            self._replies[worker, number] = reply

    def _keep_failures(self, reply: Reply) -> None:
        self._unreported += reply.failures
        self._unreported_dropped += reply.dropped

    def _poll(self) -> None:
        """Record the replies that have come. Threads that wait at the same time take turns."""
        got: list[bool] = []
        try:
            try_lock(self.polling, got)
            if not got[0] or self.closed:
                return
            queue = self.channel.poll()
            while queue:
                worker, message = queue[0]
                self._record(worker, reply_number(message), message)
                queue.popleft()
        finally:
            if got and got[0]:
                self.polling.release()

    def wait(self, number: int, workers: Sequence[int], timeout: float | None) -> dict[int, Reply]:
        """Wait for the replies of `workers` to a command.

        Raises
        ------
        DiscoTimeout
            Some have not replied in time; it names them.
        """

        def missing() -> list[int]:
            return [i for i in workers if (i, number) not in self._replies]

        def complete() -> bool:
            self._poll()
            if not missing():
                return True
            if self.closed:
                raise SessionClosedError(f"the session was shut down meanwhile ({self.name()})")
            return False

        def what() -> str:
            return f"{name_workers(missing())} to reply to command {number}"

        try:
            self.waiter.until(complete, what, timeout=timeout, idle=True)
        except BaseException as e:
            self._given_up.add(number)
            for i in workers:
                reply = self._replies.pop((i, number), None)
                if reply is not None:
                    self._record(i, number, reply)
            if isinstance(e, KeyboardInterrupt):
                self._interrupt_workers()
            raise
        replies = {}
        for i in workers:
            reply = self._replies.pop((i, number))
            replies[i] = decode_reply(reply) if isinstance(reply, memoryview) else reply
        return replies

    def sync(self, timeout: float | None) -> None:
        """Wait until all workers have left all commands; see `ask`."""
        check_timeout(timeout)
        if self._all_is_well():
            return
        start = time.monotonic()
        if self.channel.ring is not None:
            # Nobody needs to be asked for what stands in the status lines.
            self.check()
            self._wait_for_all(timeout)
            if self._all_is_well():
                return
        self.ask(
            DiscoAction.SYNC_WORKER,
            timeout=timeout and max(0.0, timeout - (time.monotonic() - start)),
        )

    def _wait_for_all(self, timeout: float | None) -> None:
        number = self.channel.published

        def what() -> str:
            late = (i for i, left in enumerate(self.channel.executed(), 1) if left < number)
            return f"{name_workers(list(late))} to leave command {number}"

        try:
            self.waiter.until(lambda: self._all_left(number), what, timeout=timeout, idle=True)
        except KeyboardInterrupt:
            self._interrupt_workers()
            raise

    def ask(
        self,
        action: DiscoAction,
        *,
        target: int = ALL,
        register: int = 0,
        timeout: float | None = None,
    ) -> dict[int, Any]:
        """Publish a command that asks, wait for the answers, and raise what has failed.

        Returns
        -------
        dict
            The values by worker.

        Raises
        ------
        WorkerError
            Commands failed on the workers concerned.
        DiscoTimeout
            Some have not replied in time.
        """
        check_timeout(timeout)
        start = time.monotonic()
        seen = self._failure_count()
        number = self.submit(action, target=target, register=register)
        workers = range(self.num_workers) if target == ALL else (target,)
        replies = self.wait(number, workers, timeout)
        if target == ALL:
            self._failures_seen = seen
        self._raise_failures(replies, timeout and timeout - (time.monotonic() - start))
        return {i: self._value(i, reply) for i, reply in replies.items()}

    @staticmethod
    def _value(worker: int, reply: Reply) -> Any:
        if worker == 0:
            return reply.value
        try:
            return decode_reply_value(*reply.value)
        except Exception as e:
            raise DiscoError(
                f"the value that worker {worker} sent cannot be unpickled here: "
                f"{type(e).__name__}: {e}"
            ) from e

    def _finish_get(self, number: int, worker: int) -> Any:
        """Wait for a worker's answer to what the native module has asked; see `ask`."""
        replies = self.wait(number, (worker,), None)
        self._raise_failures(replies, None)
        return self._value(worker, replies[worker])

    # Failures -------------------------------------------------------------------------------------

    def take_failures(self, replies: Iterable[Reply]) -> WorkerError | None:
        """Return one error for all that has not been reported, and count it as reported."""
        failures, dropped = self._unreported, self._unreported_dropped
        self._unreported, self._unreported_dropped = [], 0
        for reply in replies:
            failures = failures + reply.failures
            dropped += reply.dropped
            if reply.failure is not None:
                failures.append(reply.failure)
        if not failures:
            return None
        # A failed register's own failure may be among those that its worker has not reported.
        distinct = {(f.worker_id, f.command, f.type, f.message): f for f in failures}
        error = WorkerError(list(distinct.values()), dropped)
        error.__cause__ = _unpickle(error.failures[0])
        return error

    def _raise_failures(self, replies: dict[int, Reply], timeout: float | None) -> None:
        known = list(replies.values())
        failed = self._unreported or any(r.failure or r.failures for r in known)
        if failed and len(replies) < self.num_workers:
            # The cause may lie with a worker that was not asked, and its peers' failures are
            # consequences that nobody should have to hear of one by one.
            patience = PATIENCE if timeout is None else max(0.0, min(timeout, PATIENCE))
            number = self.submit(DiscoAction.SYNC_WORKER)
            # What the others have to report and do not in time, the next sync point will hear.
            with contextlib.suppress(DiscoTimeout):
                known += self.wait(number, range(self.num_workers), patience).values()
        error = self.take_failures(known)
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback refers to this frame, and so to the session: no cycle.
            del error

    def add_failures(self, replies: Iterable[Reply]) -> None:
        """Keep the failures of replies for the next sync point."""
        for reply in replies:
            self._keep_failures(reply)


def check_timeout(timeout: Any) -> None:
    """Refuse what is no time limit.

    Raises
    ------
    TypeError, ValueError
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout is a number of seconds or None, not {timeout!r}")
    if not float(timeout) >= 0:
        raise ValueError(f"timeout={timeout!r}: give a number of seconds from 0, or None")


def copy_value(value: Any) -> Any:
    """Return a copy of a value as another process would get it.

    Raises
    ------
    Exception
        Whatever pickling the value raises.
    """
    if type(value) in _IMMUTABLE:
        return value
    parts, flags = encode_value(value)
    message = assemble(parts)
    # Only what has out-of-band buffers needs memory of its own.
    return decode_value(memoryview(bytearray(message)) if flags else memoryview(message))


def _unpickle(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        cause = pickling.loads(failure.pickled)
    except BaseException:
        return None  # whatever its class does when it is loaded; its text is in the failure
    return cause if isinstance(cause, BaseException) else None
