"""A wrapper of gym-pusht's PushT for policies that learn it from nothing: everything as seen from the agent.

PushT's own action is a place on the board, wherever the agent is, and of its T it tells a place and an angle that jumps
at a full turn. Random places keep the agent around the middle, where it rarely meets the T.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from embodied_rl.errors import UserError

_HALF = 256.0
"""Half the board, in pixels: the unit of observations."""
_KEYPOINTS, _AGENT = "environment_state", "agent_pos"


class FromAgent(gymnasium.Wrapper[Any, Any, Any, Any], gymnasium.utils.RecordConstructorArgs):
    """Actions [2]: where the agent is drawn to, as a distance from where it is; 1 is ``reach``. Beyond the board's edge
    it is the edge. Observations [36], in halves of the board: the agent from the middle, its velocity a second, and of
    the T's eight corners their distances from the agent and from their places in the goal.

    Args:
        reach: pixels; the board has 512.
        progress: what half a board pays by which the T's corners, in the mean, came nearer to their places.
        approach: what half a board pays by which the agent came nearer to the T.

        Both guide who does not know yet how to push: PushT's own reward is 0 until the T covers some of its goal. Over
        an episode they add up to what is nearer at its end than at its start, however it got there (Ng et al. 1999,
        "Policy invariance under reward transformations", without a discount). Evaluate without them.

    Raises:
        UserError: the env is not PushT with its T's corners.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], reach: float = 100.0, progress: float = 0.0, approach: float = 0.0
    ) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, reach=reach, progress=progress, approach=approach)
        gymnasium.Wrapper.__init__(self, env)
        space = env.observation_space
        if not isinstance(space, gymnasium.spaces.Dict) or {_KEYPOINTS, _AGENT} != space.keys():
            raise UserError(
                f"embodied_rl.envs.pusht:FromAgent: got an env that observes {space}, expected PushT with "
                "env.init_params.kwargs={obs_type: environment_state_agent_pos}"
            )
        self._reach, self._progress, self._approach = reach, progress, approach
        self._goal, self._potential = np.zeros((8, 2)), 0.0
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (36,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        seen, info = self.env.reset(seed=seed, options=options)
        board: Any = self.unwrapped
        goal = board.get_goal_pose_body(board.goal_pose)
        corners = (board.block.world_to_local(tuple(corner)) for corner in seen[_KEYPOINTS].reshape(8, 2))
        self._goal = np.array([goal.local_to_world(corner) for corner in corners])
        self._potential = self._potential_of(seen)
        return self._observed(seen), info

    def step(self, action: NDArray[np.float32]) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        board: Any = self.unwrapped
        target = np.array(board.agent.position) + self._reach * np.asarray(action, np.float64)
        seen, reward, terminated, truncated, info = self.env.step(target.clip(0.0, 2 * _HALF))
        before, self._potential = self._potential, self._potential_of(seen)
        return self._observed(seen), float(reward) + self._potential - before, terminated, truncated, info

    def _potential_of(self, seen: dict[str, NDArray[np.float64]]) -> float:
        """What guides: its growth is paid."""
        corners = seen[_KEYPOINTS].reshape(8, 2)
        away = np.linalg.norm(corners - self._goal, axis=1).mean()
        reached = np.linalg.norm(corners.mean(0) - seen[_AGENT])
        return -float(self._progress * away + self._approach * reached) / _HALF

    def _observed(self, seen: dict[str, NDArray[np.float64]]) -> NDArray[np.float32]:
        board: Any = self.unwrapped
        agent, corners = seen[_AGENT], seen[_KEYPOINTS].reshape(8, 2)
        parts = (agent - _HALF, board.agent.velocity, (corners - agent).ravel(), (corners - self._goal).ravel())
        return (np.concatenate(parts) / _HALF).astype(np.float32)
