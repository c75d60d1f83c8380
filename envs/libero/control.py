"""robosuite's operational-space controller as two compiled functions: the same torques without its look-ups.

Source: Khatib 1987, "A unified approach for motion and force control of robot manipulators".
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from robosuite.controllers.osc import OperationalSpaceController
from robosuite.models.grippers import PandaGripper
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error

Array = NDArray[np.float64]


class Controller:
    """The effect of robosuite's ``SingleArm.control``, to the last bit, on a Panda that an operational-space controller
    moves.

    Its compiled functions call robosuite's own, which are compiled, too. Numba does not keep them on disk: it would not
    notice that what they call, of another file, has changed. Products that robosuite has NumPy compute are left to
    NumPy, whose BLAS may round otherwise than SciPy's, which compiled functions call.

    Args:
        robot: robosuite's.
        sim: robosuite's simulation.

    Raises:
        RuntimeError: another kind of controller or gripper.
    """

    def __init__(self, robot: Any, sim: Any) -> None:
        import mujoco

        self._mujoco: Any = mujoco
        osc, gripper = robot.controller, robot.gripper
        interpolated = getattr(osc, "interpolator_pos", None) or getattr(osc, "interpolator_ori", None)
        if not isinstance(osc, OperationalSpaceController) or not osc.uncoupling or interpolated:
            raise RuntimeError(f"{osc.name}: expected an uncoupled operational-space controller that aims at its goal")
        if type(gripper) is not PandaGripper:
            raise RuntimeError(f"{type(gripper).__name__}: expected a PandaGripper")
        model, data = self._model, self._data = sim.model._model, sim.data._data
        if osc.new_update:
            raise RuntimeError("expected a controller that knows the arm from a reset")
        self._osc: Any = osc
        self._site = sim.model.site_name2id(osc.eef_name)
        self._hand, self._hand_axes = data.site_xpos[self._site], data.site_xmat[self._site]
        self._arm, self._joints = np.array(osc.qvel_index), np.array(osc.qpos_index)
        self._mass_entries = _entries_of_mass(model, self._arm)
        fingers = [sim.model.actuator_name2id(actuator) for actuator in gripper.actuators]
        limits = model.actuator_ctrlrange[fingers]
        self._actuators = (
            np.array(robot._ref_joint_actuator_indexes),
            *(np.array(limit, dtype=np.float64) for limit in robot.torque_limits),
            np.array(fingers),
            0.5 * (limits[:, 1] + limits[:, 0]),
            0.5 * (limits[:, 1] - limits[:, 0]),
        )
        self._finger_speed = np.array([-1.0, 1.0]) * gripper.speed
        self._jacobians = np.zeros((2, 3, model.nv))
        joints = len(self._arm)
        # The memory order of robosuite's: in another one, sums would be in another order and rounded otherwise.
        self._position, self._rotation = (np.empty((3, joints), order="F") for _ in range(2))
        self._both, self._mass = np.empty((6, joints), order="F"), np.empty((joints, joints), order="F")
        self._wrench, self._speed = np.empty(6), np.empty((2, 3))
        self._at_reset = dict(vars(osc))
        self.goal: tuple[Array, Array] | None = None
        """[3] metres and [3,3], place and axes that the hand is moved to; None before an episode's first step. With
        ``fingers`` all that the next step depends on besides the physics."""
        self.fingers: Array = np.array(np.broadcast_to(gripper.current_action, 2), dtype=np.float64)
        """[2] in [-1, 1], the fingers' commands."""

    def begin(self, action: Array) -> None:
        """The first physics step of a control step: set the goal to where the hand is, moved by ``action`` [7] in
        [-1, 1], and the actuators' commands. Poses and bias forces must be up to date."""
        osc = self._osc
        if self.goal is not None:
            osc.ee_pos, osc.ee_ori_mat, osc.new_update = self._hand.copy(), self._hand_axes.reshape(3, 3).copy(), False
            osc.goal_pos, osc.goal_ori = self.goal
            osc.set_goal(action[:-1])
            self.goal = osc.goal_pos, np.ascontiguousarray(osc.goal_ori)
            self.hold(action[-1])
            return
        # robosuite's does not look at the arm here, but takes it to be where the reset put it.
        vars(osc).update(self._at_reset)
        osc.set_goal(action[:-1])
        torques = osc.run_controller()
        self.goal = osc.goal_pos, np.ascontiguousarray(osc.goal_ori)
        motors, low, high, finger_motors, finger_bias, finger_weight = self._actuators
        self._data.ctrl[motors] = np.clip(torques, low, high)
        self.fingers[:] = np.clip(self.fingers + self._finger_speed * np.sign(action[-1]), -1.0, 1.0)
        self._data.ctrl[finger_motors] = finger_bias + finger_weight * self.fingers

    def hold(self, gripper_action: np.float64) -> None:
        """The actuators' commands for any other physics step."""
        data, osc, actuators = self._data, self._osc, self._actuators
        all_position, all_rotation = self._jacobians
        self._mujoco.mj_jacSite(self._model, data, all_position, all_rotation, self._site)
        np.dot(all_position, data.qvel, out=self._speed[0])
        np.dot(all_rotation, data.qvel, out=self._speed[1])
        goal = (self.goal, osc.kp, osc.kd)
        jacobians = (self._position, self._rotation, self._both)
        for_position, for_rotation, nullspace, force, torque = _forces(
            data.M, self._mass_entries, self._jacobians, self._arm, self._hand, self._hand_axes, self._speed, goal,
            self._mass, jacobians,
        )  # fmt: skip
        np.dot(for_position, force, out=self._wrench[:3])
        np.dot(for_rotation, torque, out=self._wrench[3:])
        torques = np.dot(self._both.T, self._wrench)
        _command(
            torques, data.qfrc_bias, data.qpos, data.qvel, self._arm, self._joints, self._mass, nullspace,
            osc.initial_joint, actuators, self._finger_speed * np.sign(gripper_action), self.fingers, data.ctrl,
        )  # fmt: skip


def _entries_of_mass(model: Any, dofs: NDArray[np.integer]) -> NDArray[np.int64]:
    """[n,n]: where the mass matrix of these degrees of freedom stands among the entries of ``MjData.M``."""
    entries = np.full((len(dofs), len(dofs)), -1)
    for row, dof in enumerate(dofs):
        first = model.M_rowadr[dof]
        columns = model.M_colind[first : first + model.M_rownnz[dof]].tolist()
        for column, other in enumerate(dofs):
            if other in columns:
                entries[row, column] = entries[column, row] = first + columns.index(other)
    if (entries < 0).any():
        raise RuntimeError("expected an arm whose joints are one chain")
    return entries


@numba.njit
def _forces(inertia, entries, all_jacobians, arm, hand, hand_axes, speed, goal, mass, jacobians):
    """Force and torque wanted at the hand, and the matrices that turn them into torques. Writes ``mass`` and
    ``jacobians``, which are the arm's."""
    (goal_position, goal_axes), kp, kd = goal
    position, rotation, both = jacobians
    for i in range(len(arm)):
        for j in range(len(arm)):
            mass[i, j] = inertia[entries[i, j]]
        for axis in range(3):
            position[axis, i] = both[axis, i] = all_jacobians[0, axis, arm[i]]
            rotation[axis, i] = both[axis + 3, i] = all_jacobians[1, axis, arm[i]]
    _, for_position, for_rotation, nullspace = opspace_matrices(mass, both, position, rotation)
    force = (goal_position - hand) * kp[0:3] + -speed[0] * kd[0:3]
    torque = orientation_error(goal_axes, hand_axes.reshape((3, 3))) * kp[3:6] + -speed[1] * kd[3:6]
    return for_position, for_rotation, nullspace, force, torque


@numba.njit
def _command(torques, bias, qpos, qvel, arm, joints, mass, nullspace, rest, actuators, finger_step, fingers, ctrl):
    """Add bias forces and the pull of the elbow to its ``rest``, move ``fingers`` by ``finger_step``, and write all of
    it to ``ctrl``, within limits."""
    motors, low, high, finger_motors, finger_bias, finger_weight = actuators
    torques = (torques + bias[arm]) + nullspace_torques(mass, nullspace, rest, qpos[joints], qvel[arm])
    for i in range(len(motors)):
        ctrl[motors[i]] = min(max(torques[i], low[i]), high[i])
    for i in range(len(fingers)):
        fingers[i] = min(max(fingers[i] + finger_step[i], -1.0), 1.0)
        ctrl[finger_motors[i]] = finger_bias[i] + finger_weight[i] * fingers[i]
