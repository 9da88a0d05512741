"""structlog's configuration reaches the workers."""

from __future__ import annotations

import logging

import pytest

structlog = pytest.importorskip("structlog")


def shout(logger, name, event):
    event["event"] = event["event"].upper()
    return event


@pytest.fixture
def configured():
    root = logging.getLogger()
    handlers = root.handlers[:]
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=structlog.processors.JSONRenderer())
    )
    root.handlers[:] = [handler]
    structlog.configure(
        processors=[shout, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers


def test_structlog_reaches_the_workers(sess, configured):
    def look():
        processors = structlog.get_config()["processors"]
        formatters = [type(h.formatter).__name__ for h in logging.getLogger().handlers]
        return (
            processors[0](None, "info", {"event": "hello"})["event"],
            "ProcessorFormatter" in formatters,
        )

    assert sess.call(look).get_all() == [("HELLO", True)] * sess.num_workers
    sess.call(structlog.reset_defaults)
    sess.sync()


def test_a_configuration_that_cannot_be_pickled_stays(sess, caplog):
    lock = __import__("threading").Lock()
    structlog.configure(processors=[lambda *a: lock])
    try:
        assert sess.call(len, "abc").get_all() == [3] * sess.num_workers
        assert "stays with the controller" in caplog.text
    finally:
        structlog.reset_defaults()
