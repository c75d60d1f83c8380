"""``python train.py doctor [<folder>]``: check a folder and say how to use it; without one, check the installation, or
the nodes of a cluster."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from embodied_rl.checkpoints.store import resolve
from embodied_rl.commands.checkpoint_folder import checkpoint_findings, is_checkpoint, is_run, run_findings
from embodied_rl.commands.terminal import CommandParser, Finding, console, ok, problem, show, warning
from embodied_rl.commands.weights_folder import ADAPTER_CONFIG, CONFIG_FILE, adapter_findings, weights_findings
from embodied_rl.errors import UserError, first_line, listed
from embodied_rl.extras import install_command, installed_version

USAGE: Final = "python train.py doctor [<folder>] [cluster.address=... [runner.output_dir=...]]"
HELP: Final = """
With a folder: of weights (model.path), of adapters (model.lora.path), a checkpoint or a run directory. Says what it
is, what is missing, and how to use it.
Without: checks the installation: packages, simulators, rendering, accelerators, memory.
With cluster.address (auto, host:port) checks the nodes of a Ray cluster: cores, memory, accelerators, code, versions,
working directory; with runner.output_dir, too, whether all share that folder.

The exit status is 1 if there is a problem.
"""
ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout, where the project runs from one; else where the package is installed."""
_ADDRESS, _SHARED = "cluster.address", "runner.output_dir"
_GIB: Final = 2**30
_TIMEOUT_SECONDS: Final = 120
_LIBERO: Final = """
import os
from embodied_rl.envs.libero import import_libero
from embodied_rl.envs.rendering import require_renderer
import_libero(); require_renderer("LIBERO")
from libero.libero import get_libero_path
assets = get_libero_path("assets")
assert os.path.isdir(assets), f"no assets in {assets}"
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><light pos='0 0 2'/><geom size='.1'/></worldbody></mujoco>")
data = mujoco.MjData(model); mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32); renderer.update_scene(data); assert renderer.render().any()
print(f"imports, has its assets, renders with MUJOCO_GL={os.environ['MUJOCO_GL']}", flush=True)
os._exit(0)
"""
_MANISKILL: Final = """
import os
from embodied_rl.envs.maniskill import can_render, import_maniskill
import_maniskill()
print("imports, " + ("renders" if can_render() else "cannot render (no Vulkan device): states alone"), flush=True)
os._exit(0)
"""


def main(arguments: Sequence[str]) -> int:
    """Check as the arguments say; returns the exit status.

    Raises:
        UserError: there is no such folder, or nothing in it that is known.
    """
    parser = CommandParser(USAGE, HELP, {_ADDRESS: None, _SHARED: None})
    parser.add_argument("folder", type=Path, nargs="?")
    asked = vars(parser.parse(arguments))
    folder, address, shared = asked["folder"], asked[_ADDRESS], asked[_SHARED]
    if (shared is not None and address is None) or (folder is not None and address is not None):
        parser.error(f"got {' '.join(arguments)}, expected a folder, or {_ADDRESS} and perhaps {_SHARED}")
    if address is not None:
        from embodied_rl.commands.cluster_nodes import cluster_findings

        return show(console(), f"cluster {address}", cluster_findings(address, shared))
    findings = folder_findings(folder) if folder else installation_findings()
    return show(console(), str(folder or "installation"), findings)


def folder_findings(folder: Path) -> Iterable[Finding]:
    """Run the checks for a folder's kind.

    Raises:
        UserError: it does not exist, or is nothing that is known.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}")
    if is_checkpoint(folder):
        return checkpoint_findings(folder)
    if (folder / CONFIG_FILE).is_file():
        return weights_findings(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return adapter_findings(folder)
    if is_run(folder):
        return run_findings(folder)
    try:
        newest = resolve(str(folder), folder)  # an experiment's directory
    except UserError:
        newest = None
    if newest is not None:
        return run_findings(newest.parent.parent)
    found = listed(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise UserError(
        f"{folder}: holds {found}; expected {CONFIG_FILE} (weights), {ADAPTER_CONFIG} (adapters), state.json (a "
        "checkpoint) or checkpoints/ (a run)"
    )


def installation_findings() -> Iterator[Finding]:
    """Run all checks of the installation, the quick ones first."""
    yield python()
    yield from packages()
    yield torch_build()
    yield torchvision()
    yield simulator("LIBERO", "libero", _LIBERO)
    yield simulator("ManiSkill", "mani_skill", _MANISKILL)
    yield processor()
    yield memory()
    yield channels()
    yield disk()


def python() -> Finding:
    version, wanted = platform.python_version(), _declared()[0]
    text = f"{version} at {sys.executable}"
    if not wanted or SpecifierSet(wanted).contains(version, prereleases=True):
        return ok("Python", text)
    return problem("Python", f"{text}, expected {wanted}", "make setup PYTHON=/path/to/python3.11")


def packages() -> Iterator[Finding]:
    """Compare the installed packages with what the project asks for and was tested with."""
    requirements, pins, other = _declared()[1], _pins(), list[str]()
    fine = 0
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        installed = installed_version(wanted.name)
        if installed is None:
            yield problem(wanted.name, f"not installed, expected {wanted.specifier}", f"pip install '{text}'")
        elif not wanted.specifier.contains(installed.partition("+")[0], prereleases=True):
            yield problem(wanted.name, f"{installed}, expected {wanted.specifier}", f"pip install '{text}'")
        else:
            fine += 1
            pin = pins.get(wanted.name.lower())
            if pin is not None and pin != installed.partition("+")[0]:
                other.append(f"{wanted.name} {installed} ({pin})")
    yield ok("packages", f"{fine} as the project asks for")
    if other:
        advice = "pip install -c constraints/pins.txt ... gives the tested ones"
        yield warning("packages", f"not the version that was tested (in brackets): {listed(other)}", advice)


def torch_build() -> Finding:
    try:
        import torch
    except Exception as error:  # a broken build raises anything
        return problem("torch", f"cannot be imported: {first_line(error)}", "docs/installation.md")
    build = f"{torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'built for the CPU'}"
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        shown = [f"{device.name}, {device.total_memory / _GIB:.0f} GiB" for device in devices]
        return ok("torch", f"{build}; {len(shown)} device(s): {listed(shown)}")
    if torch.version.cuda:
        return warning("torch", f"{build}, but it finds no device", "see whether nvidia-smi does")
    if shutil.which("nvidia-smi"):
        return warning("torch", f"{build}, on a machine that has nvidia-smi", "docs/installation.md: GPU machines")
    return ok("torch", f"{build}; no accelerator")


def torchvision() -> Finding:
    """Try to import torchvision: a build that does not match torch's breaks transformers, which imports it."""
    if importlib.util.find_spec("torchvision") is None:
        return ok("torchvision", "not installed, and not needed")
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # of operators that do not exist, for one
        advice = "it breaks transformers: pip uninstall torchvision, or install the build that matches torch's"
        return problem("torchvision", f"cannot be imported: {first_line(error)}", advice)
    return ok("torchvision", str(installed_version("torchvision")))


def simulator(name: str, package: str, code: str) -> Finding:
    """Try an optional simulator in a process of its own, which a graphics driver may end."""
    if importlib.util.find_spec(package) is None:
        extra = package.replace("_", "")
        return warning(name, "not installed", f"{install_command(extra)}, for its envs")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # whatever the working directory
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return problem(name, f"no answer in {_TIMEOUT_SECONDS} seconds", "is the machine busy, or the driver broken?")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return problem(name, said.rpartition("Error: ")[2], "docs/installation.md")
    if "cannot render" in lines[-1]:
        return warning(name, lines[-1], "install a Vulkan driver, for images and videos")
    return ok(name, lines[-1])


def processor() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ok("processor", f"{cores} core(s) for this process, {platform.machine()}")


def memory() -> Finding:
    from embodied_rl.runtime.memory import machine_memory

    total, available = machine_memory()
    text = f"{total / _GIB:.1f} GiB, {available / _GIB:.1f} available"
    if available < 10 * _GIB:
        return warning("memory", text, "LIBERO's envs want 10 GiB; fewer env workers or tasks need less")
    return ok("memory", text)


def channels() -> Finding:
    """Make the kernel's objects that channels between processes use (``embodied_rl/channel``); not ``/dev/shm``."""
    advice = "cluster=serial works without"
    try:
        os.close(os.memfd_create("doctor"))
        os.close(os.eventfd(0))
    except (AttributeError, OSError) as error:
        return problem("channels", f"workers cannot share memory: {first_line(error)}", advice)
    return ok("channels", "workers can share memory")


def disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / _GIB:.1f} GiB free in {Path.cwd()}"
    return ok("disk", text) if free >= 6 * _GIB else warning("disk", text, "set-up and checkpoints want 6 GiB")


def _declared() -> tuple[str, list[str]]:
    """The Python versions and the packages that the project asks for: of the checkout, else of what is installed."""
    path = ROOT / "pyproject.toml"
    if path.is_file():
        project = tomllib.loads(path.read_text())["project"]
        return project["requires-python"], project["dependencies"]
    try:
        found = importlib.metadata.metadata("embodied-rl")
    except importlib.metadata.PackageNotFoundError:
        return "", []
    return str(found.json.get("requires_python", "")), importlib.metadata.requires("embodied-rl") or []


def _pins() -> dict[str, str]:
    """Package, in lower case -> the version that was tested; empty without a checkout."""
    path = ROOT / "constraints" / "pins.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {name.strip().lower(): version.split()[0] for name, version in pairs}
