"""What a function's pickle depends on."""

import math
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from spmd_disco.fingerprint import fingerprint, is_settled


def define(source: str, **others: Any) -> dict[str, Any]:
    """Run a program of its own, whose functions nobody can import."""
    scope: dict[str, Any] = {"__name__": "__main__", **others}
    exec(source, scope)
    return scope


def same(a: list[object] | None, b: list[object] | None) -> bool:
    assert a is not None
    assert b is not None
    return len(a) == len(b) and all(map(operator.is_, a, b))


def test_nothing_changed() -> None:
    scope = define("def f(x: int, y=2, *, z=3) -> int:\n    return x + y + z + K\nK = 4")
    first = fingerprint(scope["f"])
    assert first is not None
    assert is_settled(first)
    assert same(first, fingerprint(scope["f"]))


def change_global(scope: dict[str, Any]) -> None:
    scope["K"] = 5


def change_default(scope: dict[str, Any]) -> None:
    scope["f"].__defaults__ = (7,)


def change_keyword_default(scope: dict[str, Any]) -> None:
    scope["f"].__kwdefaults__ = {"z": 9}


def change_code(scope: dict[str, Any]) -> None:
    scope["f"].__code__ = define("def f(x, y=2, *, z=3): return 0")["f"].__code__


def change_helper(scope: dict[str, Any]) -> None:
    exec("def helper(x): return 1", scope)


def change_what_the_helper_uses(scope: dict[str, Any]) -> None:
    scope["L"] = 5


def add_an_attribute(scope: dict[str, Any]) -> None:
    scope["f"].note = "new"


def define_a_missing_global(scope: dict[str, Any]) -> None:
    scope["missing"] = 1


def remove_a_global(scope: dict[str, Any]) -> None:
    del scope["K"]


def change_inside_a_nested_function(scope: dict[str, Any]) -> None:
    scope["INNER"] = 5


@pytest.mark.parametrize(
    "change",
    [
        change_global,
        change_default,
        change_keyword_default,
        change_code,
        change_helper,
        change_what_the_helper_uses,
        add_an_attribute,
        define_a_missing_global,
        remove_a_global,
        change_inside_a_nested_function,
    ],
)
def test_a_change_shows(change: Callable[[dict[str, Any]], None]) -> None:
    scope = define(
        "K = 4\nL = 3\nINNER = 1\n"
        "def helper(x): return x + L\n"
        "def f(x, y=2, *, z=3):\n"
        "    def inner(): return INNER\n"
        "    return helper(x) + y + z + K + inner() + missing\n"
    )
    first = fingerprint(scope["f"])
    assert first is not None
    change(scope)
    assert not same(first, fingerprint(scope["f"]))


def test_a_closure_counts() -> None:
    def make(value: object) -> types.FunctionType:
        def f() -> object:
            return value

        return f  # type: ignore[return-value]

    one, two = fingerprint(make(1)), fingerprint(make(2))
    assert not same(one, two)
    assert same(one, fingerprint(make(1)))
    assert one is not None
    assert is_settled(one)
    mutable = fingerprint(make([1]))
    assert mutable is not None
    assert not is_settled(mutable)


def test_recursion_ends() -> None:
    scope = define("def f(): return g()\ndef g(): return f()")
    parts = fingerprint(scope["f"])
    assert parts is not None
    assert is_settled(parts)


@pytest.mark.parametrize(
    "value", [[1], {}, set(), bytearray(b"x"), object(), (1, [2]), print.__self__]
)
def test_what_can_change_is_not_settled(value: Any) -> None:
    parts = fingerprint(define("def f(): return V", V=value)["f"])
    assert parts is not None
    # A module that can be imported goes by its name.
    assert is_settled(parts) is isinstance(value, types.ModuleType)


def test_a_class_of_the_program_is_not_settled() -> None:
    parts = fingerprint(define("class C: pass\ndef f(): return C")["f"])
    assert parts is not None
    assert not is_settled(parts)


def test_names_that_others_can_import_are_settled() -> None:
    source = "def f(): return math.sin(1), sin, Decimal"
    from decimal import Decimal

    parts = fingerprint(define(source, math=math, sin=math.sin, Decimal=Decimal)["f"])
    assert parts is not None
    assert is_settled(parts)


def test_a_module_made_by_hand_is_not_settled() -> None:
    parts = fingerprint(define("def f(): return m", m=types.ModuleType("by_hand"))["f"])
    assert parts is not None
    assert not is_settled(parts)


def test_modules_that_go_by_value_settle_nothing() -> None:
    import spmd_disco.copying as module

    parts = fingerprint(define("def f(): return 1")["f"])
    assert parts is not None
    cloudpickle.register_pickle_by_value(module)
    try:
        assert not is_settled(parts)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert is_settled(parts)


def test_too_many_functions_are_not_followed() -> None:
    lines = [f"def f{i}(): return f{i + 1}()" for i in range(100)]
    assert fingerprint(define("\n".join(lines))["f0"]) is None


def test_functions_in_tuples_settle_nothing() -> None:
    for source in ("def f(): return H[0]()", "def f(h=H): return h[0]()"):
        scope = define("K = 1\ndef g(): return K\nH = (g,)")
        exec(source, scope)
        parts = fingerprint(scope["f"])
        assert parts is not None
        assert not is_settled(parts)


def test_a_submodule_that_is_imported_later_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    import xml

    scope = define("def f(): return xml.anything", xml=xml)
    first = fingerprint(scope["f"])
    monkeypatch.setitem(sys.modules, "xml.anything", types.ModuleType("xml.anything"))
    assert not same(first, fingerprint(scope["f"]))
