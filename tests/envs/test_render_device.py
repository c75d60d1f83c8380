"""CUDA's and EGL's devices are matched by their PCI address, here of a machine that is made up of files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from embodied_rl.envs import render_device
from embodied_rl.envs.rendering import importing_robosuite

ADDRESSES = ("0000:3b:00.0", "0000:1a:00.0", "0001:af:00.0")
"""In CUDA's order."""
FILES = [None, "/dev/dri/card2", "/dev/dri/card0", "/dev/dri/card1"]
"""EGL's: one in software, then CUDA's last, first and second."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for index, address in enumerate(ADDRESSES):
        gpu = tmp_path / "proc/driver/nvidia/gpus" / address
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: H100\nGPU UUID: \t GPU-{index}a-bc\nBus Location: \t {address}\n")
        device = tmp_path / "sys/devices/pci" / address
        device.mkdir(parents=True)
        card = tmp_path / "sys/class/drm" / f"card{index}"
        card.mkdir(parents=True)
        (card / "device").symlink_to(device)
    monkeypatch.setattr(render_device, "_SYSTEM", tmp_path)
    monkeypatch.setattr(render_device, "_egl_files", lambda: FILES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"{device[-1].upper()}A-BC")
    )
    monkeypatch.setattr(render_device, "_chosen", "cpu")
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    return tmp_path


def test_addresses(machine: Path) -> None:
    assert render_device.egl_addresses() == [None, "0001:af:00.0", "0000:3b:00.0", "0000:1a:00.0"]
    assert [render_device.cuda_address(f"cuda:{index}") for index in range(3)] == list(ADDRESSES)


@pytest.mark.parametrize(("device", "index"), [("cuda:0", "2"), ("cuda:1", "3"), ("cuda:2", "1")])
def test_mujoco_gets_the_worker_s_device(
    machine: Path, monkeypatch: pytest.MonkeyPatch, device: str, index: str
) -> None:
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "")  # so that it is put back
    del os.environ["MUJOCO_EGL_DEVICE_ID"]
    render_device.use(device)
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == index
    assert render_device.chosen() == device


def test_the_user_s_choice_stays(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "7")
    render_device.use("cuda:1")
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "7"


def test_what_cannot_be_matched_is_said(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render_device, "_egl_files", lambda: [None, None])
    render_device.use("cuda:1")
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ
    assert "cuda:1 is at PCI address 0000:1a:00.0, and none of EGL's devices" in capsys.readouterr().err


def test_without_accelerator_nothing_is_chosen(machine: Path) -> None:
    render_device.use("cpu")
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ


def test_this_machine_s_egl_is_asked() -> None:
    addresses = render_device.egl_addresses()
    assert all(address is None or address.count(":") == 2 for address in addresses)


def test_robosuite_does_not_compare_it_with_cuda_s_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses an EGL device whose number is not in CUDA_VISIBLE_DEVICES, which counts others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "1")
    with importing_robosuite("LIBERO"):
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
