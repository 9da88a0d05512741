"""Every snippet of README.md and of docs/ is run, and what it prints is compared with the page.

The conventions:

* A ``python`` block with a name, ``title="app.py"`` behind the language or ``# app.py`` as its
  first line, is a file in the page's own folder. A ``text`` block after it shows what
  ``mpirun -n 4 python -m spmd_disco app.py`` prints; or a ``console`` block runs it.
* The other ``python`` blocks of a page are one program, run in the same way. A ``text`` block after
  one shows what that block prints.
* In a ``console`` block the lines that start with ``$ `` are run by a shell in the page's folder.
  The lines after each are what it prints, and its exit status must be 0.
* ``title="not run by the tests: REASON"`` marks what cannot be run; readers see it above the block.
  Any other block is an error.

In what a block prints, ``…`` stands for any text, and as a line of its own for any lines. Standard
output, standard error and the lines of each worker come in the order shown, but in no order among
each other. Host names, process ids, folders of files, empty lines and the ``^^^^`` in
tracebacks do not count.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from mpi_environment import OPEN_MPI

REPO = pathlib.Path(__file__).parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
NOT_RUN = "not run by the tests: "
DEFAULT_RUN = "mpirun -n 4 python -m spmd_disco"
#: Seconds for one command.
LIMIT = 60.0

#: README.md has no room for markers: its indented blocks, by their first line, and why they are not
#: run here. The commands before the output of an app are run by the rule for files.
README_INDENTED = {
    f"{DEFAULT_RUN} app.py": "run by the rule for files",
    "mpirun -n 4 python embedded.py": "tests/launcher/test_embedded.py has programs like this",
    "./scripts/demo": "makes a virtual environment, and runs what the continuous integration runs",
    "cosine similarities": "tests/test_examples.py compares the example with the published model",
    "pip install -e .": "installs packages",
}

#: What the launchers print themselves when a job ends with another status than 0.
BANNER = re.compile(
    r"-{60,}\n(?:.*\n)*?-{60,}\n|={60,}\n(?:.*\n)*?={60,}\n(?:YOUR APPLICATION.*\n(?:.*\n)*)?"
    r"|^(?:Abort\(|MPI_ABORT |\[[^]\n]*\] (?:PMIX|PRTE) ERROR|\[warn\] Epoll ).*(?:\n|\Z)",
    re.MULTILINE,
)


# ---- Reading a page


@dataclass
class Block:
    """A fenced block, or one that is indented."""

    page: pathlib.Path
    line: int
    language: str
    title: str
    lines: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.page.name}, line {self.line}"

    @property
    def file_name(self) -> str:
        """Return the name of the file that it is, or an empty string."""
        if self.language != "python" or self.title.startswith(NOT_RUN):
            return ""
        comment = re.fullmatch(r"# ([\w-]+\.py)", self.lines[0]) if self.lines else None
        return self.title or (comment.group(1) if comment else "")


FENCE = re.compile(r"(\s*)(```+|~~~+)\s*([\w-]*)(.*)")
ITEM = re.compile(r"\s*([-*+]|\d+\.)\s|!!!|\?\?\?")


def blocks_of(page: pathlib.Path, text: str) -> Iterator[Block]:
    """Yield the blocks of code of a page."""
    block: Block | None = None
    end = ""
    context = before = ""  # the last line that was not indented, and the last line
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if block is not None and end:
            if line.strip() == end:
                yield block
                block, end = None, ""
            else:
                block.lines.append(line)
        elif fence:
            indent, end, language, rest = fence.groups()
            assert not indent, f"{page.name}, line {number}: the fence of a block is not indented"
            title = re.fullmatch(r'(?:\s*title="([^"]*)")?\s*', rest)
            assert title, f"{page.name}, line {number}: {rest!r} behind the fence is unknown"
            block = Block(page, number, language, title.group(1) or "")
        elif line.startswith("    ") and not ITEM.match(context) and (block or not before.strip()):
            block = block or Block(page, number, "", "")
            block.lines.append(line[4:])
        elif line.strip():
            if block is not None:
                yield block
                block = None
            if not line.startswith(" "):
                context = line
        before = line
    assert not end, f"{page.name}: the block at its end is not closed"
    if block is not None:
        yield block


# ---- Comparing


def _plain(line: str) -> str:
    line = re.sub(r"(worker \d+) \([^)\s]+\) in ", r"\1 (host) in ", line.rstrip())
    line = re.sub(r"(worker \d+) \([^)\s]+, pid \d+\) ", r"\1 (host, pid) ", line)
    return re.sub(r'(File "|\()/\S*/(\w+\.py\b)', r"\1/\2", line)


def _marks_only(line: str) -> bool:
    return bool(re.fullmatch(r"\s*[\^~]+[\^~\s]*", line))


def lines_of(text: str) -> list[str]:
    """Return the lines that a terminal would show, without what differs between machines."""
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)
    overwritten = (line.rpartition("\r")[2] for line in text.split("\n"))
    lines = [_plain(line) for line in overwritten]
    return [line for line in lines if line and not _marks_only(line)]


def streams_of(*outputs: str) -> list[tuple[str, ...]]:
    """Return what must be in order: the lines of each worker in each output, and the others."""
    streams: list[tuple[str, ...]] = []
    for output in outputs:
        by_label: dict[str, list[str]] = {}
        for line in lines_of(BANNER.sub("", output)):
            label = re.match(r"(\[worker \d+\] )?", line)
            by_label.setdefault(label.group() if label else "", []).append(line)
        streams += [tuple(lines) for lines in by_label.values()]
    return streams


def agrees(shown: Sequence[str], streams: Sequence[Sequence[str]]) -> bool:
    """Tell whether the lines shown are the streams, in any order among each other."""
    patterns = [
        None if line == "…" else re.compile(".*".join(map(re.escape, line.split("…"))))
        for line in shown
    ]

    @functools.cache
    def rest_agrees(at: int, positions: tuple[int, ...]) -> bool:
        if at == len(patterns):
            return all(p == len(s) for p, s in zip(positions, streams, strict=True))
        pattern = patterns[at]
        if pattern is None and rest_agrees(at + 1, positions):
            return True
        for i, stream in enumerate(streams):
            if positions[i] < len(stream) and (
                pattern is None or pattern.fullmatch(stream[positions[i]])
            ):
                then = (*positions[:i], positions[i] + 1, *positions[i + 1 :])
                if rest_agrees(at if pattern is None else at + 1, then):
                    return True
        return False

    return rest_agrees(0, (0,) * len(streams))


def check(where: str, shown: Sequence[str], *outputs: str) -> None:
    expected = lines_of("\n".join(shown))
    if not agrees(expected, streams_of(*outputs)):
        printed = "\n".join(line for output in outputs for line in lines_of(output))
        pytest.fail(
            f"{where}: the page shows\n\n{chr(10).join(expected)}\n\nand printed was\n\n{printed}",
            pytrace=False,
        )


# ---- Running


def environment() -> Mapping[str, str]:
    scripts = sysconfig.get_path("scripts")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPMD_DISCO_", "SLURM_"))}
    return {
        **OPEN_MPI,
        "OMP_NUM_THREADS": "1",
        **kept,
        "PATH": scripts + os.pathsep + os.environ["PATH"],
    }


def _decode(output: bytes) -> str:
    # Open MPI's output may hold NUL bytes, and its terminals write "\r\n".
    return output.decode(errors="replace").replace("\0", "").replace("\r\n", "\n")


def run(command: str, folder: pathlib.Path, where: str) -> tuple[str, str]:
    """Run a shell command, and return what it has printed; its status must be 0."""
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            outputs = process.communicate(timeout=LIMIT)
        except BaseException:
            # The launcher passes SIGTERM on to its ranks.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
    out, err = map(_decode, outputs)
    if process.returncode:
        pytest.fail(f"{where}: {command}: status {process.returncode}\n{out}\n{err}", pytrace=False)
    return out, err


BETWEEN = "======== "


def program_of(blocks: Sequence[Block]) -> str:
    """Return one program, whose lines have the numbers that they have in the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines.append(f"print({BETWEEN + str(block.line)!r}, flush=True)")
        lines += block.lines
    return "\n".join(lines) + "\n"


def check_program(
    page: pathlib.Path, blocks: Sequence[Block], shown: Mapping[int, Block], folder: pathlib.Path
) -> None:
    """Run the blocks that make up the page's program, and compare what they show."""
    name = f"page_{page.stem.replace('-', '_')}.py"
    (folder / name).write_text(program_of(blocks), encoding="utf-8")
    out, err = run(f"{DEFAULT_RUN} {name}", folder, page.name)
    assert not err, f"{page.name}: its program prints to standard error:\n{err}"
    # What workers print comes when it comes: it is compared all at once.
    labelled = re.compile(r"^\[worker \d+\] .*\n", re.MULTILINE)
    _, *parts = re.split(rf"^{BETWEEN}(\d+)\n", labelled.sub("", out), flags=re.MULTILINE)
    printed = dict(zip(map(int, parts[::2]), parts[1::2], strict=True))
    from_workers: list[str] = []
    for block in blocks:
        output = shown.get(block.line)
        lines = [] if output is None else output.lines
        of_workers = [line for line in lines if line.startswith("[worker ")]
        from_workers += of_workers
        if output is not None:
            own = [line for line in lines if line not in of_workers]
            check(output.where, own, printed[block.line])
    check(page.name, from_workers, "".join(labelled.findall(out)))


def check_console(block: Block, folder: pathlib.Path) -> None:
    command = ""
    shown: list[str] = []
    for line in [*block.lines, "$ "]:
        if not line.startswith("$ "):
            assert command, f"{block.where}: a console block starts with a command"
            shown.append(line)
            continue
        if command:
            check(f"{block.where}: {command}", shown, *run(command, folder, block.where))
        command, shown = line[2:], []


def _uses(other: Block, file: Block, blocks: Sequence[Block]) -> bool:
    """Tell whether a block runs a file, or shows what it prints."""
    if other.language == "console" or not other.language:
        return any(file.file_name in line for line in other.lines)
    return other.language == "text" and blocks[blocks.index(other) - 1] is file


def check_page(page: pathlib.Path, text: str, folder: pathlib.Path) -> None:
    """Do all that the head of this file says."""
    program: list[Block] = []
    outputs: dict[int, Block] = {}
    steps: list[tuple[Block, Block | None]] = []
    before: Block | None = None
    blocks = list(blocks_of(page, text))
    for block in blocks:
        after, before = before, block
        if block.title.startswith(NOT_RUN):
            assert block.title.removeprefix(NOT_RUN).strip(), f"{block.where}: no reason is given"
        elif block.language == "python" and block.file_name:
            code = "\n".join(block.lines) + "\n"
            (folder / block.file_name).write_text(code, encoding="utf-8")
            assert any(_uses(other, block, blocks) for other in blocks), (
                f"{block.where}: nothing on the page runs {block.file_name}"
            )
        elif block.language == "python":
            program.append(block)
        elif block.language == "text" and after is not None and after.language == "python":
            if after.file_name:
                steps.append((after, block))
            else:
                outputs[after.line] = block
        elif block.language == "console" and not block.title:
            steps.append((block, None))
        elif not block.language and page.name == "README.md":
            known = [first for first in README_INDENTED if block.lines[0].startswith(first)]
            assert known, f"{block.where}: README_INDENTED does not know this block"
            before = after
        else:
            pytest.fail(
                f"{block.where}: a block of {block.language or 'no language'} that is not run: see "
                f"{pathlib.Path(__file__).name} for what can be, or mark it by "
                f'title="{NOT_RUN}…"',
                pytrace=False,
            )
    if program:
        check_program(page, program, outputs, folder)
    for block, output in steps:
        if output is None:
            check_console(block, folder)
        else:
            name = shlex.quote(block.file_name)
            check(output.where, output.lines, *run(f"{DEFAULT_RUN} {name}", folder, block.where))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_snippets(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if page.stem == "examples":
        for package in ("matplotlib", "rich"):
            pytest.importorskip(package, reason=f"the examples need {package}: their extra has it")
        (tmp_path / "docs").symlink_to(REPO / "docs")
    check_page(page, page.read_text(encoding="utf-8"), tmp_path)


# ---- The checker itself


def failure_of(text: str, folder: pathlib.Path) -> str:
    try:
        check_page(REPO / "page.md", text, folder)
    except (AssertionError, pytest.fail.Exception) as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```bash\nls\n```\n", "not run"),
        ('```python title="a.py"\n1\n```\n', "nothing on the page runs a.py"),
        ("text\n\n    ls\n", "not run"),
        ("```text\nalone\n```\n", "not run"),
        ('```bash title="not run by the tests: "\nls\n```\n', "no reason"),
        ("- item\n\n  ```python\n  1\n  ```\n", "not indented"),
        ("```python\n1\n", "not closed"),
        ("```console\n$ false\n```\n", "status 1"),
        ("```console\n$ echo one\ntwo\n```\n", "printed was\n\none"),
        ("```console\n$ echo one\n```\n", "printed was\n\none"),
        ("```console\n$ true\none\n```\n", "page shows\n\none"),
    ],
)
def test_the_checker_complains(text: str, complaint: str, tmp_path: pathlib.Path) -> None:
    assert complaint in failure_of(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '```bash title="not run by the tests: it needs a cluster"\nsbatch job\n```\n',
        "- an item\n\n    goes on\n",
        "```console\n$ echo 1; echo 2 >&2; echo 3\n1\n3\n2\n$ echo a b c\na … c\n```\n",
        "```console\n$ seq 9\n1\n…\n9\n```\n",
        '```python title="a.py"\nprint(7)\n```\n\n```console\n$ python a.py\n7\n```\n',
    ],
)
def test_the_checker_accepts(text: str, tmp_path: pathlib.Path) -> None:
    assert failure_of(text, tmp_path) == ""


def test_lines_of_a_worker_keep_their_order() -> None:
    printed = "[worker 1] a\n[worker 0] a\n[worker 1] b\n[worker 0] b\nend\n"
    shown = ["[worker 0] a", "[worker 0] b", "[worker 1] a", "[worker 1] b", "end"]
    assert agrees(shown, streams_of(printed))
    shown[0:2] = reversed(shown[0:2])
    assert not agrees(shown, streams_of(printed))
