"""The pages of docs/ say all that the code has, and build without a warning."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import spmd_disco as di
from spmd_disco import builtin

REPO = pathlib.Path(__file__).parents[2]
DOCS = REPO / "docs"
NOWHERE = "http://127.0.0.1:9"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def settings_in_the_code() -> Iterator[tuple[str, object]]:
    """Yield names and defaults of all settings that the package reads from the environment."""
    for path in (REPO / "spmd_disco").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in ("setting", "flag") and path.name != "config.py":
                name, default = map(ast.literal_eval, node.args[:2])
                yield f"SPMD_DISCO_{name}", default


def test_environment_variables_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(SPMD_DISCO_\w+)` \| ([^|]+) \|", page("environment.md"), re.MULTILINE)
    documented = dict(rows)
    assert len(documented) == len(rows), "a variable has two rows"
    paths = (p for p in (REPO / "scripts").rglob("*[!~]") if p.is_file() and p.suffix != ".pyc")
    scripts = "".join(p.read_text(encoding="utf-8") for p in (*paths, REPO / "setup.py"))
    of_scripts = set(re.findall(r"SPMD_DISCO_\w+", scripts))
    in_the_code = dict(settings_in_the_code())
    assert set(documented) == set(in_the_code) | of_scripts
    for name, default in in_the_code.items():
        shown = documented[name]
        if default is None:
            assert shown == "none", name
        elif default == "":
            assert shown == "what is best", name
        else:
            assert float(shown) == float(default), name  # type: ignore[arg-type]


def test_the_reference_has_every_public_name() -> None:
    documented = re.findall(r"^::: spmd_disco\.(\w+)$", page("api.md"), re.MULTILINE)
    assert sorted(documented) == sorted(di.__all__)


def test_the_reference_has_every_function_of_the_workers() -> None:
    rows = re.findall(r"^\| `(runtime\.disco\.\w+)` \|(.*) \|$", page("api.md"), re.MULTILINE)
    functions = {
        builtin.PREFIX + name: function
        for name, function in vars(builtin).items()
        if getattr(function, "__module__", "") == builtin.__name__
        and di.get_global_func(builtin.PREFIX + name, allow_missing=True) is function
        and not name.startswith("_")
    }
    assert sorted(name for name, _ in rows) == sorted(functions)
    for name, description in rows:
        parameters = inspect.signature(functions[name]).parameters.values()
        given = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        if given:
            assert f"`{', '.join(given)}`" in description, name


def test_the_launching_page_has_every_option() -> None:
    from spmd_disco.options import HELP

    shown = re.findall(r"^  .*", page("launching.md"), re.MULTILINE)
    for line in filter(None, HELP.splitlines()):
        if line.startswith("  "):
            assert line in shown, line


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md", "docs/examples.md"])
def test_files_that_are_named_exist(name: str) -> None:
    text = (REPO / name).read_text(encoding="utf-8")
    for named in re.findall(r"`([\w./-]+\.(?:py|md|sh|toml|yml))`", text):
        places = (REPO / named, REPO / "spmd_disco" / named)
        assert any(place.exists() for place in places), f"{name} names {named}"


def test_the_benchmarks_are_measured() -> None:
    parts = re.findall(
        r"<!-- measured: ([\w-]+) -->\n(.*?)<!-- end -->", page("benchmarks.md"), re.DOTALL
    )
    assert [name for name, _ in parts] == [
        *("environment", "control", "collectives-2", "collectives-4")
    ]
    for name, text in parts:
        assert re.search(r"^(Measured on \d{4}-|\| )", text, re.MULTILINE), name


def test_site_builds_without_a_warning(tmp_path: pathlib.Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[docs]'")
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=REPO,
        # Nothing may be fetched while it builds: there is no such proxy.
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "https_proxy": NOWHERE,
            "http_proxy": NOWHERE,
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr, built.stderr
    for source in DOCS.rglob("*.md"):
        html = site / source.relative_to(DOCS).with_suffix(".html")
        text = html.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="(https?://[^"]*)"', text)
        assert not loaded, f"{html.name} loads {loaded}"
    api = (site / "api.html").read_text(encoding="utf-8")
    for name in di.__all__:
        assert f'id="spmd_disco.{name}"' in api, name
    for cls, attributes in ((di.Session, set()), (di.DRef, {"reg_id", "session"})):
        for name in dir(cls):
            if not name.startswith("_") and name not in attributes:
                assert f'id="spmd_disco.{cls.__name__}.{name}"' in api, name
