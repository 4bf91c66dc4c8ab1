"""Deal the batches of a user's own dataset over data ranks: those of one model replica must read the same."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader

from hfdist.topology import Topology


def deal(
    accelerator: Accelerator,
    topology: Topology,
    data_loader: Any,
    device_placement: Any = None,
    slice_fn_for_dispatch: Any = None,
) -> Any:
    """`Accelerator.prepare_data_loader`, over data ranks instead of processes."""
    prepared = prepare_data_loader(
        data_loader,
        accelerator.device,
        num_processes=topology.data_size,
        process_index=topology.data_rank,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement if device_placement is None else device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
    )
    accelerator._dataloaders.append(prepared)
    return prepared
