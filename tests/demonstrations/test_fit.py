"""A data set that does not fit is refused before anything starts, and what is offered instead works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embodied_rl.cli import config_of, main
from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.demonstrations.fit import check_data
from embodied_rl.demonstrations.lerobot import metadata
from embodied_rl.envs.base import KnownSpaces, known_spaces, params_of_the_reward
from embodied_rl.envs.libero.adapter import LiberoParams
from embodied_rl.envs.maniskill import ManiSkillParams
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.schema import EmbodiedSftConfig
from embodied_rl.tasks.planning import plan_of
from embodied_rl.workers import actor
from embodied_rl.workers.demonstrator import ImitationWorker
from tests.configs import embodied
from tests.demonstrations.lerobot.recordings import HEIGHT, WIDTH, data_set
from tests.demonstrations.recording import record

BOTH = {"agentview": (HEIGHT, WIDTH), "wrist": (HEIGHT, WIDTH)}


def config(root: Path, *overrides: str) -> EmbodiedSftConfig:
    found = config_of("task=sft", "env=dummy", "model=mlp", f"data.path={root}", "data.clip_actions=true", *overrides)
    assert isinstance(found, EmbodiedSftConfig)
    return found


def spaces(cameras: dict[str, tuple[int, int]], state_dim: int = 3, action_dim: int = 2) -> KnownSpaces:
    return KnownSpaces(action_dim=action_dim, state_dim=state_dim, image_shapes=cameras, action_choices=())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actions from 0 to 1.02."""
    return data_set(tmp_path_factory.mktemp("data"), [2, 3], videos=False)


def test_what_fits_passes(root: Path) -> None:
    check_data(config(root).data, spaces(BOTH))
    check_data(config(root).data, KnownSpaces(action_dim=None, state_dim=None, image_shapes=None))
    check_data(config(root).data, spaces(BOTH, state_dim=0))  # a policy that sees no numbers sees no others
    named = "data.cameras={front: observation.images.wrist}"
    check_data(config(root, named).data, spaces({"front": (HEIGHT, WIDTH)}))


@pytest.mark.parametrize(
    ("cameras", "overrides", "message"),
    [
        (
            {"front": (HEIGHT, WIDTH)},
            [],
            "has no images observation.images.front for the env's camera front, only observation.images.agentview, "
            "observation.images.wrist; say which is which with 'data.cameras={front: <feature>}'",
        ),
        (
            BOTH,
            ["data.cameras={agentveiw: observation.images.wrist}"],
            "data.cameras: the env has no camera 'agentveiw', only agentview, wrist. Did you mean 'agentview'?",
        ),
        (
            BOTH | {"wrist": (64, 48)},
            [],
            "images have other sizes than the env's (height x width): wrist 16 x 24, the env's 64 x 48; stretch them "
            "with data.resize=true",
        ),
        (
            BOTH,
            ["data.clip_actions=false"],
            "40.0% of the actions have numbers outside [-1, 1], where the env cuts them off (number 0 from 0 to 1.02, "
            "1 from 0 to 1.02). If they are in the env's units, data.clip_actions=true",
        ),
    ],
)
def test_what_does_not_fit_says_what_to_do(
    root: Path, cameras: dict[str, tuple[int, int]], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(config(root, *overrides).data, spaces(cameras))
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_all_misfits_come_at_once(root: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(config(root).data, spaces({"front": (8, 8)}, state_dim=8, action_dim=7))
    assert len(caught.value.problems) == 3
    assert "observation.state has 3 numbers, and the env's 8" in str(caught.value)
    assert "action has 2 numbers, and the env's 7" in str(caught.value)


def test_actions_beyond_by_rounding_are_none(tmp_path: Path) -> None:
    data_set(tmp_path, [3], videos=False)
    for largest, fits in ((1.0005, True), (1.002, False)):
        path = tmp_path / "data/chunk-000/file-000.parquet"
        table = pq.read_table(path)
        column = pa.array([[-largest, 0.0]] * 3, type=table.schema.field("action").type)
        pq.write_table(table.set_column(table.schema.get_field_index("action"), "action", column), path)
        if fits:
            check_data(config(tmp_path, "data.clip_actions=false").data, spaces(BOTH))
        else:
            with pytest.raises(ConfigError, match=r"number 0 from -1 to -1\)"):
                check_data(config(tmp_path, "data.clip_actions=false").data, spaces(BOTH))


def test_actions_of_failures_do_not_count(tmp_path: Path) -> None:
    data_set(tmp_path, [2, 3], videos=False, failures=[1])
    check_data(config(tmp_path, "data.clip_actions=false").data, spaces(BOTH))


def with_actions(root: Path, rows: Sequence[Sequence[float]]) -> None:
    """Give the data set these actions, again and again."""
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    actions = [rows[i % len(rows)] for i in range(len(table))]
    column = pa.array(actions, type=table.schema.field("action").type)
    pq.write_table(table.set_column(table.schema.get_field_index("action"), "action", column), path)


def test_choices_are_whole_numbers_of_those_that_there_are(tmp_path: Path) -> None:
    root = data_set(tmp_path, [2, 3], videos=False)
    chosen = replace(spaces(BOTH), action_choices=(3, 4))
    with_actions(root, [(0, 3), (2, 0), (1, 1)])
    check_data(config(root).data, chosen)
    with_actions(root, [(0, 3), (3, 0), (1, 0.5)])
    with pytest.raises(ConfigError) as caught:
        check_data(config(root).data, chosen)
    assert f"data.path={root}: the env's action 0 is one of 3 choices, 0 to 2, and the data set has 3;" in str(
        caught.value
    )
    assert "the env's action 1 is one of 4 choices, 0 to 3, and the data set has 0.5;" in str(caught.value)


@pytest.mark.parametrize(("choices", "largest"), [((3, 4), 3), ((), 1)])
def test_choices_are_not_cut_off(tmp_path: Path, choices: tuple[int, ...], largest: int) -> None:
    root = data_set(tmp_path, [2, 3], videos=False)
    with_actions(root, [(0, 3), (2, 0), (1, 1)])
    spec = PolicySpec(
        action_dim=2, num_action_chunks=1, state_dim=3, image_shapes=BOTH, values_per_chunk=0, action_choices=choices
    )
    worker = ImitationWorker.__new__(ImitationWorker)
    worker._data, worker.context = config(root).data, SimpleNamespace(report_progress=lambda *_: None)  # type: ignore[assignment]
    assert worker._read(root, spec, None)._actions.max() == largest


@pytest.mark.parametrize(("choices", "found", "largest"), [((3, 4), 3, 3), ((), 1.0005, 1)])
def test_choices_that_ppo_keeps_to_are_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: tuple[int, ...], found: float, largest: int
) -> None:
    monkeypatch.setattr(actor, "Demonstrated", lambda training, frames, **_: frames)
    root = data_set(tmp_path, [2, 3], videos=False)
    with_actions(root, [(0, found), (1, 0)])
    spec = PolicySpec(
        action_dim=2, num_action_chunks=1, state_dim=3, image_shapes=BOTH, values_per_chunk=1, action_choices=choices
    )
    worker: Any = actor.ActorWorker.__new__(actor.ActorWorker)
    worker._algorithm = embodied(
        "env=dummy", "algorithm=ppo", "algorithm.bc_coef=0.1", f"algorithm.bc_path={root}"
    ).algorithm
    worker.context = SimpleNamespace(report_progress=lambda *_: None, rank=0, world_size=1)
    assert worker._demonstrated(None, spec)._actions.max() == largest


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (("algorithm=ppo", "algorithm.bc_coef=0.1"), "algorithm.bc_path"),
        (("model=sac_mlp", "algorithm=rlpd"), "algorithm.replay.demonstrations"),
    ],
)
def test_reinforcement_learning_asks_for_actions_within_range_too(
    tmp_path: Path, keys: tuple[str, ...], name: str
) -> None:
    root = record(tmp_path, [0, 3])
    plan_of(embodied("env=dummy", *keys, f"{name}={root}"))
    with_actions(root, [(256.0, 0.0)])
    with pytest.raises(ConfigError) as caught:
        plan_of(embodied("env=dummy", *keys, f"{name}={root}"))
    assert f"{name}={root}: 100.0% of the actions have numbers outside [-1, 1]" in str(caught.value)
    assert "data.clip_actions" not in str(caught.value), "a key that these runs do not have"


def refuses_values(root: Path, message: str | None) -> None:
    """Learning values from a data set is refused with a message, or is not; imitating it never is."""
    plan_of(embodied("env=dummy", "algorithm=ppo", "algorithm.bc_coef=0.1", f"algorithm.bc_path={root}"))
    values = embodied("env=dummy", "model=sac_mlp", "algorithm=rlpd", f"algorithm.replay.demonstrations={root}")
    if message is None:
        plan_of(values)
        return
    with pytest.raises(ConfigError, match=rf"replay\.demonstrations={root}: .*{message}"):
        plan_of(values)


@pytest.mark.parametrize(
    ("files", "noise"),
    [
        ({"meta/collection.yaml": "collect: {noise: 0.1}"}, "0.1"),
        ({"meta/collection.yaml": "collect: {noise: 0.0}"}, None),
        ({"meta/collection.yaml": "collect: {}"}, None),
        ({"meta/provenance.json": '[{"noise": 0.0}, {"noise": 0.25}]'}, "0.25"),
        ({"meta/provenance.json": '[{"noise": 0.0}, {"episodes": [0, 1]}]'}, None),  # of before it was noted
        ({"meta/notes.txt": "of anybody"}, None),
    ],
)
def test_actions_that_were_not_executed_have_no_values(
    tmp_path: Path, files: dict[str, str], noise: str | None
) -> None:
    root = record(tmp_path, [0, 3])
    for name, content in files.items():
        (root / name).write_text(content)
    refuses_values(root, None if noise is None else f"noise of {noise} .*; use a set")


def test_disturbed_frames_have_no_values_whoever_played_them(tmp_path: Path) -> None:
    """A copy may lack what else tells of the noise, and transitions would jump over the frames."""
    refuses_values(record(tmp_path, [0, 3], disturbed=True), "has frames that are marked as disturbed, .*; use a set")


@pytest.mark.parametrize(
    ("played", "refused"),
    [
        ("{env_type: dummy, init_params: {}}", None),
        ("{env_type: dummy, init_params: {success_bonus: 1.0}}", None),
        ("{env_type: dummy, init_params: {success_bonus: 0.0}}", "success_bonus was 0.0, now 1.0"),
        ("{env_type: dummy, init_params: {success_radius: 0.3}}", "success_radius was 0.3, now 0.12"),
        ("{env_type: dummy, init_params: {image_size: 32, states_per_task: 8}}", None),  # nothing that rewards see
        ("{env_type: libero, init_params: {reward: progress}}", None),  # of another env: its spaces say whether it fits
        ("{}", None),
    ],
)
def test_rewards_of_another_kind_have_other_values(tmp_path: Path, played: str, refused: str | None) -> None:
    root = record(tmp_path, [0, 3])
    (root / "meta/collection.yaml").write_text(f"env: {played}\ncollect: {{noise: 0.0}}")
    refuses_values(root, None if refused is None else f"of another kind: {refused}; set them")


@pytest.mark.parametrize(
    ("env_type", "names"),
    [
        ("libero", {"reward"}),
        ("maniskill", {"reward_mode"}),
        ("metaworld", {"reward", "success_bonus"}),
        ("robosuite", {"reward_shaping"}),
        ("gymnasium", {"kwargs", "wrappers", "success_key", "success_return"}),
        ("tests.nowhere:Env", set()),
    ],
)
def test_what_decides_rewards(env_type: str, names: set[str]) -> None:
    assert set(params_of_the_reward(env_type)) == names


@pytest.mark.parametrize("content", ["collect: {noise: loud}", "- [", "a text"])
def test_a_damaged_record_of_noise_is_said(tmp_path: Path, content: str) -> None:
    root = record(tmp_path, [0])
    (root / "meta/collection.yaml").write_text(content)
    with pytest.raises(UserError, match=r"collection\.yaml: cannot be read"):
        plan_of(embodied("env=dummy", "model=sac_mlp", "algorithm=rlpd", f"algorithm.replay.demonstrations={root}"))


def test_a_missing_video_is_noticed_before_decoding(tmp_path: Path) -> None:
    data_set(tmp_path, [3])
    (tmp_path / "videos/observation.images.wrist/chunk-000/file-000.mp4").unlink()
    with pytest.raises(UserError, match=r"file-000.mp4: cannot be read \(no such file\)"):
        check_data(config(tmp_path).data, spaces(BOTH))


def test_resized_pictures_are_pillows(root: Path) -> None:
    plain = Demonstrations(root, chunk=1)
    sizes = {"agentview": (8, 40), "wrist": (HEIGHT, WIDTH)}
    stretched = Demonstrations(root, chunk=1, sizes=sizes)
    assert stretched.cameras == sizes
    before, after = (d.sample([0, 4])[0].images for d in (plain, stretched))
    for row in range(2):
        image = Image.fromarray(before["agentview"][row].numpy()).resize((40, 8), Image.Resampling.BICUBIC)
        assert np.array_equal(after["agentview"][row].numpy(), np.asarray(image))
    assert np.array_equal(after["wrist"], before["wrist"])
    assert Demonstrations(root, chunk=1).cameras == BOTH, "both are in the cache"


def test_clipped_actions_and_their_statistics(root: Path) -> None:
    clipped = Demonstrations(root, chunk=1, clip_actions=True)
    assert clipped.sample(range(5))[1][:, 0, 0].tolist() == pytest.approx([0.0, 0.01, 1.0, 1.0, 1.0])
    assert clipped.action_statistics["max"] == [1.0, 1.0]


def test_spaces_are_known_without_a_simulator() -> None:
    libero = known_spaces("libero", LiberoParams(task_suite_name="libero_10", cameras=("wrist",), camera_heights=96))
    shapes = {"wrist": (96, 128)}
    assert libero == KnownSpaces(action_dim=7, state_dim=8, image_shapes=shapes, action_choices=())
    params = ManiSkillParams(env_id="PushCube-v1", obs_mode="rgb")
    assert known_spaces("maniskill", params) == KnownSpaces(action_dim=None, state_dim=None, image_shapes=None)


def test_no_worker_is_started(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a run was begun")

    monkeypatch.setattr("embodied_rl.launch.carry_out", started)
    arguments = ["task=sft", "env=dummy", "model=mlp", f"runner.output_dir={tmp_path}", "data.path="]
    for path in (root, tmp_path / "nowhere"):
        with pytest.raises(SystemExit) as ending:
            main([*arguments[:-1], f"data.path={path}"])
        assert ending.value.code == 2
    with pytest.raises(AssertionError, match="a run was begun"):
        main([*arguments[:-1], f"data.path={root}", "env.env_type=dummy", "runner.only_eval=true"])
    assert not list(tmp_path.iterdir())


def test_it_is_found_without_torch(root: Path) -> None:
    code = (
        "import sys\nfrom embodied_rl.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    arguments = ["task=sft", "env=libero_10", f"data.path={root}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip() == "False"
    assert done.stderr.startswith("error: 3 problems in the configuration"), done.stderr


def test_only_evaluating_needs_no_data(tmp_path: Path) -> None:
    assert plan_of(config(tmp_path / "nowhere", "runner.only_eval=true")).env_params is not None
    with pytest.raises(UserError, match=r"data.path: .*no such folder"):
        plan_of(config(tmp_path / "nowhere"))
    (tmp_path / metadata.INFO).parent.mkdir()
    (tmp_path / metadata.INFO).write_text(json.dumps({"codebase_version": "v2.1"}))
    with pytest.raises(UserError, match=r"LeRobot format v2\.1, expected v3\.0"):
        plan_of(config(tmp_path))
