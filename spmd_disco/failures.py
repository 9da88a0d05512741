"""How an exception on a worker becomes a `Failure` that can travel."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

from . import pickling
from .errors import DiscoError, Failure, InheritedFailure, PeerError

__all__ = ["describe_failure", "function_name"]

#: Characters of a message or a traceback that travel.
MAX_TEXT = 32_000
#: Bytes of an exception that travels itself.
MAX_PICKLE = 256 * 1024


def describe_failure(
    error: BaseException, worker_id: int, host: str, function: str, command: int
) -> Failure:
    """Return the failure of a command with `error`."""
    name = total(_type_name, error)
    return Failure(
        worker_id=worker_id,
        host=host,
        function=function,
        command=command,
        type=name,
        message=cut(total(str, error)),
        traceback=cut(total(_traceback_of, error)),
        consequence=isinstance(error, PeerError | InheritedFailure),
        pickled=_pickled(error),
    )


def function_name(function: Any) -> str:
    """Return how failures and reports name what a command calls."""
    return total(_function_name, function)


def _function_name(function: Any) -> str:
    if function is None:
        return "?"
    if isinstance(function, str):
        return function.replace(":", ".")
    if isinstance(function, int):
        return f"register {function}"
    if isinstance(function, bytes):
        return "a function sent by value"
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module = getattr(function, "__module__", None)
    if module == f"{__package__}.builtin":
        module = "runtime.disco"  # as they are registered
    return name if module in (None, "__main__", "builtins") else f"{module}.{name}"


def _is_ours(tb: TracebackType) -> bool:
    return str(tb.tb_frame.f_globals.get("__name__")).startswith(f"{__package__}.")


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text`, with its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _type_name(error: BaseException) -> str:
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def total(describe: Callable[[Any], Any], value: object) -> str:
    """Return ``describe(value)`` as a plain str, whatever the value's class does then.

    It may raise anything, or return a str of a class of its own, which could not travel.
    """
    try:
        return str.__str__(describe(value))
    except BaseException as e:
        return f"<{type(value).__name__}: its text raises {type(e).__name__}>"


def _traceback_of(error: BaseException) -> str:
    # The first frames are the interpreter's own. Where all are ours and it is the arguments that
    # are wrong, the message says all there is to say.
    tb = theirs = error.__traceback__
    while theirs is not None and _is_ours(theirs):
        theirs = theirs.tb_next
    if theirs is not None or isinstance(error, ValueError | TypeError | DiscoError):
        tb = theirs
    if tb is None and error.__cause__ is None and error.__context__ is None:
        return ""  # it would be the message once more
    alone = error.__cause__ is None and error.__context__ is None
    if tb is None or not alone or hasattr(error, "exceptions"):
        return "".join(traceback.format_exception(type(error), error, tb))
    only = traceback.format_exception_only(type(error), error)
    return f"Traceback (most recent call last):\n{_stack_text(tb)}{''.join(only)}"


#: The texts of stacks, with their code objects, by what they are made from.
_stacks: dict[tuple[int, ...], tuple[list[CodeType], str]] = {}
MOST_STACKS = 64
#: Longer stacks are not kept.
DEEPEST_STACK = 32


def _stack_text(tb: TracebackType) -> str:
    """Return the lines of a traceback's frames.

    To find and mark them in the sources costs a tenth of a millisecond, and a function that fails
    often does so in few places.
    """
    codes: list[CodeType] = []
    key: list[int] = []
    at: TracebackType | None = tb
    while at is not None and len(codes) <= DEEPEST_STACK:
        codes.append(at.tb_frame.f_code)
        key += (id(at.tb_frame.f_code), at.tb_lasti)
        at = at.tb_next
    if at is not None:
        return "".join(traceback.format_tb(tb))
    known = _stacks.get(tuple(key))
    if known is None:
        if len(_stacks) >= MOST_STACKS:
            _stacks.clear()
        # With the code objects kept, their ids stay their own.
        known = _stacks[tuple(key)] = codes, "".join(traceback.format_tb(tb))
    return known[1]


def _pickled(error: BaseException) -> bytes | None:
    """Pickle the exception for `__cause__`; None where that cannot be done, which loses no text."""
    try:
        # The usual ones need nothing of cloudpickle's, which is ten times slower.
        plain = type(error).__module__ == "builtins" and not error.__dict__
        simple = plain and all(type(arg) in (str, int, float, bytes) for arg in error.args)
        data = pickle.dumps(error, 5) if simple else pickling.dumps(error)
    except BaseException:
        return None
    return data if len(data) <= MAX_PICKLE else None
