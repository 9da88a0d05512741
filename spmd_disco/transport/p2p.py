"""Messages between two workers.

A send never waits: its header, with the data where that is small, and a private copy of larger data
are lent to MPI, and given back in later `progress`. A receiver sees headers as they come and takes
the data of the oldest.

What a receiver waits for may never come. After a short while it asks the sender, once, by a message
on the same tag as the headers. The sender answers when it has left the command; as MPI keeps the
order, the answer arrives behind all that was sent before.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import PeerError
from .arrival import (
    Operation,
    Record,
    State,
    letter_text,
    peer_text,
    same_dtype_and_count,
    signature,
)
from .atomic import Step, post
from .layout import Array, as_bytes, packed
from .wait import Waiter

__all__ = ["Mailbox"]

TAG_HEADER = 11
TAG_DATA = 12
#: Data up to this many bytes travels with its header.
SMALL = 4096
#: The most bytes in one message of data.
MOST_BYTES = 1 << 30
#: A receiver asks after so many seconds.
ASK_AFTER = 1e-3
#: Commands that failed here, remembered for messages of theirs that come late.
MOST_FAILED = 65536


class _Kind(IntEnum):
    """What a message is."""

    SEND = 1
    #: Tell me when you have left this command.
    ASK = 2
    #: It failed here, or was left.
    FAILED = 3
    LEFT = 4
    #: The last message of this sender.
    END = 5


#: Kind, command, bytes of data that follow.
_HEAD = struct.Struct("<Bxxxxxxxqq")
_SIGNATURE_SIZE = len(signature(Operation.SEND, None, np.dtype(np.int8), ()))
_HEADER_SIZE = _HEAD.size + _SIGNATURE_SIZE


class _Letter:
    """A message that has come, as far as its header."""

    __slots__ = ("command", "data", "nbytes", "signature")

    def __init__(self, command: int, nbytes: int, signature: bytes, data: bytes | None) -> None:
        self.command = command
        self.nbytes = nbytes
        self.signature = signature
        #: None for large data, which has a message of its own.
        self.data = data


class Mailbox:
    """All messages of one worker.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Its ranks are the worker ids.
    waiter : Waiter
    """

    def __init__(self, comm: MPI.Intracomm, waiter: Waiter) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._waiter = waiter
        #: Sends that MPI may still read from, headers that are coming, and large data that is.
        self._lent: deque[tuple[Any, object]] = deque()
        self._headers: deque[tuple[Any, tuple[int, bytearray]]] = deque()
        self._data: deque[tuple[Any, object]] = deque()
        self._inbox: list[deque[_Letter]] = [deque() for _ in range(self.size)]
        #: The newest command that each worker is known to have left, and how.
        self._gone = [Record(State.LEFT, 0, -1)] * self.size
        #: The newest command for which each worker has asked and has no answer.
        self._asked: dict[int, int] = {}
        self._failed: OrderedDict[int, None] = OrderedDict()
        self._left = -1
        self._ended: list[bool] = []
        self._ends: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether `progress` may have something to do."""
        return bool(self._lent or self._headers or self._data or self._asked)

    # Sending --------------------------------------------------------------------------------------

    def send(self, worker: int, command: int, array: Array) -> None:
        """Send `array` to another worker."""
        head = _HEAD.pack(_Kind.SEND, command, array.nbytes) + signature(
            Operation.SEND, None, array.dtype, array.shape
        )
        if array.nbytes <= SMALL:
            self._post_header(worker, head + packed(array).tobytes())
            return
        copy = as_bytes(packed(array))
        if np.may_share_memory(copy, array):
            copy = copy.copy()
        parts = [copy[at : at + MOST_BYTES] for at in range(0, copy.size, MOST_BYTES)]
        steps = [partial(self.comm.Isend, (head, len(head), MPI.BYTE), worker, TAG_HEADER)]
        steps += [partial(self.comm.Isend, (p, p.size, MPI.BYTE), worker, TAG_DATA) for p in parts]
        post(steps, (head, *parts), self._lent)
        self._give_back()

    def _post_header(self, worker: int, message: bytes) -> None:
        step = partial(self.comm.Isend, (message, len(message), MPI.BYTE), worker, TAG_HEADER)
        post((step,), (message,), self._lent)
        self._give_back()

    def _give_back(self) -> None:
        self._lent = deque(entry for entry in self._lent if not entry[0].Test())

    # Receiving ------------------------------------------------------------------------------------

    def receive(self, worker: int, command: int, array: Array, what: Callable[[], str]) -> None:
        """Receive the oldest message from another worker into `array`.

        Raises
        ------
        ValueError
            The message has another dtype or element count.
        PeerError
            There is none, and none will come in this command.
        """
        start = time.perf_counter()
        asked = False

        def come() -> bool:
            nonlocal asked
            self._take_in()
            if self._next_letter(worker, command) is not None:
                return True
            if self._gone[worker].left >= command:
                return True
            if not asked and time.perf_counter() - start > ASK_AFTER:
                asked = True
                self._post_header(
                    worker, _HEAD.pack(_Kind.ASK, command, 0) + bytes(_SIGNATURE_SIZE)
                )
            return False

        self._waiter.until(come, what)
        letter = self._next_letter(worker, command)
        if letter is None:
            raise PeerError(peer_text(worker, self._gone[worker], command, what()))
        expected = signature(Operation.SEND, None, array.dtype, array.shape)
        if not same_dtype_and_count(letter.signature, expected):
            self._drop(worker)
            raise ValueError(letter_text(worker, letter.signature, self.rank, expected))
        if letter.data is not None:
            data = np.frombuffer(letter.data, np.uint8)
            _put(array, data)
            self._inbox[worker].popleft()
            return
        staging = np.empty(letter.nbytes, np.uint8)
        self._receive_data(worker, staging)
        self._waiter.until(lambda: self._received(staging), what)
        _put(array, staging)

    def _next_letter(self, worker: int, command: int) -> _Letter | None:
        """Return the oldest message that may be taken in `command`; drop those of failed ones."""
        box = self._inbox[worker]
        while box and box[0].command in self._failed:
            self._drop(worker)
        return box[0] if box and box[0].command <= command else None

    def _drop(self, worker: int) -> None:
        letter = self._inbox[worker][0]
        if letter.data is not None:
            self._inbox[worker].popleft()
        else:
            self._receive_data(worker, np.empty(letter.nbytes, np.uint8))

    def _receive_data(self, worker: int, staging: Array) -> None:
        """Start to receive the large data of the oldest message, and take its header away.

        Data is received in the order of the headers, so that it is the right one.
        """
        parts = [staging[at : at + MOST_BYTES] for at in range(0, staging.size, MOST_BYTES)]
        steps: list[Step] = [
            partial(self.comm.Irecv, (part, part.size, MPI.BYTE), worker, TAG_DATA)
            for part in parts
        ]
        post(steps, [staging] * len(parts), self._data, partial(self._inbox[worker].popleft))

    def _received(self, staging: Array) -> bool:
        self._data = deque(entry for entry in self._data if not entry[0].Test())
        return all(buffer is not staging for _, buffer in self._data)

    # Progress -------------------------------------------------------------------------------------

    def progress(self, left: int) -> None:
        """Bring everything forward; `left` is the newest command that this worker has left."""
        self._left = max(self._left, left)
        if self._lent:
            self._give_back()
        if self._data:
            self._data = deque(entry for entry in self._data if not entry[0].Test())
        self._take_in()
        if self._asked:
            self.answer(self._left)

    def _take_in(self) -> None:
        """Receive the headers that have come."""
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, TAG_HEADER, status):
            worker = status.Get_source()
            message = bytearray(status.Get_count(MPI.BYTE))
            step = partial(self.comm.Irecv, (message, len(message), MPI.BYTE), worker, TAG_HEADER)
            post((step,), ((worker, message),), self._headers)
        while self._headers:
            request, (worker, message) = self._headers[0]
            if not request.Test():
                break
            self._open(worker, message)

    def _open(self, worker: int, message: bytearray) -> None:
        """Handle the oldest header; as a whole or, when interrupted, not at all."""
        code, command, nbytes = _HEAD.unpack_from(message)
        kind = _Kind(code)
        done = self._headers.popleft
        if kind is _Kind.SEND:
            self._gone_at_least(worker, Record(State.LEFT, 0, command - 1))
            data = bytes(message[_HEADER_SIZE:]) if nbytes <= SMALL else None
            letter = _Letter(command, nbytes, bytes(message[_HEAD.size : _HEADER_SIZE]), data)
            # Two calls in one: it must be neither lost nor there twice.
            post((partial(self._inbox[worker].append, letter),), (None,), deque(), partial(done))
            return
        if kind is _Kind.ASK:
            self._asked[worker] = max(command, self._asked.get(worker, -1))
        elif kind is _Kind.END:
            self._ends.add(worker)
        else:
            self._gone_at_least(
                worker, Record(State.FAILED if kind is _Kind.FAILED else State.LEFT, 0, command)
            )
        done()

    def _gone_at_least(self, worker: int, record: Record) -> None:
        if record.left > self._gone[worker].left:
            self._gone[worker] = record

    def answer(self, left: int) -> None:
        """Answer those who have asked about a command up to `left`."""
        for worker, command in list(self._asked.items()):
            # After the last message of ours nothing may follow.
            if command > left or self._ended:
                continue
            # What is said of a later command must not pass that one's failure off as leaving it.
            about = command if command in self._failed else left
            kind = _Kind.FAILED if about in self._failed else _Kind.LEFT
            message = _HEAD.pack(kind, about, 0) + bytes(_SIGNATURE_SIZE)
            step = partial(self.comm.Isend, (message, len(message), MPI.BYTE), worker, TAG_HEADER)
            post((step,), (message,), self._lent, partial(self._asked.pop, worker, None))

    def fail(self, command: int) -> None:
        """Note that `command` failed here: its messages are void, and who asks is told."""
        self._failed[command] = None
        if len(self._failed) > MOST_FAILED:
            self._failed.popitem(last=False)
        self._left = max(self._left, command)
        if self._asked:
            self.answer(self._left)

    # The end --------------------------------------------------------------------------------------

    def close(self, what: Callable[[], str]) -> None:
        """Exchange last messages with all workers, and drop what nobody has received."""
        others = [i for i in range(self.size) if i != self.rank]
        if not self._ended:
            message = _HEAD.pack(_Kind.END, 0, 0) + bytes(_SIGNATURE_SIZE)
            steps = [
                partial(self.comm.Isend, (message, len(message), MPI.BYTE), worker, TAG_HEADER)
                for worker in others
            ]
            post(steps, [message] * len(steps), self._lent, partial(self._ended.append, True))

        def ended() -> bool:
            self._take_in()
            for worker in others:
                while self._inbox[worker]:
                    self._drop(worker)
            self._give_back()
            self._data = deque(entry for entry in self._data if not entry[0].Test())
            return len(self._ends) == len(others) and not (self._lent or self._data)

        self._waiter.until(ended, what)


def _put(array: Array, data: Array) -> None:
    """Copy the bytes `data` into `array`, in C order."""
    if array.nbytes:
        array[...] = data.view(array.dtype).reshape(array.shape)
