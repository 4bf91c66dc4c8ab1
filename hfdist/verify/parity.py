"""The proof that a layout trains as one process does: small runs of both, which are compared at the end."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import torch

from hfdist.collectives import on_rank_zero, rank
from hfdist.config.composition.config_text import to_yaml
from hfdist.config.model import Dtype
from hfdist.config.optimizer import OptimizerName
from hfdist.config.run import RunConfig
from hfdist.config.train import Precision
from hfdist.errors import HfdistError, NumericsError
from hfdist.processes.child_python import python
from hfdist.topology import without_launcher
from hfdist.verify.certificate import BOUNDS
from hfdist.verify.compare_runs import certify
from hfdist.verify.proof_configs import Proof

logger = logging.getLogger(__name__)

_SINGLE_SECONDS = 1500
"""Most seconds for the run on one process: less than the half hour that a process group waits for a rank."""


def conclude(proof: Proof, recipe: Path) -> None:
    """Train on one process, compare, and report on rank 0. Call on all ranks, after both runs in the layout.

    The folder of a proof that passed is removed.

    Raises:
        NumericsError: on rank 0, a difference beyond its bound.
        HfdistError: the run on one process failed.
    """
    failed = on_rank_zero(lambda: _certify(proof, recipe))
    if failed and rank() == 0:
        raise NumericsError(
            "the layout does not train as one process does",
            where=", ".join(failed),
            found="differences beyond their bounds: see the certificate",
            hint=f"compare the runs in {proof.folder}",
        )


def _certify(proof: Proof, recipe: Path) -> list[str]:
    """Give the names of the comparisons that failed."""
    _train_single(proof.single, recipe)
    config = proof.layout
    # Muon makes matrices orthogonal in bfloat16, whatever their type.
    rounds = config.model.dtype is Dtype.bfloat16 or config.optimizer.name is OptimizerName.muon
    certificate = certify(
        proof.description,
        ours=config.run.folder.path,
        resumed=proof.resumed.run.folder.path,
        reference=proof.single.run.folder.path,
        bounds=BOUNDS[Precision.bf16 if rounds else config.train.precision],
        half=_half(config),
    )._replace(kernels=proof.kernels)
    logger.info("%s", certificate)
    if certificate.passed:
        shutil.rmtree(proof.folder)
    return [row.what for row in certificate.rows if not row.passed]


def _half(config: RunConfig) -> torch.dtype | None:
    """Type of the arithmetic, where float32 weights are kept beside it."""
    if config.train.precision is Precision.fp32 or config.model.dtype not in (Dtype.auto, Dtype.float32):
        return None
    return torch.bfloat16 if config.train.precision.is_bf16 else torch.float16


def _train_single(config: RunConfig, recipe: Path) -> None:
    """Train in a fresh process that knows of no launcher."""
    folder, path = config.run.folder.path, config.run.folder.config
    folder.mkdir()
    path.write_text(to_yaml(config), encoding="utf-8")
    command = python(str(recipe), "--config-dir", str(folder), "--config-name", path.stem)
    if config.model.trust_remote_code:
        command.append("model.trust_remote_code=true")
    environment = without_launcher(os.environ)
    # One device: with several, transformers would make replicas of the model.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=_SINGLE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HfdistError(f"the run on one process did not end in {_SINGLE_SECONDS} s", where=str(folder)) from error
    if done.returncode != 0:
        logger.error("the run on one process says:\n%s", done.stdout[-4000:])
        raise HfdistError(
            "the run on one process failed",
            where=str(folder),
            found=f"exit code {done.returncode}",
            hint=shlex.join(command),
        )
