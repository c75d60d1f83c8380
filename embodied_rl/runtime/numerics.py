"""How torch calculates in a run's workers. Without torch until it is applied: a worker's process reads this first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """torch's settings of a whole process; the defaults are torch's own."""

    matmul_precision: str = "highest"
    """Of float32 products, as ``torch.set_float32_matmul_precision`` takes it."""
    cudnn_tf32: bool = True
    """cuDNN may round the inputs of float32 convolutions to TF32."""

    @staticmethod
    def current() -> Numerics:
        """Those of this process."""
        import torch

        return Numerics(
            matmul_precision=torch.get_float32_matmul_precision(), cudnn_tf32=torch.backends.cudnn.allow_tf32
        )

    def apply(self) -> None:
        """Make them this process's."""
        import torch

        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
