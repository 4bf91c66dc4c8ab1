"""Tiny models in every layout, stepped by hand: what the checkpoint tests train, save, load and train on."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist.config.batch import plan_batch
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.strategies import pieces
from hfdist.strategies.base import TrainerHooks
from hfdist.strategies.deepspeed import pieces_zero
from hfdist.strategies.select import select_strategy
from hfdist.topology import Topology

SEQUENCES, TOKENS, VOCABULARY = 12, 9, 61


def tiny_model(seed):
    """A Llama with tied embeddings, sizes that three or four ranks do not divide, and two frozen parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=20,
        intermediate_size=34,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    return model


def make_optimizer(model, **options):
    """AdamW with the Trainer's two groups: matrices decay, vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if len(getattr(p, "ds_shape", p.shape)) < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def batch_share(step, num_shares=None, share=None):
    """This rank's share of the global batch of a step; by default each rank has another one."""
    generator = torch.Generator().manual_seed(1000 + step)
    batch = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
    if num_shares is None:
        num_shares, share = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return batch.chunk(num_shares)[share]


class Replicated:
    """The model whole: single, or DDP where there is a group."""

    def __init__(self, *, seed=0, **options):
        self.model = tiny_model(seed)
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.optimizer = make_optimizer(self.model, **options)

    def step(self, step):
        loss = mean_loss(self.wrapped, batch_share(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return global_mean(loss)

    def pieces(self):
        return pieces.list_pieces(self.model, self.optimizer)

    def after_load(self):
        pass

    def states(self):
        return list(self.optimizer.state.values())

    def close(self):
        pass


class Zero:
    """DeepSpeed ZeRO."""

    def __init__(self, stage, *, seed=0, precision="fp32", section=None, **options):
        import deepspeed
        from deepspeed.ops import __compatible_ops__

        # As in ZeroStrategy.start: no compiling, nothing left in /dev/shm.
        __compatible_ops__["deepspeed_shm_comm"] = False
        self.model = tiny_model(seed)
        config = {
            "train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(),
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "overlap_comm": False, **(section or {})},
            "bf16": {"enabled": precision == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = make_optimizer(self.model, **options)
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def step(self, step):
        loss = mean_loss(self.engine, batch_share(step))
        self.engine.backward(loss)
        self.engine.step()
        return global_mean(loss)

    def pieces(self):
        return pieces_zero.list_pieces(self.model, self.engine)

    def after_load(self):
        pieces_zero.after_load(self.model, self.engine)

    def states(self):
        return list(self.engine.optimizer.optimizer.state.values())

    def close(self):
        self.engine.destroy()


class Sharded:
    """FSDP2, in a pipeline and over tensor ranks too: sizes that ranks do not divide, ranks with no row of a tensor."""

    def __init__(self, sharding=Sharding.fsdp2, *, pipeline=1, tensor=1, seed=0, **options):
        config = StrategyConfig(sharding=sharding, pipeline=pipeline, tensor=tensor)
        self.topology = Topology.of(config.degrees, world_size=dist.get_world_size(), rank=dist.get_rank())
        batch = plan_batch(
            global_batch_size=SEQUENCES,
            micro_batch_size=SEQUENCES // (self.topology.data_size * pipeline),
            data_size=self.topology.data_size,
            sequence_length=TOKENS,
            lanes=SEQUENCES,
        )
        strategy = select_strategy(config, TrainConfig(), topology=self.topology, batch=batch)
        self.engine = strategy.build(tiny_model(seed))
        self.model = self.engine.model
        self.optimizer = make_optimizer(self.model, **options)
        self.engine.setup(self.model, SimpleNamespace(optimizer=self.optimizer), None)

    def step(self, step):
        batch = {"input_ids": batch_share(step, self.topology.data_size, self.topology.data_rank)}
        # A pipeline has as many micro batches as ranks, so their mean losses need no factor.
        hooks = TrainerHooks(model=self.model, training_step=train_on, loss=loss_on)
        loss = self.engine.forward_backward(batch, None, hooks)
        self.engine.clip_grad_norm(1.0, partial(torch.nn.utils.clip_grad_norm_, self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return global_mean(loss)

    def pieces(self):
        return self.engine.pieces()

    def after_load(self):
        self.engine.after_load()

    def states(self):
        return list(self.optimizer.state.values())

    def close(self):
        pass


def loss_on(model, batch, num_items):
    return mean_loss(model, batch["input_ids"])


def train_on(model, batch, num_items):
    loss = loss_on(model, batch, num_items)
    loss.backward()
    return loss.detach()


LAYOUTS = {
    "single": (1, Replicated),
    "ddp2": (2, Replicated),
    "zero1x2": (2, partial(Zero, 1)),
    "zero2x2": (2, partial(Zero, 2)),
    "zero3x2": (2, partial(Zero, 3)),
    "tensor2": (2, partial(Sharded, Sharding.none, tensor=2)),
    "zero3x3": (3, partial(Zero, 3)),
    "fsdp2x3": (3, Sharded),
    "zero2x4": (4, partial(Zero, 2)),
    "fsdp2x4": (4, Sharded),
    "pp2 fsdp2x2": (4, partial(Sharded, pipeline=2)),
    "fsdp2x2 tensor2": (4, partial(Sharded, tensor=2)),
    "pp2 tensor2": (4, partial(Sharded, Sharding.none, pipeline=2, tensor=2)),
    "ddp2 tensor2": (4, partial(Sharded, Sharding.none, tensor=2)),
}


def mean_loss(model, batch):
    logits = model(input_ids=batch).logits.float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


def global_mean(loss):
    """Mean over the ranks' equal shares, in float64."""
    total = loss.detach().double()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def write_config(model):
    """The callback that makes a checkpoint a Hub folder."""
    return lambda folder: model.config.save_pretrained(folder)
