"""Run folders for tests of the report, as runs write them."""

import json
import math

EVERY_STRETCH = 5000
SPIKES = {31_234: 9.5, 77_777: 12.0}

SENT = {
    "sent_bytes": 3 << 20,
    "mean_bytes": 3 << 20,
    "calls": 7,
    "kinds": {"all-reduce": 2 << 20, "broadcast": 1 << 20},
}


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def training_line(step, **more):
    noise = math.sin(12.9898 * step)
    return {
        "step": step,
        "loss": SPIKES.get(step, 2 + 5 * math.exp(-step / 2e4) + 0.05 * noise),
        "grad_norm": 1 + 0.3 * noise,
        "learning_rate": 3e-4,
        "tokens": 4_194_304 * step,
        "tokens_per_second": 1e6 + 2e4 * noise,
        "step_seconds": 4 + 0.1 * noise,
        "mfu": 0.41 + 0.01 * noise,
        "energy_kwh": 0.01 * step,
        "cost": 0.02 * step,
    } | more


def rewarded_line(step, **more):
    """A line of a run that trains by rewards."""
    noise = math.sin(12.9898 * step)
    rewards = {"reward": 0.5 + 0.1 * noise, "reward_std": 0.2, "rewards/right": 0.6, "rewards/short": -0.1}
    figures = {"entropy": 2 + noise, "clipped_ratios": 0.0, "completion_tokens": 40 + noise, "cut_off": 0.25}
    return training_line(step, loss=0.01 * noise) | rewards | figures | more


def record(**more):
    return {
        "start": 1,
        "state": "finished",
        "exit_code": 0,
        "error": None,
        "step": 20,
        "max_steps": 20,
        "tokens": 40_960,
        "seconds": 12.5,
        "started": "2026-11-24T18:50:06.509+00:00",
        "updated": "2026-11-24T18:50:19.010+00:00",
        "host": "node-a",
        "processes": 4,
        "layout": {"shard": 4, "sharding": "none"},
        "hosts": ["node-a", "node-a", "node-b", "node-b"],
        "versions": {"Python": "3.11.7"},
        "traffic": {"step": 4, "axes": {"data": SENT}},
        "schema": 1,
    } | more


def event(name, second, **more):
    return {"time": f"2026-11-24T18:50:{second:02d}.000+00:00", "start": 1, "event": name} | more


def rank_line(step, *, slow=(), num_ranks=4, data=0.01):
    compute = [0.25 if rank in slow else 0.05 for rank in range(num_ranks)]
    return {
        "step": step,
        "step_seconds": [0.3] * num_ranks,
        "compute_seconds": compute,
        "data_seconds": [data] * num_ranks,
        "wait_seconds": [0.28 - own for own in compute],
        "peak_bytes": [400_000_000 + rank for rank in range(num_ranks)],
    }


def write_run(folder, *, lines=None, events=(), ranks=(), samples=(), rollouts=(), task=None, **of_record):
    """Write a run folder of 20 steps, or of these lines."""
    lines = [training_line(step) for step in range(1, 21)] if lines is None else lines
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "events.jsonl", events)
    if task is not None:
        (folder / "config.yaml").write_text(f"task: {{name: {task}}}\n")
    for name, own in (("ranks.jsonl", ranks), ("samples.jsonl", samples), ("rollouts.jsonl", rollouts)):
        if own:
            write_lines(folder / name, own)
    (folder / "run.json").write_text(json.dumps(record(**of_record)))
    return folder
