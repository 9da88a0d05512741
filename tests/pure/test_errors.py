"""The text of errors."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

import spmd_disco as di
from spmd_disco.errors import Failure
from spmd_disco.failures import cut, function_name

ONE = Failure(2, "node1", "app.f", 7, "ValueError", "boom\nsecond line", "Traceback: boom")


def test_hierarchy():
    for kind in (di.WorkerError, di.PeerError, di.SessionClosedError, di.DiscoTimeout):
        assert issubclass(kind, di.DiscoError)
    assert issubclass(di.DiscoTimeout, TimeoutError)
    assert issubclass(di.DiscoError, RuntimeError)


def test_one_failure():
    error = di.WorkerError([ONE])
    assert error.worker_id == 2
    assert str(error) == "worker 2 (node1) in app.f, command 7: ValueError: boom\nTraceback: boom"


def test_equal_failures_are_said_once():
    error = di.WorkerError([replace(ONE, worker_id=i, host=f"node{i}") for i in (3, 1, 2)])
    assert str(error).startswith("worker 3, worker 1, worker 2 (3 hosts) in app.f")
    assert str(error).count("Traceback") == 1


def test_many_workers_and_many_failures():
    everyone = [replace(ONE, worker_id=i) for i in range(100)]
    assert "worker 15 and 84 more" in str(di.WorkerError(everyone))
    different = [replace(ONE, command=i, message=f"m{i}") for i in range(20)]
    text = str(di.WorkerError(different, dropped=5))
    assert text.count("Traceback") == 4
    assert text.count("ValueError") == 20
    assert "5 more failures" in text
    repeated = [replace(ONE, command=i) for i in range(10, 30)]
    text = str(di.WorkerError(repeated))
    assert text.count("ValueError") == 1
    assert "command 10 and 19 more" in text


def test_the_first_cause_comes_first():
    consequence = replace(ONE, worker_id=0, command=1, type="PeerError", consequence=True)
    later = replace(ONE, worker_id=1, command=9)
    error = di.WorkerError([consequence, later, ONE])
    assert [f.command for f in error.failures] == [7, 9, 1]
    assert str(error).splitlines()[-1] == "as a consequence: worker 0"
    alone = di.WorkerError([consequence])
    assert "PeerError" in str(alone)


def test_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(di.WorkerError([ONE], dropped=3)))
    assert error.failures == (ONE,)
    assert error.dropped == 3


def test_cut():
    assert cut("short") == "short"
    text = cut("a" * 50_000 + "b" * 50_000, 1000)
    assert text.startswith("a" * 500)
    assert text.endswith("b" * 500)
    assert "99000 characters left out" in text


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (None, "?"),
        ("a.b:c.d", "a.b.c.d"),
        (5, "register 5"),
        (b"digest", "a function sent by value"),
        (len, "len"),
        (pickle.dumps, "_pickle.dumps"),
    ],
)
def test_function_names(function, name):
    assert function_name(function) == name
