"""How a call becomes bytes: which function it means, and its arguments with DRefs in them."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import cloudpickle

from . import pickling, registry
from .codec import (
    COMPACT,
    DIGEST_SIZE,
    FunctionKind,
    Part,
    RegisterRef,
    encode_arguments,
    encode_function,
    encode_register_reference,
    encode_value,
    replace_containers,
)
from .dref import DRef
from .fingerprint import fingerprint, is_settled

if TYPE_CHECKING:
    from .controller import Controller

__all__ = ["CallEncoder", "encode_plain"]


#: Fingerprints that are kept.
MOST_SETTLED = 256


class CallEncoder:
    """Encode the calls of one session.

    Parameters
    ----------
    controller : Controller
        The session's; a DRef of another one is refused.
    """

    def __init__(self, controller: Controller) -> None:
        # Not the session: a cycle would keep one alive that the program has dropped.
        self._controller = controller
        #: By the id of their code: the fingerprints and digests of functions that went by value.
        self._settled: dict[int, tuple[list[object], bytes]] = {}

    def reference(self, func: Any) -> tuple[bytes, tuple[bytes, bytes] | None]:
        """Encode which function to call; also return the code that goes along, if any does."""
        if isinstance(func, DRef):
            self.own(func)
            return encode_register_reference(func.reg_id), None
        if isinstance(func, str):
            function = registry.get_global_func(func, allow_missing=True)
            if function is None:
                registry.resolve(func)
                return self._import(func, func), None
            name = encode_function(FunctionKind.GLOBAL, func)
            if registry.is_foreign(func):
                return name + encode_function(FunctionKind.NONE, None), None
            if (getattr(function, "__module__", None) or "").startswith("spmd_disco."):
                reference = name + encode_function(FunctionKind.NONE, None)
                registry.keep_reference(func, reference)
                return reference, None
            if registry.is_published(func):
                function = registry.Published(function)
            definition, code = self.reference(function)
            return name + definition, code
        if not callable(func):
            raise TypeError(
                f"{func!r} cannot be called: give a callable, the name of a global function, a "
                "dotted path or a DRef"
            )
        path = registry.importable(func)
        if path is not None:
            return self._import(func, path), None
        return self._by_value(func)

    @staticmethod
    def _import(func: Any, path: str) -> bytes:
        reference = encode_function(FunctionKind.IMPORT, path)
        registry.keep_reference(func, reference)
        return reference

    def _by_value(self, func: Any) -> tuple[bytes, tuple[bytes, bytes] | None]:
        digest = self.known(func)
        if digest is not None:
            return encode_function(FunctionKind.KNOWN, digest), (digest, b"")
        parts = fingerprint(func) if type(func) is FunctionType else None
        # Pickled anew each time, so that a global that has changed since counts.
        try:
            code = pickling.dumps(func)
        except Exception as e:
            raise TypeError(f"the function {func!r} cannot be pickled: {e}") from e
        digest = hashlib.blake2b(code, digest_size=DIGEST_SIZE).digest()
        if parts is not None and is_settled(parts):
            if len(self._settled) >= MOST_SETTLED:
                self._settled.clear()
            # The fingerprint has the code object in it, so its id stays its own.
            self._settled[id(func.__code__)] = parts, digest
        if digest in self._controller.codes:
            reference = encode_function(FunctionKind.KNOWN, digest)
        else:
            reference = encode_function(FunctionKind.CODE, digest, code)
        return reference, (digest, code)

    def known(self, func: Any) -> bytes | None:
        """Return the digest of a function that went by value before and is still the same."""
        if type(func) is not FunctionType or cloudpickle.list_registry_pickle_by_value():
            return None
        settled = self._settled.get(id(func.__code__))
        if settled is None or settled[1] not in self._controller.codes:
            return None
        if registry.importable(func) is not None:
            return None  # it can be imported by now
        parts = fingerprint(func)
        if parts is None or len(parts) != len(settled[0]):
            return None
        return settled[1] if all(map(operator.is_, parts, settled[0])) else None

    def own(self, dref: DRef) -> None:
        """Refuse a DRef of another session.

        Raises
        ------
        ValueError
        """
        if dref.session._controller is not self._controller:
            raise ValueError(
                f"{dref!r} belongs to another session than this <{self._controller.name()}>"
            )

    def _substitute(self, value: Any) -> Any:
        if isinstance(value, DRef):
            self.own(value)
            return RegisterRef(value.reg_id)
        return value

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Part], int, Sequence[Any] | None]:
        """Encode the arguments of a call, with references in the place of DRefs.

        Returns
        -------
        parts : list
        flags : int
        local : sequence or None
            The arguments themselves, if worker 0 can take them as they are.
        """
        plain = [self._substitute(arg) for arg in args] if args else []
        named = {key: self._substitute(arg) for key, arg in kwargs.items()} if kwargs else {}
        try:
            parts, flags = encode_arguments(plain, named)
            return parts, flags, plain if parts[0] == COMPACT else None
        except MemoryError:
            raise
        except Exception:
            # Most likely a DRef in a container. Those are looked for only now: a walk through
            # every large list would cost more than its pickle.
            memo: dict[int, Any] = {}
            plain, named = replace_containers([plain, named], self._substitute, memo)
        try:
            return *encode_arguments(plain, named), None
        except MemoryError:
            raise
        except Exception as e:
            raise self._unpicklable(plain, named, e) from e

    @staticmethod
    def _unpicklable(plain: list[Any], named: dict[str, Any], error: Exception) -> TypeError:
        """Name the argument that cannot be pickled."""
        for name, value in [*enumerate(plain), *named.items()]:
            try:
                encode_value(value)
            except Exception as e:
                which = f"argument {name}" if isinstance(name, int) else f"the argument {name!r}"
                return TypeError(f"{which} (of type {type(value).__name__}) cannot be pickled: {e}")
        return TypeError(f"the arguments cannot be pickled: {error}")


def encode_plain(value: Any, name: str) -> tuple[list[Part], int]:
    """Encode a value without DRefs, which error texts call `name`.

    Raises
    ------
    TypeError
        It cannot be pickled.
    """
    try:
        return encode_value(value)
    except MemoryError:
        raise
    except Exception as e:
        raise TypeError(f"{name} (of type {type(value).__name__}) cannot be pickled: {e}") from e
