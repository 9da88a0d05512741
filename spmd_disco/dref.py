"""The controller's handles to registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from . import native

__all__ = ["DModule", "DPackedFunc", "DRef"]


class _Session(Protocol):
    """What a handle needs of its session."""

    _controller: Any

    def _get(self, dref: DRef, worker_id: int, timeout: float | None) -> Any: ...
    def _get_all(self, dref: DRef, timeout: float | None) -> list[Any]: ...
    def _set(self, dref: DRef, worker_id: int, value: Any, *, copy_into: bool) -> None: ...
    def _view(self, dref: DRef) -> Any: ...
    def _is_ready(self, command: int) -> bool: ...
    def _cached_func(self, name: str) -> Any: ...
    def call_packed(self, func: Any, *args: Any) -> DRef: ...


class _PythonHandle:
    """What the native part of a handle does, where there is none."""

    __slots__ = ("_command", "reg_id", "session")

    def __init__(self, reg_id: int, session: _Session, command: int) -> None:
        self.reg_id = reg_id
        self.session = session
        #: The command that sets the register.
        self._command = command
        session._controller.adopt(self)


_Handle = _PythonHandle
if not TYPE_CHECKING and native.core is not None:
    _Handle = native.core.Handle


class DRef(_Handle):
    """The controller's handle to a register, which has a value of its own on each worker.

    The register lives as long as its handle. A handle may be dropped in any thread and at any time:
    its death is only noted, and the next command carries the note.

    Attributes
    ----------
    reg_id : int
        The number of the register, the same on all workers.
    session : Session
        The session that it belongs to.
    """

    __slots__ = ("__weakref__",)

    def get(self, worker: int = 0, timeout: float | None = None) -> Any:
        """Return a copy of the register's value on one worker. A sync point.

        Parameters
        ----------
        worker : int
            The worker's id.
        timeout : float, optional
            Seconds to wait; the default is the session's limit.

        Raises
        ------
        WorkerError
            The command that sets the register failed there, or an earlier one did and that has not
            been reported yet, or the value cannot be pickled.
        DiscoTimeout
            The worker has not come so far in time; the session goes on.
        """
        return self.session._get(self, worker, timeout)

    def get_all(self, timeout: float | None = None) -> list[Any]:
        """Return copies of the register's values on all workers, by worker id. See `get`."""
        return self.session._get_all(self, timeout)

    def ready(self) -> bool:
        """Whether all workers are known to have left the command that sets the register.

        Never waits. It may be a few milliseconds late, and says nothing about success.
        """
        return self.session._is_ready(self._command)

    def view(self) -> Any:
        """Return worker 0's own object, not a copy: the explicit way to share it.

        Raises
        ------
        WorkerError
            The command that sets the register failed on worker 0.
        """
        return self.session._view(self)

    def debug_get_from_remote(self, worker_id: int) -> Any:
        """Return a copy of the value on a worker, as TVM's method of this name does. See `get`."""
        return self.session._get(self, worker_id, None)

    def debug_copy_from(self, worker_id: int, value: Any) -> None:
        """Copy `value` into the array that the register holds on a worker, as TVM's method does.

        Parameters
        ----------
        worker_id : int
        value : array_like or object
            Of the array's element count and dtype, in any shape. Where the register holds no array,
            `value` itself becomes its value there.
        """
        self.session._set(self, worker_id, value, copy_into=True)

    def __getitem__(self, index: Any) -> DRef:
        """Return a new register with what this one's values have at `index`.

        They are tuples, lists, dicts or arrays, such as the results of compiled functions. An array
        at a slice or an integer is a view of the same memory, as in NumPy.

        Parameters
        ----------
        index : object
            The same on all workers.
        """
        item: DRef = self.session._cached_func("runtime.disco._get_item")(self, index)
        return item

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: register {self.reg_id} of {self.session!r}>"

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"a DRef {what}: its values are on the workers; fetch one with .get(worker), all with "
            ".get_all(), or pass the DRef to sess.call()"
        )

    def __iter__(self) -> NoReturn:
        self._refuse("cannot be iterated over")

    def __bool__(self) -> NoReturn:
        self._refuse("has no truth value")

    def __len__(self) -> NoReturn:
        self._refuse("has no length")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("is not an array")

    def __int__(self) -> NoReturn:
        self._refuse("is not a number")

    def __float__(self) -> NoReturn:
        self._refuse("is not a number")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or captured by a function: pass it as an argument of "
            "sess.call(), by itself or in tuples, lists and dicts"
        )

    def __copy__(self) -> DRef:
        return self

    def __deepcopy__(self, memo: object) -> DRef:
        return self


def _refuse_operators() -> None:
    """Say of arithmetic and of comparisons, too, where the values are."""
    binary = {
        "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%",
        "pow": "**", "matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<",
        "rshift": ">>",
    }  # fmt: skip
    alone = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "pos": "+", "invert": "~"}
    names = {f"__{side}{name}__": symbol for name, symbol in binary.items() for side in ("", "r")}
    names |= {f"__{name}__": symbol for name, symbol in alone.items()}
    for name, symbol in names.items():

        def refuse(self: DRef, *others: object, symbol: str = symbol) -> NoReturn:
            self._refuse(f"cannot be used with {symbol}")

        setattr(DRef, name, refuse)


_refuse_operators()

if native.core is not None:
    # The native module fetches small values itself, and leaves all others to this method.
    DRef.get = native.core.FastCall(DRef.get, True)  # type: ignore[method-assign]


class _Shared(DRef):
    """A second handle to the register of another, which it keeps alive."""

    __slots__ = ("_owner",)

    def __init__(self, dref: DRef, session: _Session) -> None:
        if not isinstance(dref, DRef):
            raise TypeError(f"{type(self).__name__} is made from a DRef, not from {dref!r}")
        self._owner = dref
        self.reg_id = dref.reg_id
        self.session = session
        self._command = dref._command


class DPackedFunc(_Shared):
    """A function on the workers.

    Parameters
    ----------
    dref : DRef
        A register that holds a callable.
    session : Session
    """

    __slots__ = ()

    def __call__(self, *args: Any) -> DRef:
        """Call the function on all workers, see `Session.call_packed`."""
        return self.session.call_packed(self, *args)


class DModule(_Shared):
    """A module on the workers: a TVM module, a Python module, or anything with functions by name.

    Parameters
    ----------
    dref : DRef
        A register that holds one.
    session : Session
    """

    __slots__ = ()

    def __getitem__(self, name: str) -> DPackedFunc:
        """Return the module's function `name`."""
        get = self.session._cached_func("runtime.disco._module_get_function")
        return DPackedFunc(get(self, name), self.session)

    def __iter__(self) -> NoReturn:
        self._refuse("cannot be iterated over")
