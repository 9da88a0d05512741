"""What the parts that a session is made of may use of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calls import CallEncoder
    from .controller import Controller
    from .dref import DRef

__all__ = ["SessionPart"]


class SessionPart:
    """The base of the classes that each bring some methods of a session."""

    if TYPE_CHECKING:
        _controller: Controller
        _encoder: CallEncoder

        @property
        def num_workers(self) -> int: ...
        @property
        def num_groups(self) -> int: ...
        @property
        def group_size(self) -> int: ...
        def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DRef: ...
        def _view(self, dref: DRef) -> Any: ...
        def _share_context(self) -> None: ...
        def get_global_func(self, name: str) -> DRef: ...
        def sync(self, timeout: float | None = None) -> None: ...
