"""The rollout worker: the policy without gradients, serving the lanes of its env workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied_rl.channel.base import Channel
from embodied_rl.contracts import ActionChunk, EnvObs, PolicyRequest, RolloutEnd
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import policy_of
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.runtime.worker import Worker, WorkerContext
from embodied_rl.schema import ModelConfig, SamplingConfig
from embodied_rl.training.offload import HostWeights, require_accelerator
from embodied_rl.workers.lanes import Lane, Lanes
from embodied_rl.workers.weight_sync import WeightReceiver

Mode = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """What a rollout worker tells the runner about a rollout."""

    seconds: dict[str, float]
    """Phase -> wall seconds."""
    inferences: int
    """Forward passes."""
    interruptions: int
    """Versions of the weights that came in the middle."""


class RolloutWorker(Worker):
    """Answers requests stage by stage: one forward pass for all its env workers' envs of a stage.

    While it infers for one stage, the simulators step the others. It takes one message from every running lane of a
    stage before it answers, so which requests share a batch, and with it every result, is the same in each run.

    Args:
        model: the config's section.
        sampling: temperatures of training and evaluation.
        seed: of the sampled actions.
        lanes: all lanes of the run; this worker serves those of every ``world_size``-th env worker.
        requests, answers: keyed by lane.
        weights: keyed by rollout rank.
        enable_offload: keep the weights in host memory but while serving.
        interruptible: take new weights in the middle of a training rollout, between two chunks.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        model: ModelConfig,
        sampling: SamplingConfig,
        seed: int,
        lanes: Lanes,
        requests: Channel,
        answers: Channel,
        weights: Channel,
        enable_offload: bool = False,
        interruptible: bool = False,
    ) -> None:
        super().__init__(context)
        self._model_config, self._sampling, self._seed = model, sampling, seed
        self._enable_offload, self._interruptible = enable_offload, interruptible
        self._resident: HostWeights | None = None
        self._stages = lanes.served_by(context.rank, context.world_size)
        self._requests, self._answers, self._channel = requests, answers, weights
        self._timer = PhaseTimer()
        self._policy: Policy | None = None
        self._inferences = 0

    def setup(self, spec: PolicySpec) -> None:
        """Build the policy; its weights come with the first :meth:`load_weights`."""
        self._policy = policy_of(self._model_config, spec).eval().requires_grad_(False)
        if self._enable_offload:
            require_accelerator("rollout.enable_offload", self.context.device)
            self._resident = HostWeights(self._policy, self.context.device)
        else:
            self._policy.to(self.context.device)
        self._weights = WeightReceiver(self._policy.state_dict(), self._channel, self.context.rank)

    async def load_weights(self, version: int) -> int:
        """Take this version of the weights from the actor, unless it came in the middle of a rollout; returns what is
        held then."""
        await self._weights.receive_until(version)
        return self._weights.version

    async def serve(self, *, mode: Mode, step: int, first_epoch: int = 0) -> RolloutReport:
        """Answer until every lane has said that no rollout follows.

        Args:
            mode: which temperature; also part of the sampling seed, as is ``step``.
            first_epoch: the number of the first rollout epoch, where the step has had some already.
        """
        if self._resident:
            with self._timer.phase("load"):
                self._resident.load()
        open_lanes = {lane for stage in self._stages for lane in stage}
        rounds = interruptions = 0
        while open_lanes:
            running = set(open_lanes)
            while running:
                if self._interruptible and mode == "train" and self._weights.waiting:
                    with self._timer.phase("weights"):
                        await self._weights.receive()
                    interruptions += 1
                for index, stage in enumerate(self._stages):
                    requests = await self._collect([lane for lane in stage if lane in running], running, open_lanes)
                    if requests:
                        seed = _seed(self._seed, mode, step, first_epoch, rounds, index, self.context.rank)
                        with self._timer.phase("inference"):
                            answers = self._act(requests, mode, seed)
                        for lane, answer in answers.items():
                            await self._answers.put(answer, key=lane)
                rounds += 1
        if self._resident:
            with self._timer.phase("offload"):
                self._resident.drop()
        inferences, self._inferences = self._inferences, 0
        return RolloutReport(seconds=self._timer.drain(), inferences=inferences, interruptions=interruptions)

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError(f"{self.context.name}: setup(spec) comes first")
        return self._policy

    async def _collect(self, lanes: list[Lane], running: set[Lane], open_lanes: set[Lane]) -> dict[Lane, PolicyRequest]:
        """The next request of each lane; lanes that ended leave ``running``, and ``open_lanes`` if for good."""
        requests: dict[Lane, PolicyRequest] = {}
        for lane in lanes:
            with self._timer.phase("wait"):
                message: PolicyRequest | RolloutEnd = await self._requests.get(key=lane)
            if isinstance(message, PolicyRequest):
                requests[lane] = message
            else:
                running.discard(lane)
                if message.final:
                    open_lanes.discard(lane)
        return requests

    @torch.inference_mode()
    def _act(self, requests: Mapping[Lane, PolicyRequest], mode: Mode, seed: int) -> dict[Lane, ActionChunk]:
        temperature = self._sampling.temperature if mode == "train" else self._sampling.temperature_eval
        acting = {lane: r.obs for lane, r in requests.items() if not r.values_only}
        valuing = {lane: r.obs for lane, r in requests.items() if r.values_only}
        finals = {lane: r.final_obs for lane, r in requests.items() if r.final_obs is not None}
        version = self._weights.version
        answers: dict[Lane, dict[str, Any]] = {
            lane: {"env_ids": r.obs.env_ids, "policy_version": version} for lane, r in requests.items()
        }
        if acting:
            generator = torch.Generator(self.context.device).manual_seed(seed)
            output = self.policy.act(
                self._move(_concatenate(list(acting.values()))),
                greedy=temperature == 0.0,
                temperature=temperature or 1.0,
                generator=generator,
            )
            self._inferences += 1
            for lane, rows in _rows(acting).items():
                answers[lane].update(
                    actions=output.actions[rows].cpu(),
                    logprobs=output.logprobs[rows].cpu(),
                    values=None if output.values is None else output.values[rows].cpu(),
                    replay_inputs={key: tensor[rows].cpu() for key, tensor in output.replay_inputs.items()},
                    tokens=None if output.tokens is None else output.tokens[rows].cpu(),
                )
        has_values = self.policy.spec.values_per_chunk > 0
        later = {f"obs{lane}": obs for lane, obs in valuing.items()} | {f"final{k}": obs for k, obs in finals.items()}
        states: dict[str, Tensor] = {}
        if later and has_values:
            values = self.policy.values(self._move(_concatenate(list(later.values())))).cpu()[:, 0]
            self._inferences += 1
            states = {name: values[rows] for name, rows in _rows(later).items()}
        for lane, request in requests.items():
            answer = answers[lane]
            if request.values_only:
                shape = (len(request.obs), 0, self.policy.spec.action_dim)
                answer["actions"] = torch.zeros(shape)
            if has_values:
                now = states[f"obs{lane}"] if request.values_only else answer["values"][:, 0]
                answer["bootstrap_values"] = _with_finals(now, request, states.get(f"final{lane}"))
        return {lane: ActionChunk(**fields) for lane, fields in answers.items()}

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


def _with_finals(values: Tensor, request: PolicyRequest, final_values: Tensor | None) -> Tensor:
    """``values`` ([N], of the next observations) with those of ended episodes replaced by V(final_obs)."""
    if request.final_obs is None or final_values is None:
        return values.clone()
    place = {int(env_id): row for row, env_id in enumerate(request.obs.env_ids)}
    result = values.clone()
    result[[place[int(env_id)] for env_id in request.final_obs.env_ids]] = final_values
    return result


def _concatenate(parts: list[EnvObs]) -> EnvObs:
    if len(parts) == 1:
        return parts[0]
    return EnvObs(
        env_ids=torch.cat([part.env_ids for part in parts]),
        images={camera: torch.cat([part.images[camera] for part in parts]) for camera in parts[0].images},
        state=torch.cat([part.state for part in parts]),
        instructions=tuple(text for part in parts for text in part.instructions),
    )


def _rows(parts: Mapping[Any, EnvObs]) -> dict[Any, slice]:
    """Where each part lies in the concatenation of all."""
    rows, start = {}, 0
    for key, obs in parts.items():
        rows[key] = slice(start, start + len(obs))
        start += len(obs)
    return rows


def _seed(seed: int, mode: Mode, *where: int) -> int:
    """A generator's seed from the run's and the place in the run, so that nothing has to be remembered to resume."""
    return int(np.random.SeedSequence([seed, mode == "eval", *where]).generate_state(1, np.uint64)[0] >> 1)
