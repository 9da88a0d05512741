"""Global functions, and names that become callables."""

from __future__ import annotations

import functools
import math
import os.path
import sys
import types

import numpy as np
import pytest

import spmd_disco as di
from spmd_disco.registry import _functions, import_path, importable, resolve


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr("spmd_disco.registry._functions", dict(_functions))


def test_forms_of_registration():
    @di.register_func
    def a():
        return "a"

    @di.register_func()
    def b():
        return "b"

    @di.register_func("tests.c")
    def c():
        return "c"

    di.register_func("tests.d", lambda: "d")
    di.register_global_func(f=math.sqrt)
    here = f"{__name__}.test_forms_of_registration.<locals>"
    assert di.get_global_func(f"{here}.a") is a
    assert di.get_global_func(f"{here}.b") is b
    assert di.get_global_func("tests.c") is c
    assert di.get_global_func("tests.d")() == "d"
    assert di.get_global_func("math.sqrt") is math.sqrt
    assert di.register_global_func is di.register_func


def test_a_name_is_taken_once():
    f = di.register_func("tests.x", lambda: 1)
    assert di.register_func("tests.x", f) is f
    with pytest.raises(ValueError, match=r"tests\.x.*override=True"):
        di.register_func("tests.x", lambda: 2)
    di.register_func("tests.x", lambda: 3, override=True)
    assert di.get_global_func("tests.x")() == 3


def test_missing_functions():
    with pytest.raises(ValueError, match=r"'tests\.none'"):
        di.get_global_func("tests.none")
    assert di.get_global_func("tests.none", allow_missing=True) is None


@pytest.mark.parametrize(
    "args", [(3,), (3, len), ("name", 3), (None, 3), (functools.partial(len),)], ids=repr
)
def test_wrong_arguments(args):
    with pytest.raises(TypeError):
        di.register_func(*args)(3) if args == (3,) else di.register_func(*args)


def test_paths():
    assert import_path("math.sqrt") is math.sqrt
    assert import_path("os.path.join") is os.path.join
    assert import_path("numpy.linalg.norm") is np.linalg.norm
    assert import_path("builtins.len") is len
    assert import_path("collections:OrderedDict.fromkeys").__name__ == "fromkeys"
    for wrong in ("", "nope", "a..b", "no_such_module.f", "math.nope", "math.sqrt.nope", ".math"):
        with pytest.raises(ValueError, match=repr(wrong).strip("'") or "neither"):
            import_path(wrong)
    with pytest.raises(TypeError, match="not callable"):
        resolve("math.pi")


def test_an_import_error_within_a_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "breaks_inside.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        import_path("breaks_inside.f")


def test_importable():
    assert importable(math.sqrt) == "math:sqrt"
    assert importable(np.matmul) == "numpy:matmul"
    assert importable(os.path.join) == "posixpath:join"
    assert importable(int) == "builtins:int"
    assert importable(lambda: 1) is None
    assert importable(functools.partial(len)) is None
    assert importable([].append) is None

    def local():
        pass

    assert importable(local) is None
    module = types.ModuleType("made_by_hand")
    exec("def f(): pass", module.__dict__)
    sys.modules["made_by_hand"] = module
    try:
        assert importable(module.f) is None
    finally:
        del sys.modules["made_by_hand"]
