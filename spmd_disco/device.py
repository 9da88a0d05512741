"""Devices, by DLPack's numbering."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["NAMES", "Device", "cpu", "cuda", "preferred_host_device"]

#: DLPack's ``DLDeviceType``, by the names that TVM gives them.
TYPES = {
    "cpu": 1,
    "cuda": 2,
    "cuda_host": 3,
    "opencl": 4,
    "vulkan": 7,
    "metal": 8,
    "vpi": 9,
    "rocm": 10,
    "rocm_host": 11,
    "ext_dev": 12,
    "cuda_managed": 13,
    "oneapi": 14,
    "webgpu": 15,
    "hexagon": 16,
    "maia": 17,
    "trn": 18,
}
NAMES = {code: name for name, code in TYPES.items()}
#: Older names of TVM, and PyTorch's.
ALIASES = {
    "llvm": "cpu",
    "gpu": "cuda",
    "nvptx": "cuda",
    "cl": "opencl",
    "hip": "rocm",
    "mps": "metal",
    "xpu": "oneapi",
}
#: DLPack has a signed field of 32 bits for it.
LARGEST_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Device:
    """A device that arrays live on.

    Parameters
    ----------
    type : int
        DLPack's device type: 1 for the CPU, 2 for CUDA, and so on.
    index : int
        Which of the devices of that type, from 0.

    Raises
    ------
    ValueError
        DLPack has no such type, or the index is out of range.
    TypeError
        They are not integers.
    """

    type: int
    index: int = 0

    def __post_init__(self) -> None:
        for field in ("type", "index"):
            value = getattr(self, field)
            if type(value) is not int:
                try:
                    object.__setattr__(self, field, operator.index(value))
                except TypeError:
                    raise TypeError(f"a device's {field} is an int, not {value!r}") from None
        if self.type not in NAMES:
            allowed = ", ".join(f"{code} ({name})" for code, name in NAMES.items())
            raise ValueError(f"device type {self.type!r} is unknown; allowed are {allowed}")
        if self.index < 0:
            raise ValueError(f"device index {self.index} is negative")
        if self.index > LARGEST_INDEX:
            raise ValueError(f"device index {self.index} is larger than {LARGEST_INDEX}")

    @classmethod
    def of(cls, device: Device | str | Sequence[int] | Any) -> Device:
        """Return the device that `device` names.

        Parameters
        ----------
        device : Device, str, pair of int, or object
            A name such as ``"cpu"`` or ``"cuda:1"``; a DLPack pair ``(type, index)``; a device
            object of TVM or PyTorch; or anything with ``__dlpack_device__``, such as an array.

        Raises
        ------
        ValueError
            The name or the pair is not that of a device.
        TypeError
            `device` is something else.
        """
        if isinstance(device, Device):
            return device
        if isinstance(device, str):
            return cls._named(device)
        return cls._of_object(device)

    @classmethod
    def _of_object(cls, device: Any) -> Device:
        if isinstance(device, type):  # its methods would want an object
            raise cls._no_device(device)
        if hasattr(device, "__dlpack_device__"):
            kind, number = device.__dlpack_device__()
            return cls(int(kind), int(number))
        # Of TVM, whose name of the type says less where it is a device of an RPC server.
        if hasattr(device, "dlpack_device_type"):
            return cls(int(device.dlpack_device_type()), device.index)
        # Of PyTorch, whose index is None for the current one.
        name, index = getattr(device, "type", None), getattr(device, "index", None)
        if isinstance(name, str) and (index is None or isinstance(index, int)):
            return cls(cls._named(name).type, index or 0)
        try:
            kind, number = device
        except (TypeError, ValueError):
            raise cls._no_device(device) from None
        return cls(kind, number)

    @staticmethod
    def _no_device(device: object) -> TypeError:
        return TypeError(
            "a device is a Device, a name such as 'cuda:1', a DLPack pair or a device object of "
            f"TVM or PyTorch, not {device!r}"
        )

    @classmethod
    def _named(cls, text: str) -> Device:
        name, colon, index = text.partition(":")
        name = ALIASES.get(name, name)
        if name not in TYPES or (colon and not (index.isascii() and index.isdecimal())):
            allowed = ", ".join(TYPES)
            raise ValueError(
                f"device {text!r} is unknown; allowed are {allowed}, with «:index» if wanted"
            )
        return cls(TYPES[name], int(index or 0))

    @property
    def name(self) -> str:
        """The name of its type: ``"cpu"``, ``"cuda"`` and so on."""
        return NAMES[self.type]

    def dlpack_device_type(self) -> int:
        """Return its type, as TVM's method of this name does."""
        return self.type

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.type, self.index

    def __str__(self) -> str:
        return f"{self.name}:{self.index}"


def cpu(index: int = 0) -> Device:
    """Return the CPU as a device."""
    return Device(TYPES["cpu"], index)


def cuda(index: int = 0) -> Device:
    """Return a CUDA GPU as a device. Whether there is one is not asked: see `runtime_enabled`.

    Parameters
    ----------
    index : int
        Which of those that this process sees.
    """
    return Device(TYPES["cuda"], index)


def preferred_host_device(device: Device | str | Any) -> Device:
    """Return where arrays of the host should lie that are copied to or from `device`.

    Parameters
    ----------
    device : Device
        Or what `Device.of` takes.

    Returns
    -------
    Device
        ``cuda_host:0``, memory that CUDA has pinned, for CUDA's devices, and ``rocm_host:0`` for
        ROCm's; else ``cpu:0``.
    """
    name = Device.of(device).name.partition("_")[0]
    return Device(TYPES.get(f"{name}_host", TYPES["cpu"]), 0)
