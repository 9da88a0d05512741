"""What worker functions print: whole lines, labelled, and nothing of the controller's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import sys
import threading

import pytest

from spmd_disco.lines import LARGEST_WRITE
from spmd_disco.output import WorkerOutput


class Target(io.StringIO):
    """A stream that remembers the single writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def streams(test):
    """Run a test with `Target`s as streams; not by a fixture, since pytest sets them later."""

    @functools.wraps(test)
    def wrapped(out, **others):
        err = Target()
        if "err" in inspect.signature(test).parameters:
            others["err"] = err
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            test(out=out, **others)

    parameters = inspect.signature(test).parameters.values()
    kept = [parameter for parameter in parameters if parameter.name != "err"]
    wrapped.__signature__ = inspect.Signature(kept)
    return wrapped


@pytest.fixture
def out():
    return Target()


@contextlib.contextmanager
def command(output):
    output.enter()
    try:
        yield
    finally:
        output.leave()


@pytest.mark.parametrize("worker", [0, 3])
@streams
def test_lines_are_labelled(worker, out, err):
    output = WorkerOutput(worker, prefix=True)
    print("before")
    with command(output):
        print("one", 2)
        print("two\nthree")
        print("wrong", file=sys.stderr)
        print(end="")
        sys.stdout.writelines(["four\n", "five\n"])
    print("after")
    label = f"[worker {worker}] "
    lines = ["one 2", "two", "three", "four", "five"]
    assert out.getvalue() == "before\n" + "".join(f"{label}{s}\n" for s in lines) + "after\n"
    assert err.getvalue() == f"{label}wrong\n"


@streams
def test_without_label(out):
    output = WorkerOutput(1, prefix=False)
    with command(output):
        print("a", end="")
        assert out.writes == []
        print("b\nc", end="")
        assert out.writes == ["ab\n"]
    assert out.getvalue() == "ab\nc\n"


@pytest.mark.parametrize(("value", "label"), [("0", ""), ("1", "[worker 2] "), ("", "[worker 2] ")])
@streams
def test_label_from_the_environment(value, label, out, monkeypatch):
    monkeypatch.setenv("SPMD_DISCO_PREFIX", value)
    with command(WorkerOutput(2)):
        print("x")
    assert out.getvalue() == f"{label}x\n"


@streams
def test_partial_line_is_held_until_its_end(out):
    output = WorkerOutput(1, prefix=True)
    output.enter()
    for _ in range(2):
        print("a", end=" ", flush=True)
        print("b", end=" ")
        assert out.writes == []
        print("c")
        assert out.writes == ["[worker 1] a b c\n"]
        out.writes.clear()
    print("rest", end="")
    output.end_command()
    assert out.writes == ["[worker 1] rest\n"]
    output.end_command()
    output.leave()
    assert out.writes == ["[worker 1] rest\n"]


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        (["10 %\r", "20 %\r", "30 %\n"], "W10 %\rW20 %\rW30 %\n"),
        (["\r10 %", "\r20 %", "\n"], "\rW10 %\rW20 %\n"),
        (["dos\r\n", "dos\r\n"], "Wdos\r\nWdos\r\n"),
        (["split\r", "\nnext\n"], "Wsplit\r\nWnext\n"),
        (["split\r", "\n", "\n"], "Wsplit\r\nW\n"),
        (["split\r", "\nmore\rx"], "Wsplit\r\nWmore\rWx\n"),
        (["a\rb", "c\n\nd"], "Wa\rWbc\nW\nWd\n"),
        (["\n"], "W\n"),
        (["", "", ""], ""),
        (["x\n\n"], "Wx\nW\n"),
        (["form\x0cfeed\x85\u2028end\n"], "Wform\x0cfeed\x85\u2028end\n"),
    ],
)
@streams
def test_line_ends(writes, expected, out):
    with command(WorkerOutput(1, prefix=True)):
        for text in writes:
            assert sys.stdout.write(text) == len(text)
    assert out.getvalue().replace("[worker 1] ", "W") == expected


@streams
def test_pieces_end_with_lines(out):
    text = "".join(f"{i} {'ä' * (i % 900)}\n" for i in range(200)) + "x" * 3 * LARGEST_WRITE + "\n"
    with command(WorkerOutput(5, prefix=True)):
        print(text, end="")
    assert out.getvalue() == "".join(f"[worker 5] {line}\n" for line in text.split("\n")[:-1])
    assert all(piece.endswith("\n") for piece in out.writes)
    long = [piece for piece in out.writes if len(piece.encode()) > LARGEST_WRITE]
    assert [piece.count("\n") for piece in long] == [1]
    assert len(out.writes) < 120


@streams
def test_other_threads_of_the_controller_write_as_ever(out):
    output = WorkerOutput(0, prefix=True)

    def other():
        print("controller")

    with command(output):
        print("worker ", end="")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        print("function")
    assert out.getvalue() == "controller\n[worker 0] worker function\n"


@streams
def test_threads_of_functions_elsewhere_are_labelled(out):
    with command(WorkerOutput(1, prefix=True)):
        thread = threading.Thread(target=print, args=("x",))
        thread.start()
        thread.join()
    assert out.getvalue() == "[worker 1] x\n"


@streams
def test_function_redirects(out):
    output = WorkerOutput(0, prefix=True)
    with command(output):
        with contextlib.redirect_stdout(io.StringIO()) as inner:
            print("inside")
        print("outside")
    assert inner.getvalue() == "inside\n"
    assert out.getvalue() == "[worker 0] outside\n"


@streams
def test_function_replaces_the_stream_for_good(out):
    output = WorkerOutput(0, prefix=True)
    with command(output):
        sys.stdout = io.StringIO()
        print("lost")
    assert sys.stdout is out
    with command(output):
        print("found")
    assert out.getvalue() == "[worker 0] found\n"


@streams
def test_streams_change_between_commands(out):
    output = WorkerOutput(0, prefix=True)
    with command(output):
        print("one")
    second = Target()
    with contextlib.redirect_stdout(second), command(output):
        print("two")
    assert (out.getvalue(), second.getvalue()) == ("[worker 0] one\n", "[worker 0] two\n")


@streams
def test_stream_put_back_late_writes_through(out):
    """As by a redirect_stdout of another thread that began inside a command."""
    output = WorkerOutput(0, prefix=True)
    with command(output):
        ours = sys.stdout
    sys.stdout = ours
    print("controller")
    with command(output):
        print("worker")
    print("controller")
    assert out.getvalue() == "controller\n[worker 0] worker\ncontroller\n"


@streams
def test_nested(out):
    output = WorkerOutput(0, prefix=True)
    with command(output):
        with command(output):
            print("in")
        print("out")
    assert sys.stdout is out
    output.leave()
    assert out.getvalue() == "[worker 0] in\n[worker 0] out\n"


def test_no_streams(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with command(WorkerOutput(0, prefix=True)):
        print("x")
        print("y", end="", file=sys.stderr)
        sys.stdout.flush()
        assert not sys.stdout.isatty()
        with pytest.raises(io.UnsupportedOperation):
            sys.stdout.fileno()
    assert sys.stdout is None


def test_looks_like_a_text_stream(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding="latin-1", errors="replace") as target:
        monkeypatch.setattr(sys, "stdout", target)
        with command(WorkerOutput(0, prefix=True)):
            stream = sys.stdout
            assert isinstance(stream, io.TextIOBase)
            assert (stream.encoding, stream.errors) == ("latin-1", "replace")
            assert stream.fileno() == target.fileno()
            assert (stream.name, stream.mode) == (target.name, "w")
            assert stream.writable()
            assert not stream.readable()
            assert not stream.seekable()
            assert not stream.closed
            assert not stream.isatty()
            assert stream.line_buffering
            stream.reconfigure(encoding="utf-8")
            assert target.encoding == "utf-8"
            stream.close()
            with stream:
                stream.write("ä")
            stream.buffer.write("ö\nü".encode()[:-1])
            stream.buffer.write(memoryview("ü".encode()[1:]))
            stream.buffer.flush()
            with pytest.raises(TypeError, match="not bytes"):
                stream.write(b"x")
            assert "worker 0" in repr(stream)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "[worker 0] äö\n[worker 0] ü\n"


def test_text_that_the_stream_cannot_encode(tmp_path, monkeypatch, caplog):
    with (tmp_path / "out").open("w", encoding="ascii") as target:
        monkeypatch.setattr(sys, "stdout", target)
        output = WorkerOutput(0, prefix=True)
        with command(output):
            with pytest.raises(UnicodeEncodeError):
                print("ä")
            print("a")
        with caplog.at_level(logging.WARNING), command(output):
            print("ö", end="")
        assert "output of worker 0 is lost" in caplog.text
        with command(output):
            print("b")
    assert (tmp_path / "out").read_text() == "[worker 0] a\n[worker 0] b\n"
