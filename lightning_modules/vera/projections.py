"""The two frozen random matrices that all layers of a VeRA model share.

VeRA (arXiv 2310.11454), Section 3.1: A (r, n) and B (m, r) are drawn once from a seed. Layers of
different shapes use slices of one A and B with the largest n and m. The Kaiming uniform draw equals
that of peft 0.21.2 to the bit: first A, then B, from one CPU generator, in float32.
"""

import hashlib
import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Init = Literal["kaiming_uniform", "kaiming_normal", "uniform"]
INITS: tuple[str, ...] = get_args(Init)


class Projections:
    """A (rank, inputs) and B (outputs, rank), drawn on first use and cached by device and type.

    They are neither parameters nor buffers: no state_dict, DDP bucket or FSDP shard holds them. All
    layers share one object. It is immutable, so that copies of a model share it as well; a pickled
    model draws the matrices again.

    Args:
        rank, inputs, outputs: r, n and m.
        seed: of the CPU generator.
        init: "kaiming_uniform", "kaiming_normal", or "uniform" on [0, 0.1] (Table 6).
        given: A and B from a file, in float32 on the CPU, to use instead of a draw.
    """

    def __init__(
        self,
        rank: int,
        inputs: int,
        outputs: int,
        seed: int = 0,
        init: Init = "kaiming_uniform",
        given: tuple[Tensor, Tensor] | None = None,
    ):
        self.rank, self.inputs, self.outputs = rank, inputs, outputs
        self.seed, self.init, self.given = seed, init, given
        self._copies: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Projections":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copies": {}}

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B on a device and in a type."""
        copies = self._copies.get((device, dtype))
        if copies is None:
            # a tensor created in inference mode could not be used in a later training step
            with torch.inference_mode(False), torch.no_grad():
                if device.type == "meta":
                    copies = self._empty(device, dtype)
                elif (device, dtype) == (torch.device("cpu"), torch.float32):
                    copies = self.given or self._draw()
                else:
                    a, b = self.on(torch.device("cpu"), torch.float32)
                    copies = a.to(device, dtype), b.to(device, dtype)
            self._copies[device, dtype] = copies
        return copies

    def sha256(self) -> list[str]:
        """SHA-256 of the bytes of A and of B, in float32."""
        matrices = self.on(torch.device("cpu"), torch.float32)
        return [hashlib.sha256(m.contiguous().numpy().tobytes()).hexdigest() for m in matrices]

    def _empty(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            torch.empty(self.rank, self.inputs, device=device, dtype=dtype),
            torch.empty(self.outputs, self.rank, device=device, dtype=dtype),
        )

    def _draw(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        matrices = self._empty(torch.device("cpu"), torch.float32)
        for matrix in matrices:
            std = math.sqrt(2) / math.sqrt(matrix.shape[1])  # Kaiming with ReLU's gain, by fan_in
            if self.init == "kaiming_uniform":
                bound = math.sqrt(3.0) * std
                matrix.uniform_(-bound, bound, generator=generator)
            elif self.init == "kaiming_normal":
                matrix.normal_(0, std, generator=generator)
            else:
                matrix.uniform_(0, 0.1, generator=generator)
        return matrices
