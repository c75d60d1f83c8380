from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.errors import UserError
from embodied_rl.models.openvla.actions import ActionCodec, bins_of, centres_of, choose_statistics

STATISTICS = {
    "action": {"q01": [-0.5, 0.0, 0.0], "q99": [0.5, 1.0, 1.0], "mask": [True, True, False]},
    "proprio": {"q01": [0.0, -2.0], "q99": [1.0, 2.0]},
}


def test_bins_by_hand() -> None:
    """Edges are 2/255 apart: -1 is the first edge, so bin 1; 0 lies between edges 128 (-1/255) and 129."""
    actions = torch.tensor([-1.0, -1.0 + 1.9 / 255, -1.0 + 2.1 / 255, 0.0, 0.999, 1.0, -7.0, 7.0])
    assert bins_of(actions).tolist() == [1, 1, 2, 128, 255, 256, 1, 256]


def test_tokens_by_hand() -> None:
    """Bin b is token 32000 - b, its value the middle between its edges; the last two bins share one."""
    codec = ActionCodec(STATISTICS, 32000)
    assert codec.tokens(torch.tensor([-1.0, 0.0, 1.0])).tolist() == [31999, 31872, 31744]
    values = codec.normalized(torch.tensor([31999, 31872, 31745, 31744]))
    expected = [-1 + 1 / 255, 0.0, 1 - 1 / 255, 1 - 1 / 255]
    assert values.tolist() == pytest.approx(expected, abs=1e-7)


@given(st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=20))
def test_bins_are_numpys(values: list[float]) -> None:
    clipped = np.clip(np.asarray(values, dtype=np.float32), -1, 1)
    edges = np.linspace(-1, 1, 256)
    assert bins_of(torch.tensor(values)).tolist() == np.digitize(clipped, edges).tolist()
    back = centres_of(bins_of(torch.tensor(values))).numpy()
    assert np.abs(back - clipped).max() <= 1 / 255 + 1e-6


def test_to_the_env_by_hand() -> None:
    """0.5·(a+1)·(high-low)+low; the gripper: 1 is open in the data and -1 in the env."""
    codec = ActionCodec(STATISTICS, 32000)
    normalized = torch.tensor([[0.0, 0.0, 0.9], [1.0, -1.0, 0.1], [-0.5, 0.5, -1.0]])
    expected = torch.tensor([[0.0, 0.5, -1.0], [0.5, 0.0, 1.0], [-0.25, 0.75, 1.0]])
    assert torch.allclose(codec.to_env(normalized), expected, atol=1e-6)


def test_actions_beyond_the_envs_are_cut() -> None:
    codec = ActionCodec({"action": {"q01": [-3.0], "q99": [3.0]}}, 32000)
    assert codec.to_env(torch.tensor([[1.0], [-1.0]])).tolist() == [[1.0], [-1.0]]


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=3))
def test_from_the_env_is_the_inverse(values: list[float]) -> None:
    codec = ActionCodec(STATISTICS, 32000)
    action = torch.tensor(values)
    action[1] = action[1].abs()
    action[2] = 1.0 if action[2] > 0 else -1.0
    inside = action.clamp(torch.tensor([-0.5, 0.0, -1.0]), torch.tensor([0.5, 1.0, 1.0]))
    assert torch.allclose(codec.to_env(codec.from_env(action)), inside, atol=1e-6)


def test_a_demonstrated_gripper_by_hand() -> None:
    codec = ActionCodec(STATISTICS, 32000)
    normalized = codec.from_env(torch.tensor([[0.0, 0.5, 1.0], [0.5, 0.0, -1.0]]))
    assert torch.allclose(normalized, torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 1.0]]), atol=1e-6)
    tokens = codec.tokens(normalized)
    assert tokens.tolist() == [[31872, 31872, 31872], [31744, 31999, 31744]]
    assert codec.to_env(codec.normalized(tokens))[:, 2].tolist() == [1.0, -1.0]


def test_state_by_hand() -> None:
    codec = ActionCodec(STATISTICS, 32000)
    state = torch.tensor([[0.5, 1.0], [2.0, -9.0]])
    assert torch.allclose(codec.normalize_state(state), torch.tensor([[0.0, 0.5], [1.0, -1.0]]), atol=1e-6)


def test_which_statistics() -> None:
    both = {"libero_10": {}, "libero_10_no_noops": {}, "bridge": {}}
    assert choose_statistics(both, unnorm_key=None, suite="libero_10") == "libero_10"
    del both["libero_10"]
    assert choose_statistics(both, unnorm_key=None, suite="libero_10") == "libero_10_no_noops"
    assert choose_statistics(both, unnorm_key="bridge", suite="libero_10") == "bridge"
    assert choose_statistics({"bridge": {}}, unnorm_key=None, suite="libero_10") == "bridge"
    with pytest.raises(UserError, match=r"of bridge, libero_10_no_noops, not of 'libero_goal'; set it"):
        choose_statistics(both, unnorm_key=None, suite="libero_goal")
    with pytest.raises(UserError, match=r"got 'bridg', expected one of bridge, libero.*Did you mean 'bridge'\?"):
        choose_statistics(both, unnorm_key="bridg", suite=None)
    with pytest.raises(UserError, match="has action statistics of nothing"):
        choose_statistics({}, unnorm_key=None, suite=None)


def test_statistics_of_another_kind() -> None:
    with pytest.raises(UserError, match="have no q01 and no q99, only max, min"):
        ActionCodec({"action": {"min": [0.0], "max": [1.0]}}, 32000)


BRIDGE = {
    "action": {
        "q01": [-0.03] * 3 + [-0.1] * 3 + [0.0],
        "q99": [0.03] * 3 + [0.1] * 3 + [1.0],
        "min": [-0.5] * 3 + [-3.0] * 3 + [0.0],
        "max": [0.5] * 3 + [1.0] * 3 + [1.0],
        "mask": [True] * 6 + [False],
    }
}


def test_bridge_units_by_hand() -> None:
    """0.03 m are 0.03 of the env's metre, 0.1 rad are 0.1 / (pi / 2); 1 opens the gripper, in the env, too."""
    codec = ActionCodec(BRIDGE, 32000, "widowx_bridge")
    env = codec.to_env(torch.tensor([[1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 0.9], [0.0] * 6 + [0.4]]))
    turn = 0.1 / 1.5707963
    expected = torch.tensor([[0.03, -0.03, 0.0, turn, -turn, 0.0, 1.0], [0.0] * 6 + [-1.0]])
    assert torch.allclose(env, expected, atol=1e-6)
    assert torch.allclose(codec.from_env(env), torch.tensor([[1.0, -1, 0, 1, -1, 0, 1], [0.0] * 7]), atol=1e-5)


def test_panda_opens_where_libero_closes() -> None:
    normalized = torch.tensor([0.0] * 6 + [1.0])
    assert ActionCodec(BRIDGE, 32000, "panda").to_env(normalized)[-1] == 1.0
    assert ActionCodec(BRIDGE, 32000, "libero").to_env(normalized)[-1] == -1.0


def test_bounds_are_quantiles_or_extremes() -> None:
    """From -3 to 1 the middle is -1 rad, and a normalised 0.5 is 0 rad."""
    codec = ActionCodec(BRIDGE, 32000, "panda", "min_max")
    env = codec.to_env(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0]))
    assert torch.allclose(env, torch.tensor([0.5, 0.0, 0.0, -1.0, 0.0, 1.0, 1.0]), atol=1e-6)
    with pytest.raises(UserError, match=r"bounds: got 'min_max', but .* no min and no max.*use model.params.bounds=q"):
        ActionCodec(STATISTICS, 32000, "libero", "min_max")
    with pytest.raises(UserError, match="only mean, std; they are of no kind that can be used"):
        ActionCodec({"action": {"mean": [0.0], "std": [1.0]}}, 32000)


def test_setup_of_other_dimensions_is_refused() -> None:
    with pytest.raises(UserError, match=r"policy_setup: 'widowx_bridge' has actions of 7 dimensions, .* of 3"):
        ActionCodec(STATISTICS, 32000, "widowx_bridge")


def test_setup_names_its_statistics() -> None:
    both = {"bridge_orig": {}, "fractal20220817_data": {}}
    assert choose_statistics(both, unnorm_key=None, suite="maniskill_x", setup="widowx_bridge") == "bridge_orig"
    with pytest.raises(UserError, match="unnorm_key: not set"):
        choose_statistics(both, unnorm_key=None, suite="maniskill_x")
