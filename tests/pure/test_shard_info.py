"""How `shard_info` is understood, what it refuses, and the names of presharded parameters."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spmd_disco.loading.progress import bytes_text, line
from spmd_disco.loading.shard_info import (
    ShardStep,
    parse_chain,
    parse_shard_info,
    part_of,
    placement,
    presharded,
    shard_name,
    split_name,
)

QKV = {
    "w_qkv": [
        ["shard_qkv_0", [[2, 14, 10, 20], "float16"], 2, 8, 10],
        ["shard_qkv_1", [[2, 140, 20], "bfloat16"]],
    ],
    "norm": [],
}


def place(spec: Any, shape: tuple[int, ...] = (4, 6), parts: int = 2) -> Any:
    return placement("w", shape, spec, parts, f"the {parts} workers")


def test_json_of_tvm() -> None:
    assert parse_shard_info(json.dumps(QKV)) == {
        "w_qkv": (
            ShardStep("shard_qkv_0", (2, 14, 10, 20), np.dtype(np.float16), (2, 8, 10)),
            ShardStep("shard_qkv_1", (2, 140, 20), np.dtype(ml_dtypes.bfloat16), ()),
        ),
        "norm": (),
    }
    assert parse_shard_info("") == parse_shard_info("{}") == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"w": 1}', "the shard_info of 'w' is 1, which is no chain"),
        ('{"w": "f"}', "the shard_info of 'w' is 'f', which is no chain"),
        ('{"w": [["f"]]}', "which is not [function, [shape, dtype], *extra]"),
        ('{"w": [["f", [[2]]]]}', "which is not [function"),
        ('{"w": ["abc"]}', "which is not [function"),
        ('{"w": [["", [[2], "int8"]]]}', "neither a name nor a callable"),
        ('{"w": [[3, [[2], "int8"]]]}', "neither a name nor a callable"),
        ('{"w": [["f", [[-2], "int8"]]]}', "no list of sizes"),
        ('{"w": [["f", [[2.0], "int8"]]]}', "no list of sizes"),
        ('{"w": [["f", [[true], "int8"]]]}', "no list of sizes"),
        ('{"w": [["f", [2, "int8"]]]}', "no list of sizes"),
        ('{"w": [["f", [[2], "int9"]]]}', "whose dtype 'int9' cannot be used"),
        ('{"w": [["f", [[2], 7]]]}', "whose dtype 7 cannot be used"),
        ('{"w": [["f", [[2], "int8"], [1]]]}', "whose extra argument [1]"),
        ('{"w": [["f", [[4611686018427387904, 4], "int8"]]]}', "would have"),
    ],
    ids=itertools.count(),
)
def test_what_is_no_shard_info(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse_shard_info(text)


def test_python_chain() -> None:
    (step,) = parse_chain("w", [(abs, ((2, 3), np.float32), "a", 1.5, None)])
    assert step == ShardStep(abs, (2, 3), np.dtype(np.float32), ("a", 1.5, None))
    with pytest.raises(ValueError, match="Python objects"):
        parse_chain("w", [(abs, ((2, 3), object))])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(None, None), ("replicate", None), ([], None), (0, 0), (1, 1), (-1, 1), (-2, 0)],
)
def test_placement(spec: Any, expected: Any) -> None:
    assert place(spec) == expected
    assert place(spec if not isinstance(spec, int) else np.int64(spec)) == expected


def test_placement_of_a_chain() -> None:
    chain = [["f", [[2, 4, 3], "float32"], 2]]
    assert place(chain) == (ShardStep("f", (2, 4, 3), np.dtype(np.float32), (2,)),)


@pytest.mark.parametrize(
    ("spec", "shape", "complaint"),
    [
        (2, (4, 6), "parameter 'w' of shape (4, 6) has no axis 2 to be split along: allowed are"),
        (-3, (4, 6), "has no axis -3"),
        (0, (), "none: it has no dimensions"),
        (0, (5, 6), "cannot be split along axis 0 among the 2 workers: 5 is not divisible by 2"),
        (-1, (4, 3), "along axis 1 among the 2 workers: 3 is not divisible by 2"),
        (True, (4, 6), "the shard_info of 'w' is True: allowed are"),
        (1.0, (4, 6), "is 1.0: allowed are"),
        ("rows", (4, 6), "is 'rows': allowed are"),
        ({}, (4, 6), "is {}: allowed are"),
        ([["f", [[3, 4], "int8"]]], (4, 6), "'f' has the shape (3, 4), whose first dimension must"),
        ([["f", [[], "int8"]]], (4, 6), "must be 2, one for each of the 2 workers"),
        ([["f", [[2], "int8"]], [abs, [[1], "int8"]]], (4, 6), "function 'abs' has the shape (1,)"),
    ],
    ids=itertools.count(),
)
def test_what_does_not_fit(spec: Any, shape: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        place(spec, shape)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (4, 3, 2), (0, 4), (4, 0)])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_make_up_the_whole(shape: tuple[int, ...], parts: int) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    for axis, size in enumerate(shape):
        if size % parts == 0:
            pieces = [array[part_of(shape, axis, i, parts)] for i in range(parts)]
            np.testing.assert_array_equal(np.concatenate(pieces, axis), array)
            assert len({piece.shape for piece in pieces}) == 1


@pytest.mark.parametrize("name", ["w", "", "a_shard-1-of-2", "-of-", "x\ny"])
@pytest.mark.parametrize(("part", "parts"), [(0, 1), (0, 2), (9, 10)])
def test_presharded_names(name: str, part: int, parts: int) -> None:
    assert split_name(shard_name(name, part, parts)) == (name, part, parts)


def test_names_of_tvm() -> None:
    assert shard_name("param_3", 0, 4) == "param_3_shard-1-of-4"
    for name in ("param_0", "w_shard-1-of-", "w_shard--1-of-2", "w_shard-1-of-2.bias"):
        assert split_name(name) is None


@pytest.mark.parametrize("name", ["w_shard-0-of-2", "w_shard-3-of-2", "w_shard-1-of-0"])
def test_names_of_shards_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match="which does not exist: shards count from 1"):
        split_name(name)


def test_presharded_parameters() -> None:
    names = ["a_shard-1-of-2", "b_shard-1-of-1", "c", "a_shard-2-of-2"]
    assert presharded(names) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["a_shard-2-of-3"], "has 1 of its 3 shards: 'a_shard-1-of-3' is missing"),
        (["a_shard-1-of-999999999999"], "has 1 of its 999999999999 shards"),
        (["a_shard-1-of-1", "a_shard-1-of-2"], "in 1 shards and in 2 shards: one is allowed"),
        (["a_shard-1-of-1", "a"], "in 1 shards and whole"),
    ],
)
def test_incomplete_shards(names: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        presharded(names)


# The progress bar ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")],
)
def test_bytes(n: int, text: str) -> None:
    assert bytes_text(n) == text


def test_progress_line() -> None:
    half = line("loading", 1 << 30, 2 << 30, 2.0, 80)
    assert half.rstrip().endswith(" 50% 1 GiB of 2 GiB, 512 MiB/s, 0:02 left")
    assert half.startswith("loading [####")
    done = line("loading", 2 << 30, 2 << 30, 4.0, 80)
    assert done.rstrip().endswith("100% 2 GiB of 2 GiB, 512 MiB/s, 0:04")
    assert "100%" in line("loading", 0, 0, 0.0, 80)


@pytest.mark.parametrize("width", [0, 1, 10, 40, 80, 200])
def test_progress_line_is_as_wide_as_it_may_be(width: int) -> None:
    for done in (0, 1, 12345, 10**6):
        assert len(line("loading", done, 10**6, 3.0, width)) == width
