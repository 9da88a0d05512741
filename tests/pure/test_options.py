"""The command line of ``python -m spmd_disco``."""

from __future__ import annotations

import pytest

from spmd_disco.options import Options, UsageError, parse


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["app.py"], Options(kind="file", program="app.py")),
        (["app.py", "-i", "--help"], Options(kind="file", program="app.py", args=("-i", "--help"))),
        (["-m", "a.b", "-x"], Options(kind="module", program="a.b", args=("-x",))),
        (["-ma.b", "-m"], Options(kind="module", program="a.b", args=("-m",))),
        (["-c", "1", "-c", "2"], Options(kind="code", program="1", args=("-c", "2"))),
        (["-cprint()"], Options(kind="code", program="print()")),
        (["-", "-i"], Options(kind="stdin", args=("-i",))),
        (["-i"], Options(interactive=True)),
        (["-i", "--", "-app.py"], Options(interactive=True, kind="file", program="-app.py")),
        (["--num-groups", "2", "a"], Options(num_groups=2, kind="file", program="a")),
        (["--num-groups=3", "-"], Options(num_groups=3, kind="stdin")),
        (["--no-prefix", "a"], Options(no_prefix=True, kind="file", program="a")),
        (["--allow-singleton", "a"], Options(allow_singleton=True, kind="file", program="a")),
        (["--info"], Options(action="info")),
        (["-i", "--version", "--nonsense"], Options(interactive=True, action="version")),
        (["-h"], Options(action="help")),
        (["--help"], Options(action="help")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_parse(argv, expected):
    assert parse(argv) == expected


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "no program given"),
        (["--"], "no program given"),
        (["--nonsense"], "unknown option --nonsense"),
        (["-x", "app.py"], "unknown option -x"),
        (["--no-prefix=1", "app.py"], "unknown option --no-prefix=1"),
        (["-m"], "-m needs an argument: the name of a module"),
        (["-c"], "-c needs an argument: the code to run"),
        (["--num-groups"], "--num-groups needs a number"),
        (["--num-groups", "two", "app.py"], "--num-groups two"),
        (["--num-groups=0", "app.py"], "--num-groups 0"),
        (["--num-groups=", "app.py"], "--num-groups"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(argv, text):
    with pytest.raises(UsageError, match=text) as caught:
        parse(argv)
    assert "\n" not in str(caught.value)
