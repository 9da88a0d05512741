"""Settings, waits, pickles, and the detection of MPI calls."""

from __future__ import annotations

import inspect
import pickle
import threading
import time
import traceback
import types

import pytest

import spmd_disco as di
from spmd_disco import pickling
from spmd_disco.config import flag, setting
from spmd_disco.transport.mpi_call import mpi_call
from spmd_disco.transport.wait import Waiter


def test_settings(monkeypatch):
    monkeypatch.setenv("SPMD_DISCO_X", "1.5")
    assert setting("X", 0.0, float) == 1.5
    assert setting("UNSET", 7, int) == 7
    monkeypatch.setenv("SPMD_DISCO_X", " ")
    assert setting("X", 7, int) == 7
    for text, value in [("1", True), ("off", False), ("YES", True), ("0", False)]:
        monkeypatch.setenv("SPMD_DISCO_X", text)
        assert flag("X", not value) is value
    monkeypatch.setenv("SPMD_DISCO_X", "maybe")
    with pytest.raises(ValueError, match="SPMD_DISCO_X='maybe'"):
        flag("X", True)


def test_waiting():
    waiter = Waiter()
    assert waiter.until(lambda: 5, lambda: "nothing") == 5
    end = time.monotonic() + 0.05
    assert waiter.until(lambda: time.monotonic() > end, lambda: "the clock")
    with pytest.raises(di.DiscoTimeout, match=r"after 0\.02 s still waiting for Godot"):
        waiter.until(lambda: None, lambda: "Godot", timeout=0.02)
    with pytest.raises(di.DiscoTimeout):
        Waiter(timeout=0.01).until(lambda: None, lambda: "Godot")
    end = time.monotonic() + 0.05
    Waiter(timeout=0.01).until(lambda: time.monotonic() > end, lambda: "it", limited=False)


def test_hooks_know_who_is_idle():
    seen = {True: [], False: []}
    for idle in (True, False):
        waiter = Waiter()
        waiter.add_hook(seen[idle].append)
        end = time.monotonic() + 0.02
        waiter.until(lambda e=end: time.monotonic() > e, lambda: "it", idle=idle)
    assert seen[True][-1] is True
    assert set(seen[False]) == {False}


def test_long_waits_are_reported(monkeypatch, caplog):
    monkeypatch.setenv("SPMD_DISCO_STALL_SECONDS", "0.02")
    waiter = Waiter()
    end = time.monotonic() + 0.1
    waiter.until(lambda: time.monotonic() > end, lambda: "worker 7")
    assert 1 <= caplog.text.count("waiting for worker 7") <= 3


def test_code_keeps_the_name_of_its_file():
    module = types.ModuleType("__main__")
    exec(compile("def f():\n    return 1 / 0\n", "program.py", "exec"), module.__dict__)
    f = pickle.loads(pickling.dumps(module.f))
    with pytest.raises(ZeroDivisionError) as caught:
        f()
    assert traceback.extract_tb(caught.tb)[-1].filename == "program.py"
    assert traceback.extract_tb(caught.tb)[-1].lineno == 2


def test_a_class_that_claims_to_be_builtin():
    kind = type("Elsewhere", (), {"__module__": "builtins"})
    with pytest.raises(TypeError, match=r"Elsewhere .*through its module"):
        pickling.dumps(lambda: kind)
    assert pickle.loads(pickling.dumps((int, type(None), type(len)))) == (
        int,
        type(None),
        type(len),
    )


class FakeComm:
    """Stands for a communicator: what counts is the name of the method that blocks."""

    def __init__(self):
        self.lock = threading.Lock()
        self.lock.acquire()
        # A method in C that blocks.
        self.Barrier = self.recv = self.compute = self.lock.acquire


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("comm.Barrier()", "Barrier"),
        ("x = [1, comm.Barrier(True, -1)]", "Barrier"),
        ("get().comm.recv()", "recv"),
        ("comm.compute()", None),
        ("other.recv()", None),
    ],
)
def test_blocking_calls_are_recognised(code, name):
    fake = FakeComm()
    holder = types.SimpleNamespace(comm=fake)
    namespace = {"comm": fake, "other": fake, "get": lambda: holder}
    exec(f"def f():\n    {code}\n", namespace)
    thread = threading.Thread(target=namespace["f"])
    thread.start()
    try:
        time.sleep(0.1)
        found = mpi_call(thread.ident)
        if name is None:
            assert found is None
        else:
            token, text = found
            assert text.startswith(f"{name} (<string>:2 in f")
            assert mpi_call(thread.ident)[0] == token
    finally:
        fake.lock.release()
        thread.join()


def test_public_names_have_docstrings():
    for name in di.__all__:
        value = getattr(di, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name
        if inspect.isclass(value):
            for key, member in vars(value).items():
                if not key.startswith("_") and inspect.isfunction(member):
                    assert inspect.getdoc(getattr(value, key)), f"{name}.{key}"
