"""The accelerator that an env worker's simulators render on: that of its placement.

CUDA and EGL number a machine's devices each in their own order, and ``CUDA_VISIBLE_DEVICES`` renumbers CUDA's alone.
What both know is where a device sits on the PCI bus.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_DRM_DEVICE_FILE: Final = 0x3233
"""EGL_DRM_DEVICE_FILE_EXT, of EGL_EXT_device_drm."""
_MOST: Final = 64
_SYSTEM: Final = Path("/")
_VARIABLE: Final = "MUJOCO_EGL_DEVICE_ID"

_chosen = "cpu"


def chosen() -> str:
    """torch device of this process's simulators, ``cpu`` or ``cuda:<index>``."""
    return _chosen


def use(device: str) -> None:
    """Have this process's simulators render on a torch device; before any is imported.

    MuJoCo is told by ``MUJOCO_EGL_DEVICE_ID``; where that is set already it stays. Where EGL's devices cannot be
    matched with CUDA's, MuJoCo takes its first, and the process says so.
    """
    global _chosen
    _chosen = device
    if not device.startswith("cuda") or _VARIABLE in os.environ:
        return
    addresses = egl_addresses()
    wanted = cuda_address(device)
    if wanted is not None and wanted in addresses:
        os.environ[_VARIABLE] = str(addresses.index(wanted))
    elif len(addresses) > 1:
        print(
            f"{device} is at PCI address {wanted}, and none of EGL's devices is known to be ({addresses}): simulators "
            f"render on the first; set {_VARIABLE} for another",
            file=sys.stderr,
        )


def egl_addresses() -> list[str | None]:
    """PCI address of each of EGL's devices in its order, such as ``0000:3b:00.0``; None for one in software."""
    return [_address_of(file) for file in _egl_files()]


def cuda_address(device: str) -> str | None:
    """PCI address of a torch device; None where NVIDIA's driver does not say."""
    import torch

    if not torch.cuda.is_available():
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid).lower().removeprefix("gpu-")
    for file in sorted((_SYSTEM / "proc/driver/nvidia/gpus").glob("*/information")):
        text = file.read_text()
        if (found := re.search(r"GPU UUID:\s*GPU-(\S+)", text)) and found[1].lower() == uuid:
            return file.parent.name.lower()
    return None


def _address_of(drm_file: str | None) -> str | None:
    """``/dev/dri/card1`` -> the PCI address that the kernel's file system gives it."""
    if drm_file is None:
        return None
    link = _SYSTEM / "sys/class/drm" / Path(drm_file).name / "device"
    return link.resolve().name.lower() if link.exists() else None


def _egl_files() -> Sequence[str | None]:
    """The kernel's file of each of EGL's devices, in its order."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return []
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    query, describe = (egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglQueryDeviceStringEXT"))
    if not query or not describe:
        return []
    devices, count = (ctypes.c_void_p * _MOST)(), ctypes.c_int()
    listing = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(query)
    naming = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)(describe)
    if not listing(_MOST, devices, ctypes.byref(count)):
        return []
    names = [naming(device, _DRM_DEVICE_FILE) for device in devices[: count.value]]
    return [name.decode() if name else None for name in names]
