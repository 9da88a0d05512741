"""Devices, by DLPack's numbering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Device", "cpu"]

#: DLPack's ``DLDeviceType``, for the kinds that a worker can have.
TYPES = {"cpu": 1, "cuda": 2}
NAMES = {code: name for name, code in TYPES.items()}
ALIASES = {"llvm": "cpu", "gpu": "cuda"}


@dataclass(frozen=True)
class Device:
    """A device that arrays live on.

    Parameters
    ----------
    type : int
        DLPack's device type: 1 for the CPU, 2 for CUDA.
    index : int
        Which of the devices of that type, from 0.
    """

    type: int
    index: int = 0

    def __post_init__(self) -> None:
        if self.type not in NAMES:
            allowed = ", ".join(f"{code} ({name})" for code, name in NAMES.items())
            raise ValueError(f"device type {self.type!r} is unknown; allowed are {allowed}")
        if self.index < 0:
            raise ValueError(f"device index {self.index} is negative")

    @classmethod
    def of(cls, device: Device | str | Sequence[int]) -> Device:
        """Return the device that ``"cpu"``, ``"cuda:1"`` or a DLPack pair ``(type, index)`` names.

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
            name, colon, index = device.partition(":")
            name = ALIASES.get(name, name)
            if name not in TYPES or (colon and not index.isdecimal()):
                allowed = ", ".join(TYPES)
                raise ValueError(
                    f"device {device!r} is unknown; allowed are {allowed}, with «:index» if wanted"
                )
            return cls(TYPES[name], int(index or 0))
        try:
            kind, number = device
            return cls(int(kind), int(number))
        except TypeError:
            raise TypeError(
                f"a device is a Device, a name such as 'cuda:1' or a DLPack pair, not {device!r}"
            ) from None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.type, self.index

    def __str__(self) -> str:
        return f"{NAMES[self.type]}:{self.index}"


def cpu(index: int = 0) -> Device:
    """Return the CPU as a device."""
    return Device(TYPES["cpu"], index)
