"""gym-pusht's PushT with less Python for each step: the same states, rewards and infos, bit for bit on x86-64.

Nearly all of a step's time goes into pymunk's vectors and into shapely's polygons; Chipmunk's ten steps of physics take
a hundredth. Importing this registers ``FastPushT-v0``, whose arguments are those of
``gym_pusht/PushT-v0``::

    gymnasium.make("embodied_rl.envs.fast_pusht:FastPushT-v0", obs_type="state")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import shapely
from gym_pusht.envs.pusht import PushTEnv
from numpy.typing import NDArray


class FastPushT(PushTEnv):
    """As the class that it extends."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As documented there. ``action`` [2]: where the agent is drawn to, in pixels."""
        self.n_contact_points = 0
        self._last_action = action
        agent, advance, dt = self.agent, self.space.step, self.dt
        spring, damper = self.k_p, self.k_v
        (target_x, target_y), (x, y), (vx, vy) = map(float, action), agent.position, agent.velocity
        for _ in range(int(1 / (dt * self.control_hz))):
            vx += (spring * (target_x - x) + damper * (0 - vx)) * dt
            vy += (spring * (target_y - y) + damper * (0 - vy)) * dt
            agent.velocity = (vx, vy)
            advance(dt)
            # A kinematic body: nothing but its velocity moves it.
            x += vx * dt
            y += vy * dt

        coverage = self._get_coverage()
        reward = np.clip(coverage / self.success_threshold, 0.0, 1.0)
        terminated = coverage > self.success_threshold
        info = self._get_info()
        info["is_success"], info["coverage"] = terminated, coverage
        return self.get_obs(), reward, terminated, False, info

    def get_obs(self) -> Any:
        """As documented there."""
        if self.obs_type != "environment_state_agent_pos":
            return super().get_obs()
        return {"environment_state": self._keypoints_here().flatten(), "agent_pos": np.array(self.agent.position)}

    def _keypoints_here(self) -> NDArray[np.float64]:
        """[8,2], as :meth:`get_keypoints`."""
        place = (*self.block.position, self.block.angle)
        if self._keypoints is None or self._keypoints[0] != place:
            x, y, angle = place
            cos, sin = math.cos(angle), math.sin(angle)
            found = np.array([(a * cos - b * sin + x, a * sin + b * cos + y) for a, b in self._corners])
            self._keypoints = place, found
        return self._keypoints[1]

    def _setup(self) -> None:
        super()._setup()
        self._corners = [(float(a), float(b)) for shape in self._block_shapes for a, b in shape.get_vertices()]
        # Each with what it is of: most steps do not move the T.
        self._keypoints: tuple[tuple[float, ...], NDArray[np.float64]] | None = None
        self._covered: tuple[tuple[float, ...], float] | None = None
        self._goal: tuple[tuple[float, ...], Any] | None = None

    def _get_coverage(self) -> float:
        place = (*self.block.position, self.block.angle, *self.goal_pose)
        if self._covered is None or self._covered[0] != place:
            self._covered = place, self._cover()
        return self._covered[1]

    def _cover(self) -> float:
        goal, corners = self._goal_shape(), [self.block.local_to_world(corner) for corner in self._corners]
        (left, bottom, right, top), (xs, ys) = goal.bounds, zip(*corners, strict=True)
        if min(xs) > right or max(xs) < left or min(ys) > top or max(ys) < bottom:
            return 0.0
        tee = _tee(corners)
        if not shapely.intersects(goal, tee):
            return 0.0
        return float(shapely.area(shapely.intersection(goal, tee))) / float(shapely.area(goal))

    def _goal_shape(self) -> Any:
        pose = tuple(self.goal_pose)
        if self._goal is None or self._goal[0] != pose:
            body = self.get_goal_pose_body(self.goal_pose)
            shape = _tee([body.local_to_world(corner) for corner in self._corners])
            shapely.prepare(shape)
            self._goal = pose, shape
        return self._goal[1]


def _tee(corners: Sequence[Any]) -> Any:
    """The polygons of a T's two rectangles, of four corners each."""
    rings = np.array([[*corners[:4], corners[0]], [*corners[4:], corners[4]]])
    rectangles: Any = shapely.polygons(rings)
    return shapely.multipolygons(rectangles)


gymnasium.register(
    id="FastPushT-v0", entry_point=f"{__name__}:FastPushT", max_episode_steps=300, kwargs={"obs_type": "state"}
)
