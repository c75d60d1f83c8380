from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.envs.open_episodes import FILE, EnvState, OpenEpisode, read, write
from embodied_rl.errors import CheckpointError


def episode(env_id: int, steps: int) -> OpenEpisode:
    rng = np.random.default_rng(env_id)
    return OpenEpisode(
        env_id=env_id,
        number=3 * env_id,
        reset_state_id=100 + env_id,
        actions=rng.normal(size=(steps, 2)).astype(np.float32),
        state=rng.normal(size=3).astype(np.float32),
    )


RECORD = EpisodeRecord(
    env_id=1,
    task_id=2,
    instruction="öffne",
    reset_state_id=5,
    success=True,
    episode_return=0.1 + 0.2,
    episode_length=7,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    settings = {"env.task_ids": None, "env.init_params": {"size": 0.1}}
    state = EnvState(episodes=[episode(2, 0), episode(0, 3), episode(1, 5)], unreported=[RECORD], settings=settings)
    write(tmp_path, state)
    found = read(tmp_path)
    assert found is not None
    assert [e.env_id for e in found.episodes] == [0, 1, 2]
    for one, other in zip(sorted(state.episodes, key=lambda e: e.env_id), found.episodes, strict=True):
        assert (one.number, one.reset_state_id) == (other.number, other.reset_state_id)
        assert np.array_equal(one.actions, other.actions)
        assert np.array_equal(one.state, other.state)
    assert found.unreported == [RECORD]
    assert found.settings == settings


def test_a_checkpoint_without_episodes(tmp_path: Path) -> None:
    assert read(tmp_path) is None


@pytest.mark.parametrize("damage", [b"", b"\x80\x04N.", b"\0" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, EnvState(episodes=[episode(0, 3)], unreported=[], settings={}))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[: -4 if not damage else 0] + damage)
    with pytest.raises(CheckpointError, match=r"episodes\.safetensors: cannot be read"):
        read(tmp_path)


def test_the_mode_obeys_the_umask(tmp_path: Path) -> None:
    """Else nobody but the owner could resume or check a checkpoint whose other files all can read."""
    write(tmp_path, EnvState(episodes=[episode(0, 3)], unreported=[], settings={}))
    (tmp_path / "plain").touch()
    assert (tmp_path / FILE).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    """The launcher tells the user of those by what they are."""
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        write(tmp_path, EnvState(episodes=[episode(0, 3)], unreported=[], settings={}))
    assert raised.value.errno == errno.ENOSPC
