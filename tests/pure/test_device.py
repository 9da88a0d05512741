"""Devices, by whatever names them, and which runtimes there are."""

from __future__ import annotations

import enum
import importlib.util
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import spmd_disco as di
from spmd_disco import native
from spmd_disco.device import NAMES


def test_names_and_pairs():
    assert di.cpu() == di.Device(1, 0) == di.Device.of("cpu") == di.Device.of((1, 0))
    assert di.cuda(2) == di.Device(2, 2) == di.Device.of("cuda:2") == di.Device.of([2, np.int64(2)])
    assert di.Device.of("llvm") == di.cpu()
    assert di.Device.of("gpu:1") == di.Device.of("nvptx:1") == di.cuda(1)
    assert di.Device.of(di.cpu(2)).index == 2
    assert di.cpu(1).__dlpack_device__() == (1, 1)
    assert di.cuda().dlpack_device_type() == 2
    assert len({di.cpu(), di.cpu(0), di.cpu(1), di.cuda(0)}) == 3


@pytest.mark.parametrize(("code", "name"), NAMES.items())
def test_every_type_of_dlpack(code, name):
    device = di.Device(code, 3)
    assert str(device) == f"{name}:3"
    assert device.name == name
    assert di.Device.of(str(device)) == device == di.Device.of((code, 3))
    assert di.Device.of(name) == di.Device(code)
    assert pickle.loads(pickle.dumps(device)) == device


def test_integers_of_any_kind_become_ints():
    class Kind(enum.IntEnum):
        CPU = 1

    for kind in (np.int8(1), np.uint64(1), Kind.CPU, True):
        device = di.Device(kind, np.int32(4))
        assert type(device.type) is type(device.index) is int
        assert device == di.cpu(4)
        assert hash(device) == hash(di.cpu(4))


@pytest.mark.parametrize(
    "wrong",
    [
        "abacus",
        "cpu:",
        "cpu:x",
        "cpu:-1",
        "cpu:1:2",
        "cpu:²",
        "",
        "CPU",
        (5, 0),
        (0, 0),
        (99, 0),
        (1, -1),
        (1, 2**31),
        (2**40, 0),
    ],
)
def test_what_is_no_device(wrong):
    with pytest.raises(ValueError, match="device"):
        di.Device.of(wrong)


@pytest.mark.parametrize(
    "wrong", [None, 3, (1, 2, 3), (1,), {}, ("cpu", 0), (1.0, 0), (1, None), b"cpu", di.Device]
)
def test_what_cannot_name_a_device(wrong):
    with pytest.raises(TypeError, match="device"):
        di.Device.of(wrong)


def test_what_has_a_dlpack_device():
    assert di.Device.of(np.zeros((2, 2))) == di.cpu()
    on_gpu = SimpleNamespace(__dlpack_device__=lambda: (2, 7))
    assert di.Device.of(on_gpu) == di.cuda(7)


def test_what_looks_like_a_device_of_pytorch():
    assert di.Device.of(SimpleNamespace(type="cuda", index=1)) == di.cuda(1)
    assert di.Device.of(SimpleNamespace(type="cpu", index=None)) == di.cpu()
    assert str(di.Device.of(SimpleNamespace(type="mps", index=0))) == "metal:0"
    assert str(di.Device.of(SimpleNamespace(type="xpu", index=1))) == "oneapi:1"
    with pytest.raises(ValueError, match="'meta' is unknown"):
        di.Device.of(SimpleNamespace(type="meta", index=None))


def test_devices_of_tvm_ffi():
    tvm_ffi = pytest.importorskip("tvm_ffi")
    for code in NAMES:
        theirs = tvm_ffi.device(code, 3)
        assert di.Device.of(theirs) == di.Device(code, 3)
        assert str(di.Device.of(theirs)) == str(theirs)
    assert di.Device.of(tvm_ffi.from_dlpack(np.zeros(4))) == di.cpu()


def test_devices_of_pytorch():
    torch = pytest.importorskip("torch")
    assert di.Device.of(torch.device("cuda", 1)) == di.cuda(1)
    assert di.Device.of(torch.device("cpu")) == di.cpu()
    assert di.Device.of(torch.zeros(2)) == di.cpu()


def test_where_arrays_of_the_host_should_lie():
    for device in (di.cuda(3), "cuda", "cuda_host", "cuda_managed:1"):
        assert str(di.preferred_host_device(device)) == "cuda_host:0"
    assert str(di.preferred_host_device("rocm:2")) == "rocm_host:0"
    for device in (di.cpu(2), "metal", "ext_dev"):
        assert di.preferred_host_device(device) == di.cpu()


def test_runtimes(monkeypatch):
    assert di.runtime_enabled("cpu")
    assert di.runtime_enabled("llvm")
    assert di.runtime_enabled("mpi") is (importlib.util.find_spec("mpi4py") is not None)
    assert di.runtime_enabled("peer") is native.available()
    assert not di.runtime_enabled("vulkan")
    assert di.runtime_enabled("gpu") is di.runtime_enabled("cuda")
    if importlib.util.find_spec("cupy") is None:
        assert not di.runtime_enabled("cuda")
        assert not di.runtime_enabled("nccl")
    monkeypatch.setenv("SPMD_DISCO_PEER_POOL", "0")
    assert not di.runtime_enabled("peer")
    with pytest.raises(ValueError, match=r"no runtime 'abacus'; allowed are cpu, cuda,.* peer"):
        di.runtime_enabled("abacus")
    with pytest.raises(TypeError, match="a str, not 3"):
        di.runtime_enabled(3)


def test_asking_for_mpi_does_not_load_it():
    code = "import sys, spmd_disco as di; di.runtime_enabled('mpi'); print([*sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'mpi4py.MPI'" not in run.stdout
    assert "'spmd_disco'" in run.stdout
