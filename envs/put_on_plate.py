"""25 objects to put on a plate, before 21 photographed tables: some to train on, the others to test on.

The scene is ManiSkill's digital twin of BridgeData V2, the objects and tables, their split and the rule of success are
those of Liu et al., "What Can RL Bring to VLA Generalization?", arXiv:2505.19789. Their files are taken from a
checkout of the paper's repository; see docs/maniskill.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
from pydantic import PositiveInt

from embodied_rl.envs.base import Task, check_reset_state
from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams, build, find_task, import_maniskill
from embodied_rl.errors import UserError
from embodied_rl.files import parse_json
from embodied_rl.seeding import derived_seed

OBJECTS, PLATES, TABLES = "more_carrot", "more_plate", "more_table"
_TRAINED: Final = 16
"""So many of the objects, and of the tables, are to train on."""
_PER_SIDE, _SIDE, _CENTRE, _APART = 6, 0.15, (-0.16, 0.0), 0.07
"""Places: a grid of 6 by 6 on a square of 15 cm; object and plate are more than 7 cm apart."""
_CAMERA: Final = "3rd_view_camera"
_DROP = 0.95
"""Height in metres from which object and plate fall on the table."""
_TURNS = 4
"""The object's turns about the vertical, 45 degrees apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOnPlateParams(ManiSkillParams):
    """Parameters of :class:`PutOnPlateEnv`."""

    env_id: Literal["PutCarrotOnPlateInScene-v1"] = "PutCarrotOnPlateInScene-v1"  # pyright: ignore[reportIncompatibleVariableOverride]
    """The scene."""
    control_mode: str = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
    sim_backend: Literal["physx_cpu"] = "physx_cpu"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Each slot has a scene of its own, with other objects."""
    assets: str
    """The folder ``carrot`` of the paper's repository, with ``more_carrot``, ``more_plate`` and ``more_table``."""
    objects: Literal["train", "test", "all"] = "train"
    """train: the first 16 objects and tables. test: the others."""
    num_reset_states: PositiveInt = 16_000
    """Number of initial states, the same for each object. They are drawn from all tables, places and turns."""


@dataclass(frozen=True, slots=True)
class Start:
    """One initial state."""

    thing: str
    table: str
    place: int
    turn: int


class PutOnPlateEnv(ManiSkillEnv):
    """The scene with another object and table in each initial state; a task for each object.

    Raises:
        UserError: no such folder, and all that a :class:`ManiSkillEnv` raises.
    """

    Params: ClassVar[type] = PutOnPlateParams
    states_need_seed = False

    def __init__(self, num_slots: int, params: PutOnPlateParams, seed: int) -> None:
        self._folder = Path(params.assets)
        things, self._things, self._tables, plates = _catalogue(params)
        (self._plate, plate), *_ = plates.items()
        self._models = things | {self._plate: plate}
        import_maniskill()
        super().__init__(num_slots, params, seed)
        self._per_task = max(1, params.num_reset_states // len(self._things))
        self.num_reset_states = len(self._things) * self._per_task
        self._tasks = [
            Task(
                task_id=number,
                instruction=params.instruction or f"put {things[name]['name']} on {plate['name']}",
                suite="put_on_plate",
            )
            for number, name in enumerate(self._things)
        ]

    @staticmethod
    def image_shapes_of(params: ManiSkillParams) -> Mapping[str, tuple[int, int]]:
        """The twin's one camera."""
        return {} if params.obs_mode == "state" else {_CAMERA: (params.camera_height, params.camera_width)}

    def task(self, reset_state_id: int) -> Task:
        check_reset_state(self, reset_state_id)
        return self._tasks[reset_state_id // self._per_task]

    def start(self, reset_state_id: int) -> Start:
        """What an initial state shows: the same for all seeds."""
        number, draw = divmod(reset_state_id, self._per_task)
        rng = np.random.default_rng(derived_seed(number, draw, bits=63))
        return Start(
            self._things[number],
            self._tables[rng.integers(len(self._tables))],
            int(rng.integers(len(places()))),
            int(rng.integers(_TURNS)),
        )

    def _make(self, num_envs: int) -> Any:
        """A scene, with the first object."""
        find_task(self._params.env_id)  # the scene's own assets are there
        scene = scene_class()
        first = Start(self._things[0], self._tables[0], 0, 0)
        return build(
            self._params, num_envs, scene, folder=self._folder, models=self._models, plate=self._plate, first=first
        )

    def _start(self, env: Any, reset_state_id: int) -> dict[str, Any]:
        import torch

        start = self.start(reset_state_id)
        episode = torch.tensor([start.place * _TURNS + start.turn], device=env.device)
        env.shown = start
        # In a scene that has been played in, things come to rest micrometres elsewhere than in a new one.
        return {"episode_id": episode, "reconfigure": True}


@functools.cache
def places() -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """(x, y) of the object and of the plate, in metres, of every pair of places that are apart."""
    steps = [_SIDE * (step / (_PER_SIDE - 1) - 0.5) for step in range(_PER_SIDE)]
    grid = [(_CENTRE[0] + x, _CENTRE[1] + y) for x in steps for y in steps]
    return [pair for pair in itertools.permutations(grid, 2) if np.hypot(*np.subtract(*pair)) > _APART]


@functools.cache
def scene_class() -> type:
    """The task as a class of ManiSkill's, which is imported only now."""
    import sapien
    import torch
    from mani_skill.envs.tasks.digital_twins.bridge_dataset_eval.put_on_in_scene import PutCarrotOnPlateInScene
    from mani_skill.utils.geometry import rotation_conversions
    from PIL import Image

    class PutOnPlate(PutCarrotOnPlateInScene):
        """ManiSkill's scene; what stands on the table, and the table, are exchanged."""

        def __init__(self, *, folder: Path, models: dict[str, Any], plate: str, first: Start, **arguments: Any) -> None:
            self._folder, self.shown, self._models, self._plate = folder, first, models, plate
            super().__init__(**arguments)

        def _load_scene(self, options: dict[str, Any]) -> None:
            self.source_obj_name, self.target_obj_name = self.obj_names = [self.shown.thing, self._plate]
            self.objects_excluded_from_greenscreening = self.obj_names
            self.objs, self.model_db = {}, self._models
            # ManiSkill keeps these two with the class, so that scenes would share them.
            self._objects_to_remove_from_greenscreen = []
            if self.rgb_overlay_mode != "none":
                with Image.open(self._folder / TABLES / "imgs" / self.shown.table) as photograph:
                    self._rgb_overlay_images: Any = {_CAMERA: np.asarray(photograph.convert("RGB"))}
            self.xyz_configs = torch.tensor([[(*thing, _DROP), (*plate, _DROP)] for thing, plate in places()])
            halves = [turn * math.pi / 8 for turn in range(_TURNS)]
            turns = [[math.cos(half), 0.0, 0.0, math.sin(half)] for half in halves]
            self.quat_configs = torch.tensor([[turn, [1.0, 0.0, 0.0, 0.0]] for turn in turns])
            super()._load_scene(options)

        def _build_actor_helper(self, model_id: str, *_: Any, **__: Any) -> Any:
            material = sapien.physx.PhysxMaterial(self.obj_static_friction, self.obj_dynamic_friction, 0.0)
            files = self._folder / (PLATES if model_id == self._plate else OBJECTS) / model_id
            builder: Any = self.scene.create_actor_builder()
            builder.add_multiple_convex_collisions_from_file(
                filename=str(files / "collision.obj"),
                material=material,
                density=self.model_db[model_id].get("density", 1000),
            )
            builder.add_visual_from_file(filename=str(_seen(files)))
            builder.initial_pose = sapien.Pose([1.0, float(model_id == self._plate), 1.0])
            return builder.build(name=model_id)

        def _initialize_episode(self, env_idx: Any, options: dict[str, Any]) -> None:
            self.agent.robot.set_pose(sapien.Pose([0.147, 0.028, 1.870], q=[0, 0, 0, 1]))  # out of the way
            super()._initialize_episode(env_idx, options)
            self._half_sizes = {
                name: (rotation_conversions.quaternion_to_matrix(actor.pose.q)[0].abs() @ size.float()) / 2
                for name, actor in self.objs.items()
                for size in [self.episode_model_bbox_sizes[name]]
            }

        def evaluate(self) -> dict[str, Any]:
            """The paper's rule: the object's middle is over the plate, or at most 1 cm beside it, at most 5 cm above,
            and they touch."""
            found = super().evaluate()
            thing, plate = (self.objs[name] for name in self.obj_names)
            thing_size, plate_size = (self._half_sizes[name] for name in self.obj_names)
            offset = thing.pose.p - plate.pose.p
            over = torch.linalg.norm(offset[:, :2], dim=1) <= plate_size.max() + 0.01
            gap = offset[:, 2] - plate_size[2] - thing_size[2]
            touch = torch.linalg.norm(self.scene.get_pairwise_contact_forces(thing, plate), dim=1) > 0.03
            success = over & (offset[:, 2] > 0) & (gap <= 0.05) & touch
            return {**found, "src_on_target": success, "success": success}

    return PutOnPlate


def _seen(folder: Path) -> Path:
    """The file of what an object looks like.

    Raises:
        UserError: there is none.
    """
    kinds = ("obj", "dae", "glb")
    for kind in kinds:
        if (file := folder / f"textured.{kind}").exists():
            return file
    raise UserError(f"{folder}: none of {', '.join(f'textured.{kind}' for kind in kinds)}: the checkout is not whole")


def _catalogue(params: PutOnPlateParams) -> tuple[dict[str, Any], list[str], list[str], dict[str, Any]]:
    """(Objects, names of the chosen ones, names of the chosen tables, plates).

    Raises:
        UserError: some are not there.
    """
    things, tables, plates = (_read(Path(params.assets) / name) for name in (OBJECTS, TABLES, PLATES))
    chosen = {"train": slice(None, _TRAINED), "test": slice(_TRAINED, None), "all": slice(None)}[params.objects]
    if not list(things)[chosen] or not list(tables)[chosen]:
        raise UserError(
            f"env.init_params.objects: got {params.objects!r}, but {params.assets} has only {len(things)} objects and "
            f"{len(tables)} tables"
        )
    return things, list(things)[chosen], list(tables)[chosen], plates


def _read(folder: Path) -> dict[str, Any]:
    """``model_db.json`` of one of the folders: a thing's name -> what is known of it.

    Raises:
        UserError: it is not there, or is something else.
    """
    try:
        found = parse_json((folder / "model_db.json").read_bytes())
        if not isinstance(found, dict) or not found:
            raise ValueError("it holds no objects")
        return found
    except (OSError, ValueError) as error:
        raise UserError(
            f"env.init_params.assets={folder.parent}: {folder.name}/model_db.json cannot be read ({error}); expected "
            "the folder ManiSkill/mani_skill/assets/carrot of a checkout of the repository gen-robot/RL4VLA"
        ) from error
