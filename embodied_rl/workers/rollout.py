"""The rollout worker: the policy without gradients, serving the lanes of its env workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from embodied_rl.contracts import ActionChunk, ChunkResult, Delivery, EnvObs, RolloutEnd, RolloutStart
from embodied_rl.models.base import Policy, PolicyOutput, PolicySpec, Truncation
from embodied_rl.models.compilation import compile_acting
from embodied_rl.models.flops import ActingCost, acting_cost, countable, if_countable
from embodied_rl.models.registry import policy_of
from embodied_rl.models.weights.host import HostWeights, require_accelerator
from embodied_rl.models.weights.precision import hold_in
from embodied_rl.models.weights.stored import as_stored, settle
from embodied_rl.monitoring.peak_memory import UNKNOWN, Peak, PeakMemory
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.monitoring.work import Flops, Work, main_type, peak_of
from embodied_rl.plan import Channels, Lane, RunPlan
from embodied_rl.runtime.worker import Abandoned, GivenUp, Worker, WorkerContext
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.seeding import derived_seed
from embodied_rl.workers.inference import MicroBatches, uniform
from embodied_rl.workers.trajectory import TrajectoryBuilder, split_by_rank
from embodied_rl.workers.weight_planes import receiving_end
from embodied_rl.workers.weight_sync import WeightReceiver

Mode = Literal["train", "eval", "eval_sampled"]
"""The last two play the episodes of an evaluation, with its own temperature and with that of training."""
Turn: TypeAlias = RolloutStart | ChunkResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """What a rollout worker tells the runner about a rollout."""

    seconds: dict[str, float]
    """Phase -> wall seconds."""
    inferences: int
    """Decisions and values asked for at once, in one forward pass or, by micro-batches, in several."""
    interruptions: int
    """Versions of the weights that came in the middle."""
    work: Work | None = None
    """Of phase ``inference``; None where it cannot be counted."""
    peak_memory: Peak = UNKNOWN
    """Of the process, in the rollout."""


class RolloutWorker(Worker):
    """Answers turns stage by stage, one forward pass for its env workers' envs of a stage, and records trajectories.

    While it infers for one stage, the simulators step the others. It takes one message from every running lane of a
    stage before it answers, so which turns share a batch, and with it every result, is the same in each run.
    """

    def __init__(self, context: WorkerContext, plan: RunPlan[EmbodiedConfig], channels: Channels) -> None:
        super().__init__(context)
        config = plan.config
        self._plan, self._sampling, self._seed = plan, config.algorithm.sampling_params, config.actor.seed
        self._enable_offload, self._interruptible = config.rollout.enable_offload, config.rollout.interruptible
        self._chunks_ahead = config.rollout.chunks_ahead
        self._dtype = config.rollout.dtype
        self._torch_compile, self._cuda_graphs = config.rollout.torch_compile, config.rollout.cuda_graphs
        self._micro_batches = MicroBatches(config.rollout.micro_batch_size)
        self._resident: HostWeights | None = None
        self._stages = plan.lanes.served_by(context.rank, context.world_size)
        self._turns, self._answers = Channels.need(channels.turns), Channels.need(channels.answers)
        self._trajectories, self._channel = (
            Channels.need(channels.trajectories),
            receiving_end(channels.weights, plan, context),
        )
        self._actor_ranks = plan.world_size("actor")
        self._recording: dict[Lane, TrajectoryBuilder] = {}
        self._delivered: set[tuple[int, int, int]] = set()
        """(step, rollout epoch, first env id) of the trajectories that the actor has of the present rollout."""
        self._timer = PhaseTimer(ended=context.trace.phase)
        self._peak_memory = PeakMemory(context.device)
        self._with_actions, self._records_unacted = plan.replays, plan.records_unacted
        self._policy: Policy | None = None
        self._inferences = 0
        self._cost: ActingCost | None = None
        self._blank: Policy | None = None
        """The policy without memory, until its operations are counted."""
        self._flops = 0.0

    def setup(self, spec: PolicySpec) -> None:
        """Build the policy; its weights come with the first :meth:`load_weights`."""
        with as_stored():
            policy = policy_of(self._plan.config.model, spec, params=self._plan.model_params)
        policy.truncate(Truncation(top_p=self._sampling.top_p, top_k=self._sampling.top_k))
        self._policy = policy.eval().requires_grad_(False)
        if self._dtype is None:
            settle(policy)
        else:
            hold_in(policy, getattr(torch, self._dtype))
        if self._enable_offload:
            require_accelerator("rollout.enable_offload", self.context.device)
            self._resident = HostWeights(self._policy, self.context.device)
        else:
            self._policy.to(self.context.device)
        self._blank = if_countable(lambda: countable(policy))
        self._peak = peak_of(self.context.device, main_type(policy.parameters()))
        if self._torch_compile:
            compile_acting(policy, self.context.device, cuda_graphs=self._cuda_graphs)
        self._weights = WeightReceiver(self._policy.state_dict(), self._channel, self.context.rank)

    async def load_weights(self, version: int) -> int:
        """Take this version of the weights from the actor, unless it came in the middle of a rollout; returns what is
        held then."""
        await self._weights.receive_until(version)
        return self._weights.version

    async def serve(
        self, *, mode: Mode, step: int, first_epoch: int = 0, at_random: bool = False, again: bool = False
    ) -> RolloutReport:
        """Answer until every lane has said that no rollout follows; send what was recorded to the actor.

        Args:
            mode: which temperature; also part of the sampling seed, as is ``step``.
            first_epoch: the number of the first rollout epoch, where the step has had some already.
            at_random: actions are drawn uniformly, and no policy is asked.
            again: the rollout is made again, since an env worker was lost in it: what the actor has of it is not sent
                once more.
        """
        self._peak_memory.begin()
        if not again:
            self._delivered.clear()
        if self._resident:
            with self._timer.phase("load"):
                self._resident.load()
        interruptions = 0
        try:
            interruptions = await self._answer_all(mode, step, first_epoch, at_random)
        except GivenUp:
            self._recording.clear()
        if self._resident:
            with self._timer.phase("offload"):
                self._resident.drop()
        inferences, self._inferences = self._inferences, 0
        flops, self._flops = Flops(model=self._flops), 0.0
        return RolloutReport(
            seconds=self._timer.drain(),
            inferences=inferences,
            interruptions=interruptions,
            work=None if self._cost is None else Work(flops=flops, peak=self._peak),
            peak_memory=self._peak_memory.end(),
        )

    def _count_operations(self, turns: Mapping[Lane, Turn]) -> None:
        """Learn of the first observation that comes what acting on one takes."""
        blank, seen = self._blank, next((_obs(turn) for turn in turns.values() if not _ends(turn)), None)
        if blank is None or seen is None:
            return
        self._blank = None
        self._cost = if_countable(lambda: acting_cost(blank, seen.rows(slice(0, 1))))

    async def _answer_all(self, mode: Mode, step: int, first_epoch: int, at_random: bool) -> int:
        """Answer until every lane has said that no rollout follows; returns how often weights came in the middle."""
        open_lanes = {lane for stage in self._stages for lane in stage}
        rounds = chunks = interruptions = 0
        while open_lanes:
            running = set(open_lanes)
            while running:
                acted = False
                if self._interruptible and mode == "train" and self._weights.waiting:
                    with self._timer.phase("weights"):
                        await self._weights.receive()
                    interruptions += 1
                for index, stage in enumerate(self._stages):
                    turns = await self._collect([lane for lane in stage if lane in running], running, open_lanes)
                    acts = not all(map(_ends, turns.values()))
                    if acts and chunks == self._chunks_ahead and mode == "train":
                        with self._timer.phase("weights_wait"):
                            interruptions += await self._weights.receive_until(step)
                    acted |= acts
                    if turns:
                        self._count_operations(turns)
                        where = (get_args(Mode).index(mode), step, first_epoch, rounds, index, self.context.rank)
                        seed = derived_seed(self._seed, *where)
                        with self._timer.phase("inference"):
                            decisions = self._decide(turns, mode, seed, at_random=at_random)
                        for lane, decision in decisions.items():
                            await self._answers.put(self._answer(turns[lane], decision), key=lane)
                        with self._timer.phase("inference"):  # the envs step meanwhile
                            self._record(turns, decisions)
                        await self._deliver(turns, step)
                rounds += 1
                chunks += acted
        return interruptions

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError(f"{self.context.name}: setup(spec) comes first")
        return self._policy

    async def _collect(self, lanes: list[Lane], running: set[Lane], open_lanes: set[Lane]) -> dict[Lane, Turn]:
        """The next turn of each lane; lanes that end leave ``running``, and ``open_lanes`` if for good."""
        turns: dict[Lane, Turn] = {}
        for lane in lanes:
            with self._timer.phase("wait"):
                message: Turn | RolloutEnd | Abandoned = await self._turns.get(key=lane)
            if isinstance(message, Abandoned):
                raise GivenUp
            if isinstance(message, RolloutEnd):
                running.discard(lane)
                if message.final:
                    open_lanes.discard(lane)
                continue
            turns[lane] = message
            if isinstance(message, ChunkResult) and message.last:
                running.discard(lane)
        return turns

    @torch.inference_mode()
    def _decide(
        self, turns: Mapping[Lane, Turn], mode: Mode, seed: int, *, at_random: bool = False
    ) -> dict[Lane, PolicyOutput]:
        """The policy's decision for each turn but the last of a rollout: one forward pass for all."""
        acting = {lane: _obs(turn) for lane, turn in turns.items() if not _ends(turn)}
        if not acting:
            return {}
        temperature = self._sampling.temperature_eval if mode == "eval" else self._sampling.temperature
        observed = EnvObs.concatenate(list(acting.values()))
        if at_random:
            output = uniform(self.policy, observed, seed=seed)
            return {
                lane: output.changed(lambda tensor, rows=rows: tensor[rows]) for lane, rows in _rows(acting).items()
            }
        if self._cost is not None:
            self._flops += self._cost.act * len(observed)
        output = self._micro_batches.act(
            self.policy,
            self._move(observed),
            greedy=temperature == 0.0,
            temperature=temperature or 1.0,
            seed=seed,
        )
        self._inferences += 1
        if len(acting) == 1:
            return dict.fromkeys(acting, output)
        return {lane: output.changed(lambda tensor, rows=rows: tensor[rows]) for lane, rows in _rows(acting).items()}

    def _answer(self, turn: Turn, decision: PolicyOutput) -> ActionChunk:
        return ActionChunk(env_ids=_obs(turn).env_ids, actions=decision.actions, policy_version=self._weights.version)

    @torch.inference_mode()
    def _record(self, turns: Mapping[Lane, Turn], decisions: Mapping[Lane, PolicyOutput]) -> None:
        """Record what came of earlier decisions, with the values of states on which nobody acts, and the new ones."""
        unacted: dict[tuple[str, Lane], EnvObs] = {}
        for lane, turn in turns.items():
            if isinstance(turn, ChunkResult):
                if turn.last and turn.next_obs is not None:
                    unacted["next", lane] = turn.next_obs
                if turn.final_obs is not None:
                    unacted["final", lane] = turn.final_obs
        values, inputs = self._value(unacted), self._inputs(unacted)
        for lane, turn in turns.items():
            decision = decisions.get(lane)
            if isinstance(turn, RolloutStart):
                self._recording.pop(lane, None)  # of a rollout that was given up
                if turn.group_ids is not None:
                    self._recording[lane] = TrajectoryBuilder(
                        turn, with_actions=self._with_actions, with_unacted=self._records_unacted
                    )
            elif lane in self._recording:
                followed = values.get(("next", lane)) if decision is None else _first(decision.values)
                self._recording[lane].happened(turn, followed, values.get(("final", lane)))
                for name in ("next", "final"):
                    if (name, lane) in inputs:
                        self._recording[lane].led_to(unacted[name, lane].env_ids, inputs[name, lane])
            if decision is not None and lane in self._recording:
                self._recording[lane].decided(decision, self._weights.version)

    def _value(self, observations: Mapping[tuple[str, Lane], EnvObs]) -> dict[tuple[str, Lane], Tensor]:
        """The values of states on which nobody acts, each [N] float32; none without a value head."""
        if not observations or not self.policy.spec.values_per_chunk:
            return {}
        observed = EnvObs.concatenate(list(observations.values()))
        if self._cost is not None:
            self._flops += self._cost.values * len(observed)
        values = self._micro_batches.values(self.policy, self._move(observed))[:, 0]
        self._inferences += 1
        return {name: values[rows] for name, rows in _rows(observations).items()}

    def _inputs(self, observations: Mapping[tuple[str, Lane], EnvObs]) -> dict[tuple[str, Lane], dict[str, Tensor]]:
        """The replay inputs of states on which nobody acts, where the actor wants them (a critic of its own, a replay
        buffer); else none. They are those of a decision that is thrown away."""
        recorded = {name: obs for name, obs in observations.items() if name[1] in self._recording}
        if not recorded or not self._records_unacted:
            return {}
        observed = EnvObs.concatenate(list(recorded.values()))
        if self._cost is not None:
            self._flops += self._cost.act * len(observed)
        output = self._micro_batches.act(
            self.policy,
            self._move(observed),
            greedy=True,
            temperature=1.0,
            seed=self._seed,  # nothing depends on it
        )
        self._inferences += 1
        return {
            name: {key: tensor[rows] for key, tensor in output.replay_inputs.items()}
            for name, rows in _rows(recorded).items()
        }

    async def _deliver(self, turns: Mapping[Lane, Turn], step: int) -> None:
        """Send the rollout epochs that are complete with ``turns`` to the actor, every rank its groups."""
        for lane, turn in turns.items():
            if lane not in self._recording or isinstance(turn, RolloutStart):
                continue
            for trajectory in self._recording[lane].complete():
                place = (step, trajectory.rollout_epoch, int(trajectory.env_ids[0]))
                if place in self._delivered:
                    continue
                for rank, part in enumerate(split_by_rank(trajectory, self._actor_ranks)):
                    await self._trajectories.put(Delivery(step=step, trajectory=part), key=rank)
                self._delivered.add(place)
            if _ends(turn):
                del self._recording[lane]

    def _move(self, obs: EnvObs) -> EnvObs:
        """To the policy's device; images travel as uint8, once."""
        if self.context.device == "cpu":
            return obs
        device = self.context.device
        return EnvObs(
            env_ids=obs.env_ids.to(device),
            images={camera: image.to(device, non_blocking=True) for camera, image in obs.images.items()},
            state=obs.state.to(device),
            instructions=obs.instructions,
        )


def _ends(turn: Turn) -> bool:
    """Whether it is its rollout's last."""
    return isinstance(turn, ChunkResult) and turn.last


def _obs(turn: Turn) -> EnvObs:
    obs = turn.obs if isinstance(turn, RolloutStart) else turn.next_obs
    assert obs is not None
    return obs


def _first(values: Tensor | None) -> Tensor | None:
    """The first value of each chunk: that of the state it begins with."""
    return None if values is None else values[:, 0]


def _rows(parts: Mapping[Any, EnvObs]) -> dict[Any, slice]:
    """Where each part lies in the concatenation of all."""
    rows, start = {}, 0
    for key, obs in parts.items():
        rows[key] = slice(start, start + len(obs))
        start += len(obs)
    return rows
