"""The native module's interface. Sizes and offsets are in bytes."""

from typing import final

SEGMENT_HEADER: int

@final
class Segment:
    """Memory that processes of one node share; a writable buffer of bytes.

    Attributes
    ----------
    fd : int
        Its file descriptor in this process, which peers open as ``/proc/PID/fd/FD``.
    nonce : bytes
        The random bytes at its start that prove to a peer that it has the right memory.
    address : int
        Where it lies in this process.
    """

    @classmethod
    def create(cls, size: int, reserved: int = ..., /) -> Segment:
        """Return new memory of `size` bytes, zero throughout, `reserved` of them backed at once.

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

    @property
    def fd(self) -> int: ...
    @property
    def nonce(self) -> bytes: ...
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
