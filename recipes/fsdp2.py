"""FSDP2: Lightning's strategy set up for these modules, which shard data-parallel only."""

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.optim import Optimizer


class FSDP2(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer states over all devices; `fsdp2` for short.

    Lightning's own class by default makes the devices of a node share their batches (tensor
    parallelism), and loads moments into the wrong parameters from a checkpoint of one device or of
    DDP if the optimizer has several parameter groups.

    Args:
        save_distributed_checkpoint: whether a checkpoint is a folder of shards, or one file that
            any number of devices loads.
        **kwargs: process_group_backend and timeout, see ModelParallelStrategy.
    """

    def __init__(self, save_distributed_checkpoint: bool = False, **kwargs: Any) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **kwargs,
        )

    def setup_environment(self) -> None:
        """Take all devices of all nodes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model, and the optimizers with their states named by their own groups.

        Lightning names the states of a single file in the order of `model.parameters()`.
        """
        optimizers = self.optimizers
        if not Path(checkpoint_path).is_file() or not optimizers:
            return super().load_checkpoint(checkpoint_path, weights_only)
        self.optimizers = []
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.optimizers = optimizers
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            named = named_state(state, optimizer, self.model)
            set_optimizer_state_dict(self.model, optimizer, named, options=options)
        return checkpoint


StrategyRegistry.register("fsdp2", FSDP2, "FSDP2 over all devices, with checkpoints of one file")


def named_state(state: dict[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer's saved state with parameters' names instead of numbers.

    Args:
        state: of an optimizer with the same parameter groups, as `state_dict()` returns it.
        optimizer: whose groups tell which number stands for which parameter; each has its
            parameters in the model's order, to which FSDP2 sorts the numbers when it saves.
        model: has the optimizer's parameters.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    groups = list(zip(state["param_groups"], optimizer.param_groups, strict=True))
    names = {
        number: name_of[parameter]
        for saved, mine in groups
        for number, parameter in zip(saved["params"], mine["params"], strict=True)
    }
    return {
        "state": {names[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**saved, "params": [names[number] for number in saved["params"]]}
            for saved, _ in groups
        ],
    }
