"""``cnn``: convolutions on the env's cameras beside its state, for envs that show pixels; without instructions.

The layers are those of Mnih et al. 2015 (Nature 518, 529-533), 32, 64 and 64 channels of 8, 4 and 3 pixels with strides
4, 2 and 1, then 512 units for each camera; the heads are ``mlp``'s and share them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicySpec, camera_images, camera_layers, require_cameras
from embodied_rl.models.mlp import MlpParams, MlpPolicy, orthogonal
from embodied_rl.models.normalization import RunningNormalizer

_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of each."""
SMALLEST = 36
"""Pixels that the layers need along each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CnnParams(MlpParams):
    """``model.params`` of ``cnn``; ``normalize_observations`` is of the state, pictures are divided by 255."""

    image_features: PositiveInt = 512
    """Units that each camera's convolutions end in."""


class CnnPolicy(MlpPolicy):
    """As :class:`~embodied_rl.models.mlp.MlpPolicy`, on features of the cameras' images and the state."""

    Params = CnnParams
    params: CnnParams

    def __init__(self, spec: PolicySpec, params: CnnParams) -> None:
        super().__init__(spec, params)
        self.reparameterized = False  # critics of pictures would need convolutions of their own

    def _build_inputs(self) -> int:
        spec, params = self.spec, self.params
        require_cameras("cnn", spec)
        for camera, (height, width) in spec.image_shapes.items():
            if min(height, width) < SMALLEST:
                raise UserError(
                    f"model_type 'cnn': the camera {camera} has {height}x{width} pixels, and the convolutions need at "
                    f"least {SMALLEST} along each axis; let the env draw larger images (env.init_params)"
                )
        self.cameras = camera_layers(
            {camera: _convolutions(shape, params.image_features) for camera, shape in spec.image_shapes.items()}
        )
        normalizes = params.normalize_observations and spec.state_dim > 0
        self.normalizer = RunningNormalizer(spec.state_dim) if normalizes else None
        return spec.state_dim + params.image_features * len(spec.image_shapes)

    def _inputs(self, obs: EnvObs) -> dict[str, Tensor]:
        images = {f"images/{camera}": camera_images("cnn", self.spec, obs, camera) for camera in self.spec.image_shapes}
        return super()._inputs(obs) | images  # uint8: a quarter of float32, and the actor scales them again

    def _features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        seen = [super()._features(inputs)]
        for camera, layers in zip(self.spec.image_shapes, self.cameras.values(), strict=True):
            images = inputs[f"images/{camera}"].to(self._device)
            dtype = next(layers.parameters()).dtype
            seen.append(layers(images.movedim(-1, -3).to(dtype) / 255.0))
        return torch.cat([part.to(seen[-1].dtype) for part in seen], dim=-1)

    def shard_units(self) -> list[nn.Module]:
        return [*self.cameras.values(), *super().shard_units()]


def _convolutions(shape: tuple[int, int], features: int) -> nn.Sequential:
    """[N,3,H,W] in 0 to 1 -> [N,features]."""
    layers: list[nn.Module] = []
    channels, (height, width) = 3, shape
    for out, kernel, stride in _LAYERS:
        layers += [orthogonal(nn.Conv2d(channels, out, kernel, stride), math.sqrt(2.0)), nn.ReLU()]
        channels, height, width = out, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    flat = channels * height * width
    return nn.Sequential(*layers, nn.Flatten(), orthogonal(nn.Linear(flat, features), math.sqrt(2.0)), nn.ReLU())
