"""Split rows among clients: by the values of a column, or by a Dirichlet distribution over them (Hsu et al. 2019).

python split.py rows.jsonl FOLDER --clients 3 --key label              each value goes to one client
python split.py rows.jsonl FOLDER --clients 3 --key label --alpha 0.5  each value to all, in shares that are drawn

FOLDER/0.jsonl, FOLDER/1.jsonl, ... are written. The smaller alpha, the more unlike are the clients.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np


def split(labels: list[str], clients: int, alpha: float | None, seed: int) -> list[int]:
    """Give the client of each row."""
    random = np.random.default_rng(seed)
    rows: dict[str, list[int]] = defaultdict(list)
    for row, label in enumerate(labels):
        rows[label].append(row)
    found = [0] * len(labels)
    loads = [0] * clients
    # The most frequent first, and to whom has least.
    for label in sorted(rows, key=lambda one: (-len(rows[one]), one)):
        own = random.permutation(rows[label])
        shares = np.eye(clients)[int(np.argmin(loads))] if alpha is None else random.dirichlet([alpha] * clients)
        ends = np.round(np.cumsum(shares) * len(own)).astype(int)[:-1]
        for client, part in enumerate(np.split(own, ends)):
            loads[client] += len(part)
            for row in part:
                found[row] = client
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = args.rows.read_text(encoding="utf-8").splitlines()
    owners = split([str(json.loads(line)[args.key]) for line in lines], args.clients, args.alpha, args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    for client in range(args.clients):
        own = [line for line, owner in zip(lines, owners, strict=True) if owner == client]
        (args.folder / f"{client}.jsonl").write_text("".join(f"{line}\n" for line in own), encoding="utf-8")
        print(f"client {client}: {len(own)} rows")


if __name__ == "__main__":
    main()
