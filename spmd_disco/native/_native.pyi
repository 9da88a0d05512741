"""The native module's interface. Sizes and offsets are in bytes."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, final

from typing_extensions import Buffer

SEGMENT_HEADER: int
#: The codes of the dtypes that `reduce` knows, by NumPy's and ml_dtypes' names.
DTYPES: dict[str, int]
#: The levels of the processor's instructions that `reduce` can use here, the best one last.
LEVELS: tuple[str, ...]

def reduce(
    dtype: int,
    kind: int,
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    /,
    *,
    stream: bool = ...,
    level: int = ...,
) -> None:
    """Combine the inputs, element by element and in their order, into every output.

    Parameters
    ----------
    dtype : int
        One of `DTYPES`.
    kind : int
        The value of a `ReduceKind`.
    inputs, outputs : sequence of buffer
        Contiguous, all of the same size, aligned or not. An output is one of the inputs, or
        overlaps with nothing.
    stream : bool
        Write around this processor's caches: right for more than they hold, and for what other
        processors will read.
    level : int
        An index of `LEVELS`; by default the last.

    Raises
    ------
    TypeError
        The dtype has no such reduction.
    ValueError
        The sizes differ, an output overlaps with what it may not, or there is no such level.
    BufferError
        A buffer is not contiguous, or an output cannot be written.
    """

def end_with_parent(parent: int, /) -> None:
    """End this process and its process group as soon as its parent has ended, or at once.

    Parameters
    ----------
    parent : int
        The process id of the parent.

    Raises
    ------
    OSError
        No thread can be started for it.
    """

def copy(dst: Buffer, src: Buffer, /, *, stream: bool = ...) -> None:
    """Copy all bytes of `src` into `dst`.

    Parameters
    ----------
    dst, src : buffer
        Contiguous, of the same size, without overlap.
    stream : bool
        As in `reduce`.

    Raises
    ------
    ValueError
        The sizes differ, or the buffers overlap.
    """

@final
class Segment:
    """Memory that processes of one node share; a writable buffer of bytes.

    Attributes
    ----------
    fd : int
        Its file descriptor in this process, which peers open as ``/proc/PID/fd/FD``.
    named : bool
        Whether it has been made with a name, by which peers find it as well.
    nonce : bytes
        The random bytes at its start that prove to a peer that it has the right memory.
    address : int
        Where it lies in this process.
    """

    @classmethod
    def create(cls, size: int, reserved: int = ..., named: bool = ..., /) -> Segment:
        """Return new memory of `size` bytes, zero throughout, `reserved` of them backed at once.

        It has a name in ``/dev/shm`` if `named`, or if the system has no memory without one.

        Raises
        ------
        ValueError
            The size is below `SEGMENT_HEADER`.
        MemoryError
            The system has not so much; it says how much was asked for.
        OSError
        """

    @classmethod
    def attach(cls, pid: int, fd: int, nonce: bytes, /) -> Segment:
        """Map the segment of another process.

        Raises
        ------
        OSError
            That process is not on this node or may not be looked into, or it is another segment.
        """

    def unlink(self) -> None:
        """Take its name away, if it has one, since all that need it have mapped it."""

    @property
    def fd(self) -> int: ...
    @property
    def named(self) -> bool: ...
    @property
    def nonce(self) -> bytes: ...
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

POOL_ALIGNMENT: int

@final
class Block:
    """Memory from a pool, a writable buffer; the pool gets it back when this object goes.

    Attributes
    ----------
    offset : int
        Where it begins in the pool's memory.
    address : int
        Where it lies in this process: a multiple of `POOL_ALIGNMENT`, or of the page size if it is
        larger than 16 KiB.
    """

    @property
    def offset(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Pool:
    """Memory for arrays that the peers on the node can reach.

    It is mapped whole from the start, and grows as blocks are taken. A forked child can use the
    blocks that it has inherited; it neither frees any nor gets new ones.

    Parameters
    ----------
    cap : int
        How much it takes from the system at most.
    limits : tuple
        For each control group with a limit: the paths of the files that tell its usage and its
        statistics, and the limit. They are looked at before the pool grows.
    named : bool
        Make it with a name in ``/dev/shm``, see `Segment.create`.

    Raises
    ------
    OSError
        The memory cannot be made or mapped.

    Attributes
    ----------
    fd : int
        Its file descriptor in this process, which peers open as ``/proc/PID/fd/FD``.
    named : bool
        Whether it has been made with a name, by which peers find it as well.
    nonce : bytes
        The random bytes at its start that prove to a peer that it has the right memory.
    address, size : int
        Where it lies in this process, and how much is mapped there.
    used, peak : int
        Bytes in blocks now, and the most there ever were.
    reserved : int
        Bytes that the pool has from the system, blocks and free memory together.
    """

    def __new__(
        cls, cap: int, /, *, limits: tuple[tuple[str, str, int], ...] = ..., named: bool = ...
    ) -> Pool: ...
    def empty(self, nbytes: int, /) -> Block:
        """Return a new block; 0 bytes are allowed.

        Raises
        ------
        MemoryError
            The cap or the system does not allow it; it says how much was asked, is used and may be.
        RuntimeError
            The pool is closed, or belongs to the process that this one was forked from.
        """

    def locate(self, address: int, nbytes: int, /) -> int:
        """Return at which offset of the pool so many bytes at `address` lie, or -1."""

    def trim(self) -> int:
        """Give free memory back to the system; return how many bytes."""

    def close(self) -> None:
        """Allocate no more, and give back to the system what becomes free from now on.

        Blocks stay valid as long as their objects live.
        """

    def unlink(self) -> None:
        """Take its name away, if it has one, since all that need it have mapped it."""

    @property
    def fd(self) -> int: ...
    @property
    def named(self) -> bool: ...
    @property
    def nonce(self) -> bytes: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def cap(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def reserved(self) -> int: ...

@final
class PeerMap:
    """The pool of another process, mapped into this one: a buffer of all that it may grow to.

    Parameters
    ----------
    pid, fd : int
    nonce : bytes
        As its owner has them.

    Raises
    ------
    OSError
        That process is not on this node or may not be looked into, or it is another memory.
    """

    def __new__(cls, pid: int, fd: int, nonce: bytes, /) -> PeerMap: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class PoolTable:
    """The pools that this process can reach, by member.

    Parameters
    ----------
    members : sequence
        For each member its `Pool` or `PeerMap`, or None.
    """

    def __new__(cls, members: Sequence[Pool | PeerMap | None], /) -> PoolTable: ...
    def locate(self, address: int, nbytes: int, /) -> tuple[int, int] | None:
        """Return the member in whose pool so many bytes at `address` lie, and their offset there.

        None where they are in ordinary memory.
        """

    def address(self, member: int, offset: int, nbytes: int, /) -> int:
        """Return where so many bytes of a member's pool lie in this process.

        Raises
        ------
        ValueError
            They are not, or not all, in what is mapped.
        """

    def __len__(self) -> int: ...

@final
class Loan:
    """Memory that a member lends to this process: a read-only buffer, given back when it goes.

    Parameters
    ----------
    table : PoolTable
    member, offset : int
        The lender, and where the loan begins in its pool: with a byte for each of `count` workers,
        in whole cache lines, and behind these with the data.
    nbytes : int
        The bytes of the data.
    index, count : int
        Which worker this is, and how many there are.

    Raises
    ------
    ValueError
        There is nothing mapped there.
    """

    def __new__(
        cls, table: PoolTable, member: int, offset: int, nbytes: int, index: int, count: int, /
    ) -> Loan: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def node_size(workers: int, ring_size: int, box_size: int, /) -> int:
    """Return the bytes of a segment for a node block; `ring_size` is a power of two.

    Raises
    ------
    ValueError
        Such a node is not possible; it says what is.
    """

class WorkerStatus(TypedDict):
    """One worker's status line.

    `running` is the command that it is in, or 0, and `since` when it came there, as
    `time.monotonic` gives it; `operation` the (command, index) of the collective that it is in;
    `ended` a wait status, or -1.
    """

    pid: int
    tail: int
    executed: int
    running: int
    since: float
    function: str
    operation: tuple[int, int] | None
    failed: int
    failures: int
    interrupted_through: int
    ended: int
    gone: bool

@final
class Node:
    """One process's end of a node block, which the processes of a node share; see src/node.h.

    Process 0, the controller's, gives `workers`, `ring_size` and `box_size` and lays the block out;
    the others give none of them.

    Attributes
    ----------
    workers, me : int
        How many processes there are, and which one this is.
    segment : Segment
        The memory.
    bell : int
        This process's doorbell: it counts how often it was told to look at everything again.
    watch_bell : int
        The same of the watchers.
    interrupted_through : int
        Commands up to this one are cancelled.
    closed : bool
        Whether the session is over.
    spin : float
        For how many seconds `wait` polls before it sleeps.

    Raises
    ------
    ValueError
        The block does not fit into the segment, or there is none, or none of this version.
    """

    def __new__(
        cls,
        segment: Segment,
        me: int,
        workers: int = ...,
        ring_size: int = ...,
        box_size: int = ...,
    ) -> Node: ...
    spin: float
    @property
    def bell(self) -> int: ...
    @property
    def watch_bell(self) -> int: ...
    @property
    def interrupted_through(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def workers(self) -> int: ...
    @property
    def me(self) -> int: ...
    @property
    def segment(self) -> Segment: ...
    def begin_wait(self) -> None:
        """Mark this process as waiting. Read `bell` next, then look at what is waited for."""

    def end_wait(self) -> None:
        """Take back one `begin_wait`."""

    def wait(self, seen: int, seconds: float, /) -> bool:
        """Wait until `bell` differs from `seen`, up to 50 ms or `seconds`; say if it does.

        Polls for `spin` seconds first. A signal ends the wait.
        """

    def sleep(self, seen: int, seconds: float, /) -> bool:
        """Wait in the same way, without polling, up to `seconds` or 1 s."""

    def wait_watch(self, seen: int, seconds: float, /) -> int:
        """Sleep while `watch_bell` is `seen`, up to `seconds`; return what it is."""

    def ring_bell(self, worker: int, /) -> None:
        """Tell a process to look at everything again, if it waits."""

    def ring_all(self) -> None:
        """Tell all other processes."""

    def ring_watchers(self) -> None:
        """Wake all watchers."""

    def interrupt(self, through: int, /) -> None:
        """Cancel the commands up to `through` on all workers, and wake everybody."""

    def note_interrupt(self, through: int, /) -> None:
        """Write to this worker's status line that it knows of an interrupt."""

    def begin_command(self, number: int, function: str | None = ..., /) -> None:
        """Write to the status line that this worker starts a command; None leaves the text."""

    def leave_command(self, number: int, /) -> None:
        """Write there that it has left the command."""

    def fail_command(self, number: int, /) -> None:
        """Write there that the command failed."""

    def set_operation(self, command: int, index: int, /) -> None:
        """Write there that it is in this collective."""

    def clear_operation(self) -> None:
        """Write there that it is in none."""

    def executed(self) -> list[int]:
        """Return, per worker but worker 0, the last command that it has left."""

    def status(self, worker: int, /) -> WorkerStatus:
        """Return a worker's status line."""

    def mark_gone(self, worker: int, how: int = ..., /) -> None:
        """Do not reckon with a worker any more: its process has ended, with this wait status."""

    def close(self) -> None:
        """Say that the session is over, and wake everybody."""

@final
class Ring:
    """One process's end of the ring of commands; see src/ring.h.

    Attributes
    ----------
    published : int
        On the controller: the number of the last message that was pushed.
    """

    def __new__(cls, node: Node) -> Ring: ...
    @property
    def published(self) -> int: ...
    def has_room(self, size: int, /) -> bool:
        """Whether a message of `size` bytes can be pushed; else its room will ring the bell."""

    def try_push(self, number: int, message: Buffer, /) -> bool:
        """Push a message to all workers, and ring their bells; False where there is no room.

        Raises
        ------
        MemoryError
            There is no shared memory for a large message. Nothing has been pushed.
        """

    def pop(self) -> memoryview | None:
        """On a worker: take the next message, in memory of its own; None where there is none.

        Raises
        ------
        OSError
            The ring is damaged, or the memory of a large message cannot be mapped.
        MemoryError
            There is no memory for the copy. The message is still there.
        """

    def spin(self) -> memoryview | None:
        """Do as `pop`, after polling for a message for the node's `spin` seconds."""

    def collect(self) -> None:
        """Free the memory of large messages that all workers have read."""

    def slowest(self) -> int:
        """Return the worker that is furthest behind, or 0 where there is none."""

@final
class Replies:
    """The boxes of replies on the controller, or a worker's own; see src/ring.h."""

    def __new__(cls, node: Node) -> Replies: ...
    def send(self, message: bytes, /) -> bool:
        """On a worker: send a reply; say if something of it, or of others, is still to go."""

    def pump(self) -> bool:
        """Move on what is still to go, and say if something is. The bell tells when it can."""

    def poll(self, queue: deque[tuple[int, memoryview]], /) -> None:
        """On the controller: append (worker, message) for each reply that is here wholly.

        Raises
        ------
        OSError
            A box is damaged.
        """

# The control plane's hot path. codec.py, dref.py, worker.py, controller.py and sessions.py are the
# reference, and what the package does without this module.

def encode_arguments(args: tuple[Any, ...], /) -> bytes | None:
    """Encode arguments as `codec.encode_arguments` does; None where one is not compact."""

def decode_value(view: bytes | memoryview, lookup: Callable[[int], Any], /) -> tuple[Any, int]:
    """Decode one value, and return it with its size; NotImplemented for what Python decodes.

    Raises
    ------
    ValueError
        The payload is malformed.
    """

def current_worker() -> Any:
    """Return the worker whose function runs in this thread, or None."""

def set_current_worker(worker: Any, /) -> Any:
    """Change what `current_worker` returns in this thread; return what it was."""

def set_failed_type(type: type, /) -> None:
    """Say of which type the registers are whose commands failed."""

class Handle:
    """The native part of a DRef. Its death is noted with its session's controller."""

    reg_id: int
    session: Any
    _command: int

    def __init__(self, reg_id: int, session: Any, command: int) -> None: ...

class WorkerState:
    """The native part of a worker: its registers, and the step of the interpreter."""

    registers: dict[int, Any]
    functions: dict[bytes, Callable[..., Any]]
    function: Any
    number: int
    finished: int
    interrupted_through: int
    thread: int
    _worker_id: int
    running: bool
    closed: bool
    _codes: dict[bytes, list[Any]]
    _failures: list[Any]
    _begin: Callable[[int], object] | None
    _leave: Callable[[int], object] | None
    _on_command: Callable[[], object] | None

    def step(self, message: bytes | memoryview, /) -> bool:
        """Run the command in `message` if it is a plain call that needs nothing of Python's.

        Returns
        -------
        bool
            Whether it has been run; else `Worker.execute` is to do it.
        """

    def drain(self, ring: Ring, replies: Replies, once: bool, /) -> bool | None:
        """Run the plain calls that come through a ring.

        Returns
        -------
        bool or None
            None when no more comes for a while, False when the next message is not a plain call,
            and, if asked to stop after each, True after one.

        Raises
        ------
        OSError
            The ring is damaged.
        """

    def set_node(self, node: Node | None, /) -> None:
        """Keep the status line in this memory up to date."""

    def _tell_begin(self, number: int, /) -> None:
        """Say in the status line that a function is called."""

    def _tell_left(self, number: int, failed: bool, /) -> None:
        """Say in the status line that a command is over."""

class ControllerState:
    """The native part of a controller: dead handles, and what `FastCall` needs."""

    closed: bool
    _submitting: bool

    def _prepare(
        self,
        lock: Any,
        channel: Any,
        worker: WorkerState,
        output: Any,
        interrupts: Any,
        dref_type: type[Handle],
        references: dict[str, bytes],
        /,
    ) -> None:
        """Give it all that its calls need."""

    _unreported: list[Any]
    _failures_seen: int

    _replies: dict[tuple[int, int], Any]

    def _set_ring(self, ring: Ring | None, boxes: Replies | None, /) -> None:
        """Say which ring the channel goes by, and which boxes its replies."""

    _alone: bool

    def _all_left(self, number: int, /) -> bool:
        """Whether all other workers have left a command; who does so later rings the bell."""

    def _failure_count(self) -> int:
        """Return how many commands have failed on the other workers, where that is known."""

    def _all_is_well(self) -> bool:
        """Whether all workers are known to have left all commands, and nothing is to be reported.

        It may wait for some microseconds. False says nothing.
        """

    def _set_known(
        self, known: Callable[[Any], bytes | None], codes: dict[bytes, bytes], /
    ) -> None:
        """Say how to know a function that went by value before, and which those are."""

    def _set_context(self, path: tuple[str, ...], level: int, /) -> None:
        """Note which import path and which level of the log the workers know."""

    def _dead_registers(self) -> list[int]:
        """Return the registers whose handles have died; `_forget_dead` drops the first ones."""

    def _forget_dead(self, count: int, /) -> None: ...
    def new_register(self) -> int:
        """Return the number of a register that nobody has used."""

@final
class FastCall:
    """A method of a session that takes the short way where it can, and else is what it wraps."""

    def __init__(self, wrapped: Callable[..., Any], gets: bool = ..., /) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

@final
class Cells:
    """One worker's side of the arrivals, collectives and messages among the workers of a node.

    The block is a segment of `required` bytes, zero at first, that all workers map. `describe` is
    called with (operation, kind or -1, dtype, shape), and returns a signature of 120 bytes, a
    digest of it, the bytes of an element and the dtype's code in reductions, or None where
    operations on such arrays are not for the fast path. `kinds` has the numbers of reductions by
    what users call them. `examples` are a contiguous float32 array of shape (3, 5) at `address`
    and a read-only, transposed view of it. `spin` is in seconds.

    Operations return how they ended: -1 nothing was done, as the arguments are not for the fast
    path; 0 not yet, call `resume`; 1 done; 2 the members have come to different ones; 3 a member
    will not come; 4 a member's process has ended in the middle.
    """

    def __new__(
        cls,
        block: Segment,
        worker: int,
        num_workers: int,
        num_groups: int,
        describe: Callable[[int, int, Any, Any], tuple[bytes, int, int, int] | None],
        kinds: dict[object, int],
        examples: tuple[Any, Any],
        address: int,
        spin: float,
        node: Node | None,
        pools: PoolTable | None,
    ) -> Cells: ...
    @classmethod
    def required(cls, num_workers: int, num_groups: int, /) -> int: ...

    # Operations on arrays that are ready for it.
    def allreduce(self, send: Any, kind: Any, in_group: Any, recv: Any, /) -> int: ...
    def allgather(self, send: Any, in_group: Any, recv: Any, /) -> int: ...
    def broadcast(self, send: Any, in_group: Any, recv: Any, /) -> int: ...
    def scatter(self, send: Any, in_group: Any, recv: Any, /) -> int: ...
    def gather(self, send: Any, in_group: Any, recv: Any, /) -> int: ...
    def start(
        self,
        operation: int,
        kind: int,
        in_group: bool,
        signature: bytes,
        digest: int,
        code: int,
        count: int,
        nbytes: int,
        send: int,
        recv: int,
        owners: object,
        after: Callable[[], object] | None,
        staged: bool,
        /,
    ) -> int:
        """Begin an operation on contiguous memory at addresses, each member's part of `nbytes`.

        `owners` is kept as long as the memory is used. `after` is called when the data has been
        moved, before any handler of a signal runs; with `staged` it may `exchange` more.
        """

    def exchange(self, nbytes: int, send: int, recv: int, /) -> None:
        """Gather `nbytes` more of each member on all of them.

        Raises
        ------
        ConnectionError
            A member's process has ended.
        """

    def resume(self) -> int:
        """Look again whether the operation under way goes on."""

    def abandon(self) -> None:
        """Break the operation under way off; this worker's part is done if the others need it."""

    # Messages.
    def send(self, receiver: int, signature: bytes, address: int, nbytes: int, /) -> None: ...
    def letter(self, sender: int, /) -> tuple[int, int, bytes] | Literal[False] | None:
        """Return command, bytes and signature of the oldest message from `sender`.

        None where one may still come, False where none will in this command.
        """

    def read(self, sender: int, address: int, nbytes: int, /) -> bool:
        """Read on in that message, into so many bytes; return whether it is complete.

        Raises
        ------
        ConnectionError
            The sender's process has ended, and the message with it.
        """

    def drop(self, sender: int, /) -> None:
        """Throw that message away."""

    def pump(self) -> None:
        """Move on messages that wait for room."""

    # What this worker tells the others.
    def begin(self, command: int, /) -> None: ...
    def leave(self, command: int, /) -> None: ...
    def fail(self, command: int, /) -> None: ...
    def close(self, command: int, /) -> None: ...
    def release(self) -> None:
        """Give the memory back. Only `begin` and the like are harmless from then on."""

    def bury(self, worker: int, /) -> None:
        """Say in its place that a worker's process has ended, so that nobody waits for it."""

    # What the others have told.
    def told(self) -> list[tuple[int, int, bool, int]]:
        """Return for each worker the newest command that it has left and that has failed there.

        And whether that failed only for a peer's sake, and the command with which it closed, 0, or
        -1 where its process has ended.
        """

    def signatures(self, in_group: bool, /) -> bytes:
        """Return the signatures of all members, one behind the other, after a mismatch."""

    def withdrawn(self, in_group: bool, /) -> int | None:
        """Return the worker that had come to the last operation and broke off, or that ended."""

    #: Whether it reads the memory of the other processes, which the system may refuse. Set to
    #: False, large operations on ordinary arrays go through the staging areas.
    read_memory: bool

    @property
    def command(self) -> int: ...
    @property
    def last(self) -> tuple[int, int]:
        """Operation and index of the last one."""

    @property
    def waiting(self) -> tuple[int, int, bool] | None:
        """Operation, index and whether in the group of the one under way."""

    @property
    def outstanding(self) -> bool:
        """Whether messages wait for room."""

    @property
    def lends(self) -> bool:
        """Whether messages lie in this worker's memory that have not been read."""
