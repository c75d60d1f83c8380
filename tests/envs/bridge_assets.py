"""Stand-ins for the assets that ManiSkill's digital twins download: an arm of boxes, a table, objects."""

from __future__ import annotations

import json
from pathlib import Path

import trimesh
from PIL import Image

CARROT, PLATE = "bridge_carrot_generated_modified", "bridge_plate_objaverse_larger"
_FLAT = ((-0.055, -0.055, 0), (0.055, 0.055, 0.006))
_CUBE = ((-0.015,) * 3, (0.015,) * 3)
_BOXES = {
    CARROT: ((-0.06, -0.015, -0.02), (0.06, 0.015, 0.02)),
    PLATE: _FLAT,
    "bridge_spoon_generated_modified": ((-0.06, -0.01, -0.005), (0.06, 0.01, 0.005)),
    "table_cloth_generated_shorter": _FLAT,
    "baked_green_cube_3cm": _CUBE,
    "baked_yellow_cube_3cm": _CUBE,
    "eggplant": ((-0.04, -0.02, -0.02), (0.04, 0.02, 0.02)),
    "dummy_sink_target_plane": _FLAT,
    "sink": ((-0.2, -0.2, -0.01), (0.2, 0.2, 0)),
}
_TABLE_HEIGHT = 0.87

# Joint, its parent link, its child link, where it sits in the parent, its axis.
_JOINTS = (
    ("waist", "base_link", "shoulder_link", (0, 0, 0.07), (0, 0, 1)),
    ("shoulder", "shoulder_link", "upper_arm_link", (0, 0, 0.04), (0, 1, 0)),
    ("elbow", "upper_arm_link", "upper_forearm_link", (0.05, 0, 0.25), (0, 1, 0)),
    ("forearm_roll", "upper_forearm_link", "lower_forearm_link", (0.175, 0, 0), (1, 0, 0)),
    ("wrist_angle", "lower_forearm_link", "wrist_link", (0.075, 0, 0), (0, 1, 0)),
    ("wrist_rotate", "wrist_link", "gripper_link", (0.065, 0, 0), (1, 0, 0)),
)
_FINGERS = (("left_finger", "left_finger_link", 1), ("right_finger", "right_finger_link", -1))


def write_bridge_assets(root: Path) -> None:
    """Write them where ManiSkill looks if ``MS_ASSET_DIR`` is ``root``."""
    bridge = root / "data/tasks/bridge_v2_real2sim_dataset"
    for name, box in _BOXES.items():
        folder = bridge / "custom/models" / name
        folder.mkdir(parents=True)
        for file in ("collision.obj", "textured.obj"):
            trimesh.creation.box(bounds=box).export(folder / file)
    models = {
        name: {"bbox": {"min": low, "max": high}, "scales": [1.0], "density": 1000}
        for name, (low, high) in _BOXES.items()
    }
    for file in ("info_bridge_custom_v0.json", "info_bridge_custom_baked_tex_v0.json"):
        (bridge / "custom" / file).write_text(json.dumps(models))
    # The scene's file has y upwards and is moved by (2.0634, 2.8313, 0) when it is loaded.
    table = trimesh.creation.box(extents=(1.2, 0.05, 1.2))
    table.apply_translation((-2.0634, _TABLE_HEIGHT - 0.025, 2.8313))
    (bridge / "stages").mkdir()
    (bridge / "real_inpainting").mkdir()
    for stage, photograph in (("bridge_table_1_v1", "bridge_real_eval_1"), ("bridge_table_1_v2", "bridge_sink")):
        table.export(bridge / f"stages/{stage}.glb")
        Image.new("RGB", (640, 480), (20, 90, 200)).save(bridge / f"real_inpainting/{photograph}.png")
    arm = root / "data/robots/widowx"
    arm.mkdir(parents=True)
    (arm / "wx250s.urdf").write_text(_urdf())


def write_plate_assets(folder: Path, things: int = 18) -> None:
    """So many boxes and tables, each wider than the one before, or of another blue, and a plate."""
    boxes = {f"{number:03}_box": ((-0.03, -0.01, 0), (0.03 + number / 500, 0.01, 0.02)) for number in range(things)}
    for kind, models in {"more_carrot": boxes, "more_plate": {"001_plate": _BOXES[PLATE]}}.items():
        for name, box in models.items():
            (folder / kind / name).mkdir(parents=True)
            for file in ("collision.obj", "textured.obj"):
                trimesh.creation.box(bounds=box).export(folder / kind / name / file)
        entries = {
            name: {"name": name.replace("_", " "), "bbox": {"min": low, "max": high}, "scales": [1.0], "density": 500}
            for name, (low, high) in models.items()
        }
        (folder / kind / "model_db.json").write_text(json.dumps(entries))
    tables = {f"{number:03}.png": {"name": f"table {number}"} for number in range(things)}
    (folder / "more_table/imgs").mkdir(parents=True)
    (folder / "more_table/model_db.json").write_text(json.dumps(tables))
    for number, name in enumerate(tables):
        Image.new("RGB", (640, 480), (20, 90, 100 + number)).save(folder / "more_table/imgs" / name)


def _urdf() -> str:
    links = ["base_link", *(child for _, _, child, _, _ in _JOINTS), *(link for _, link, _ in _FINGERS)]
    joints = [
        _joint("revolute", name, parent, child, place, axis, (-3.1, 3.1))
        for name, parent, child, place, axis in _JOINTS
    ]
    for name, link, side in _FINGERS:
        joints.append(_joint("prismatic", name, "gripper_link", link, (0.1, 0, 0), (0, side, 0), (0.01, 0.04)))
    joints.append(
        '<joint name="ee_gripper" type="fixed"><parent link="gripper_link"/><child link="ee_gripper_link"/>'
        '<origin xyz="0.14 0 0"/></joint>'
    )
    return "<robot name='wx250s'>" + "".join(
        [*map(_link, links), '<link name="ee_gripper_link"/>', *joints, "</robot>"]
    )


def _link(name: str) -> str:
    shape = '<geometry><box size="0.02 0.01 0.02"/></geometry>'
    inertia = '<inertia ixx="1e-3" iyy="1e-3" izz="1e-3" ixy="0" ixz="0" iyz="0"/>'
    return (
        f'<link name="{name}"><inertial><mass value="0.1"/>{inertia}</inertial>'
        f"<visual>{shape}</visual><collision>{shape}</collision></link>"
    )


def _joint(
    kind: str,
    name: str,
    parent: str,
    child: str,
    place: tuple[float, float, float],
    axis: tuple[int, int, int],
    limits: tuple[float, float],
) -> str:
    where, along = (" ".join(map(str, numbers)) for numbers in (place, axis))
    return (
        f'<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/><origin xyz="{where}"/>'
        f'<axis xyz="{along}"/><limit lower="{limits[0]}" upper="{limits[1]}" effort="200" velocity="10"/></joint>'
    )
