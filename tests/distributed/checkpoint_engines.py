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
from hfdist.strategies import pieces, pieces_zero
from hfdist.strategies.fsdp import FsdpStrategy
from hfdist.strategies.tensor import TensorStrategy
from hfdist.topology import Degrees, Topology

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


def batch_share(step, num_tensor=1):
    """This rank's share of the global batch of a step; neighbours that cut the model between them have one share."""
    generator = torch.Generator().manual_seed(1000 + step)
    batch = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return batch.chunk(size // num_tensor)[rank // num_tensor]


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
    """FSDP2: sizes that the ranks do not divide, down to ranks with no row of a tensor."""

    strategy, num_tensor = FsdpStrategy, 1

    def __init__(self, sharding=Sharding.fsdp2, *, seed=0, **options):
        degrees = Degrees(tensor=self.num_tensor)
        topology = Topology.of(degrees, world_size=dist.get_world_size(), rank=dist.get_rank())
        batch = plan_batch(
            global_batch_size=SEQUENCES,
            micro_batch_size=SEQUENCES // topology.data_size,
            data_size=topology.data_size,
            sequence_length=TOKENS,
            lanes=SEQUENCES,
        )
        config = StrategyConfig(sharding=sharding, tensor=self.num_tensor)
        self.engine = self.strategy(topology, batch, config).build(tiny_model(seed))
        self.model = self.engine.model
        self.optimizer = make_optimizer(self.model, **options)
        self.engine.setup(self.model, SimpleNamespace(optimizer=self.optimizer), None)

    def step(self, step):
        loss = mean_loss(self.model, batch_share(step, self.num_tensor))
        loss.backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return global_mean(loss)

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def pieces(self):
        return self.engine.pieces()

    def after_load(self):
        self.engine.after_load()

    def states(self):
        return list(self.optimizer.state.values())

    def close(self):
        pass


class Cut(Sharded):
    """Two tensor ranks: columns, and under FSDP2 rows of columns."""

    strategy, num_tensor = TensorStrategy, 2

    def clip(self):
        self.engine.clip_grad_norm(1.0, lambda: None)


LAYOUTS = {
    "single": (1, Replicated),
    "ddp2": (2, Replicated),
    "zero1x2": (2, partial(Zero, 1)),
    "zero2x2": (2, partial(Zero, 2)),
    "zero3x2": (2, partial(Zero, 3)),
    "tensor2": (2, partial(Cut, Sharding.none)),
    "zero3x3": (3, partial(Zero, 3)),
    "fsdp2x3": (3, Sharded),
    "zero2x4": (4, partial(Zero, 2)),
    "fsdp2x4": (4, Sharded),
    "fsdp2x2 tensor2": (4, Cut),
    "ddp2 tensor2": (4, partial(Cut, Sharding.none)),
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
