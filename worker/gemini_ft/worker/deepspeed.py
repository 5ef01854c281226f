"""DeepSpeed ZeRO-3 as one Stateful: the fp32 partitions of this rank, its optimizer state, scheduler and counters.

The 16-bit parameters are not kept: they are what the fp32 partitions round to, and are rebuilt from them. Partitions
and moments keep their addresses from step to step, so staging may copy from them while forward and backward run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from gemini_ft.contracts.errors import ConfigurationError, StateError
from gemini_ft.worker.checkpointer import Checkpointer
from gemini_ft.worker.optimizer_state import predicted_optimizer_state
from gemini_ft.worker.stateful import Stateful

__all__ = ["DeepSpeedState", "checkpointer"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SUPPORTED_OPTIMIZERS = ("Adam", "AdamW", "FusedAdam")
_SCALARS = (bool, int, float, type(None))


class DeepSpeedState:
    """The state of a DeepSpeed ZeRO-3 engine on this rank, exact to the bit; all ranks must load it together.

    Supported: stage 3 with Adam, AdamW or FusedAdam, bf16, fp16 (with its loss scaler) or fp32. Refused by name: other
    stages, offload, ZeRO++ quantization and secondary partitions, Muon, ZenFlow, mixture of experts, pipelines.

    Raises:
        ConfigurationError: the engine uses something that this adapter does not keep.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        _refuse_unsupported(engine)
        self.engine = engine
        self._zero: DeepSpeedZeroOptimizer_Stage3 = engine.optimizer
        self._clear_padding()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer inside the engine, for its step hook."""
        base: torch.optim.Optimizer = self._zero.optimizer
        return base

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps; its tensors are the live ones.

        Raises:
            StateError: gradients are being accumulated; the state is only whole after `engine.step()` at a boundary.
        """
        self._refuse_mid_accumulation()
        return self._build(self._with_partitions(self.optimizer.state_dict))

    def predicted_state_dict(self) -> dict[str, Any]:
        """Return the state as it will be after the first step; missing moments are on meta."""
        return self._build(self._with_partitions(lambda: predicted_optimizer_state(self.optimizer)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state and rebuild the 16-bit parameters; collective.

        Raises:
            StateError: the state belongs to another rank, world size or partitioning.
        """
        self._refuse_foreign(state_dict)
        zero, engine = self._zero, self.engine
        zero.checkpoint_event_prologue()
        self._with_partitions(lambda: self.optimizer.load_state_dict(state_dict["optimizer"]))
        for live, kept in zip(zero.fp32_partitioned_groups_flat, state_dict["partitions"], strict=True):
            live.data.copy_(kept)
        _copy_named(_frozen(engine), state_dict["frozen"])
        _copy_named(_buffers(engine), state_dict["buffers"])
        for sub_group in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(sub_group)
        _set_attributes(zero.loss_scaler, state_dict["loss_scaler"])
        for name in ("overflow", "custom_loss_scaler", "external_loss_scale"):
            setattr(zero, name, state_dict["scaling"][name])
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state_dict["lr_scheduler"])
        _set_attributes(engine, state_dict["counters"])
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.checkpoint_event_epilogue()

    def _build(self, optimizer: Any) -> dict[str, Any]:
        zero, engine = self._zero, self.engine
        return {
            "partitioning": self._partitioning(),
            "partitions": [partition.detach() for partition in zero.fp32_partitioned_groups_flat],
            "optimizer": optimizer,
            "frozen": _frozen(engine),
            "buffers": _buffers(engine),
            "loss_scaler": {k: v for k, v in vars(zero.loss_scaler).items() if isinstance(v, _SCALARS)},
            "scaling": {k: getattr(zero, k) for k in ("overflow", "custom_loss_scaler", "external_loss_scale")},
            "lr_scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
        }

    def _with_partitions(self, read: Any) -> Any:
        # ZeRO-3 keeps the groups of its inner optimizer empty, except while it steps a sub-group.
        self._zero._set_fp32_optimizer_param_groups()
        try:
            return read()
        finally:
            self._zero._clear_fp32_optimizer_param_groups()

    def _clear_padding(self) -> None:
        # DeepSpeed pads parameters to the world size with memory that it never sets, so equal runs would differ there.
        for group, partition in zip(self._zero.fp16_groups, self._zero.fp32_partitioned_groups_flat, strict=True):
            end = 0
            for param in group:
                length = param.partition_numel()
                rank = self._zero._get_param_partition_rank(param)
                end += length
                num_padding = min(max((rank + 1) * length - param.ds_numel, 0), length)
                if num_padding:
                    partition.data[end - num_padding : end].zero_()
                    param.ds_tensor.data[length - num_padding :].zero_()

    def _partitioning(self) -> dict[str, Any]:
        zero = self._zero
        return {
            "rank": torch.distributed.get_rank(zero.dp_process_group),
            "world_size": torch.distributed.get_world_size(zero.dp_process_group),
            "partition_numel": [int(numel) for numel in zero.fp16_partitioned_groups_flat_numel],
            "dtype": zero.dtype,
        }

    def _refuse_foreign(self, state_dict: dict[str, Any]) -> None:
        kept, mine = state_dict["partitioning"], self._partitioning()
        if kept != mine:
            raise StateError(
                f"the kept ZeRO-3 shard is of rank {kept['rank']} of {kept['world_size']} with partitions of "
                f"{kept['partition_numel']} elements in {kept['dtype']}, this engine is rank {mine['rank']} of "
                f"{mine['world_size']} with {mine['partition_numel']} in {mine['dtype']}; "
                "keep model, config and world size",
                path="partitioning",
            )

    def _refuse_mid_accumulation(self) -> None:
        engine = self.engine
        if engine.managed_gradient_accumulation():
            done = engine.micro_steps % engine.gradient_accumulation_steps() == 0
            if engine._is_gradient_accumulation_boundary is not None:
                done = bool(engine._is_gradient_accumulation_boundary)
        else:
            done = engine._unmanaged_backward_count == 0
        if not done or engine._running_engine_step:
            raise StateError(
                f"the DeepSpeed engine is at micro step {engine.micro_steps}, inside the accumulation of gradients; "
                "call step() of the Checkpointer only after an engine.step() that updated the weights",
                path="deepspeed",
            )


def checkpointer(
    engine: DeepSpeedEngine, stateful: Mapping[str, Stateful] | None = None, **options: Any
) -> Checkpointer:
    """Return a Checkpointer of a DeepSpeed engine and of other parts of the state; `options` as for Checkpointer."""
    return Checkpointer({"engine": DeepSpeedState(engine), **(stateful or {})}, **options)


def _frozen(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    owned = {id(param) for group in engine.optimizer.fp16_groups for param in group}
    return {
        name: param.ds_tensor.detach()
        for name, param in engine.module.named_parameters()
        if id(param) not in owned and param.ds_numel
    }


def _buffers(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    names = set(engine._get_buffer_names())
    return {name: buffer for name, buffer in engine.module.named_buffers() if name in names}


def _copy_named(live: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
    for name, tensor in live.items():
        tensor.data.copy_(kept[name])


def _set_attributes(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _refuse_unsupported(engine: DeepSpeedEngine) -> None:
    why = next(_unsupported(engine), None)
    if why is not None:
        raise ConfigurationError(f"this DeepSpeed engine cannot be checkpointed in memory: {why}")


def _unsupported(engine: DeepSpeedEngine) -> Iterator[str]:
    zero = engine.optimizer
    if type(zero) is not DeepSpeedZeroOptimizer_Stage3:
        yield f"its optimizer is {type(zero).__name__}; set zero_optimization.stage to 3"
        return
    if zero.offload_optimizer or zero.offload_param or zero.swap_optimizer or zero.params_in_nvme_and_cpu:
        yield "zero_optimization offloads parameters or optimizer state; remove offload_param and offload_optimizer"
    if type(zero.optimizer).__name__ not in _SUPPORTED_OPTIMIZERS:
        yield f"optimizer {type(zero.optimizer).__name__} is not one of {', '.join(_SUPPORTED_OPTIMIZERS)}"
    if zero.use_muon or zero.zenflow or engine.has_moe_layers:
        yield "Muon, ZenFlow and mixture-of-experts layers are not supported"
    if zero.zero_hpz_partition_size > 1 or zero.zero_quantized_nontrainable_weights:
        yield "ZeRO++ secondary partitions and quantized weights are not supported"
    if engine.random_ltd_enabled() or engine.curriculum_learning_enabled():
        yield "random-LTD and curriculum learning are not supported"
    if zero.torch_autocast_gradscaler is not None:
        yield "torch_autocast with float16 is not supported; use the fp16 section"
