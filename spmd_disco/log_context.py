"""The controller's logging, for the workers: its level, and structlog's configuration if used."""

from __future__ import annotations

import logging
import pickle
import sys
from typing import Any

from . import pickling

__all__ = ["LogContext", "adopt", "current"]

logger = logging.getLogger("spmd_disco")

#: The root logger's level; structlog's configuration, and the formatter by which the standard
#: library's log goes through structlog, if it does. Two None where structlog is not used.
LogContext = tuple[int, Any, Any]


def current() -> LogContext:
    """Return the logging of this process. Cheap where structlog is not loaded."""
    structlog: Any = sys.modules.get("structlog")
    root = logging.getLogger()
    if structlog is None or not structlog.is_configured():
        return root.level, None, None
    formatters = (handler.formatter for handler in root.handlers)
    kind = structlog.stdlib.ProcessorFormatter
    formatter = next((f for f in formatters if isinstance(f, kind)), None)
    return root.level, structlog.get_config(), formatter


def encode(context: LogContext) -> bytes | None:
    """Return the part of a context that is structlog's as bytes; None where there is none.

    A configuration that cannot be pickled (one with an open file in it, say) stays with the
    controller, and a warning is logged.
    """
    _, config, formatter = context
    if config is None:
        return None
    try:
        return pickling.dumps((config, formatter))
    except Exception as e:
        logger.warning("structlog's configuration stays with the controller: %s", e)
        return None


def adopt(level: int, structlog_part: bytes | None) -> None:
    """Log in this process as the controller does."""
    root = logging.getLogger()
    if structlog_part is not None:
        import structlog

        config, formatter = pickle.loads(structlog_part)
        structlog.configure(**config)
        if formatter is not None:
            handler = logging.StreamHandler()
            handler.setFormatter(formatter)
            root.handlers[:] = [handler]
    if root.level != level:
        if not root.handlers:
            logging.basicConfig()
        root.setLevel(level)
