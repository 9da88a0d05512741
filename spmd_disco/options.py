"""The command line of ``python -m spmd_disco``: options, the program, and its own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["HELP", "Options", "UsageError", "parse"]

HELP = """\
usage: python -m spmd_disco [options] file.py | -m module | -c code | - [args ...]

Run a program on rank 0 of an MPI job, while the other ranks serve its sessions:

    mpirun -n 4 python -m spmd_disco app.py

or, with -n and without any MPI, let its sessions start their workers on this machine:

    python -m spmd_disco -n 4 app.py

program:
  file.py            a Python file, or a folder or zip file with a __main__.py
  -m module          a module, as python -m runs it
  -c code            the code itself
  -                  the code read from standard input
  args ...           what the program finds in sys.argv[1:]

options:
  -n N               start N workers (the program's process is one) instead of using MPI's ranks
  --num-groups N     groups of workers in sessions that do not say otherwise
  --no-prefix        no "[worker 2] " before the lines that worker functions print
  --tvm              have sessions serve TVM's functions, for modules that TVM has compiled
  -i                 a prompt after the program, or without a program
  --info             what to paste into a bug report: versions, MPI, ranks, cores, GPUs
  --allow-singleton  go on with one rank where the job should have more
  --version          the version of spmd_disco
  -h, --help         this text

Settings in the environment are named SPMD_DISCO_*; an option or a keyword argument beats them.
"""

#: Options without a value that only set a field.
_FLAGS = {
    "--no-prefix": "no_prefix",
    "--tvm": "tvm",
    "-i": "interactive",
    "--allow-singleton": "allow_singleton",
}
_ACTIONS: dict[str, Literal["help", "version", "info"]] = {
    "-h": "help",
    "--help": "help",
    "--version": "version",
    "--info": "info",
}


class UsageError(ValueError):
    """The command line cannot be understood; the text is one sentence for the user."""


@dataclass
class Options:
    """What the command line asks for.

    Attributes
    ----------
    action : {"run", "help", "version", "info"}
    kind : {"file", "module", "code", "stdin", None}
        What kind of program `program` is; None without a program (a prompt).
    program : str
        The file, the module's name, or the code.
    args : list of str
        The program's own arguments.
    num_workers : int or None
        For sessions that start their workers.
    num_groups : int or None
    no_prefix, tvm, interactive, allow_singleton : bool
    """

    action: Literal["run", "help", "version", "info"] = "run"
    kind: Literal["file", "module", "code", "stdin"] | None = None
    program: str = ""
    args: tuple[str, ...] = ()
    num_workers: int | None = None
    num_groups: int | None = None
    no_prefix: bool = False
    tvm: bool = False
    interactive: bool = False
    allow_singleton: bool = False


def _number(option: str, text: str, also: str = "") -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{option} {text}: a whole number from 1 is allowed{also}")
    return number


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line, up to and without the program's own arguments.

    Parameters
    ----------
    argv : sequence of str
        Without the launcher's own name.

    Raises
    ------
    UsageError
        An option is unknown or lacks its value, or there is nothing to run.
    """
    options = Options()
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if arg in _ACTIONS:
            options.action = _ACTIONS[arg]
            return options
        if arg in _FLAGS:
            setattr(options, _FLAGS[arg], True)
        elif name == "--num-groups":
            if not equals:
                if not rest:
                    raise UsageError("--num-groups needs a number, as in --num-groups 2")
                value = rest.pop(0)
            options.num_groups = _number("--num-groups", value, ", which divides the ranks")
        elif arg[:2] == "-n":
            if arg == "-n" and not rest:
                raise UsageError("-n needs a number, as in -n 4")
            options.num_workers = _number("-n", arg[2:] or rest.pop(0))
        elif arg[:2] in ("-m", "-c"):
            # As python has it: the value may be attached, and everything after it is the program's.
            options.kind = "module" if arg[:2] == "-m" else "code"
            options.program = arg[2:] or (rest.pop(0) if rest else "")
            if not options.program:
                what = "the name of a module" if arg == "-m" else "the code to run"
                raise UsageError(f"{arg} needs an argument: {what}")
            break
        elif arg == "-":
            options.kind = "stdin"
            break
        elif arg.startswith("-") and arg != "--":
            raise UsageError(
                f"unknown option {arg}; options of the program go behind it, "
                "and --help lists those of spmd_disco"
            )
        elif arg != "--" or rest:
            options.kind = "file"
            options.program = arg if arg != "--" else rest.pop(0)
            break
    options.args = tuple(rest)
    if options.kind is None and not options.interactive:
        raise UsageError(
            "no program given: name a file, -m module, -c code or - for standard input, "
            "or -i for a prompt"
        )
    return options
