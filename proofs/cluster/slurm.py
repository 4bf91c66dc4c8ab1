"""A real SLURM of Debian's packages on two machines of `machines.py`, with all its files in one folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.machines import Machine, two_machines

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")

# A requeued job waits for the credentials of its last start to expire: 120 s by default. A job that is over is known
# for an hour, since what it is compared with may take minutes.
_CONFIG = """ClusterName=hfdist
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed
SelectType=select/linear
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=30
KillWait=20
MinJobAge=3600
SchedulerParameters=bf_interval=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MailProg=/bin/true
NodeName={first.name} NodeAddr={first.address} CPUs=2 State=UNKNOWN
NodeName={second.name} NodeAddr={second.address} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """What a user does with it, on the first machine."""

    def __init__(self, machines: tuple[Machine, Machine], folder: Path) -> None:
        self.machines, self.folder = machines, folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: object) -> str:
        """Run a command of SLURM and give its output; AssertionError: it fails."""
        return self.machines[0].run(*command, **self.environment)

    def submit(self, *words: object) -> int:
        """Give the number of the job."""
        return int(self.run("sbatch", "--parsable", *words).split(";")[0])

    def show(self, job: int | str) -> dict[str, str]:
        """Give the fields of `scontrol show job`, of a job or of a task of an array (JOB_TASK)."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: int | str) -> str:
        """As SLURM names it: PENDING, RUNNING, COMPLETED ..."""
        return self.show(job)["JobState"]

    def cancel(self, *words: object) -> None:
        """As `scancel`."""
        self.run("scancel", *words)

    def give_power(self, machine: Machine) -> None:
        """Connect it, and start SLURM's daemon on it."""
        machine.set_link(up=True)
        machine.start(["slurmd", "-D"], self.folder / f"slurmd-{machine.name}.log", **self.environment)

    def cut_power(self, machine: Machine) -> None:
        """End all that runs on it; it closes no connection."""
        machine.set_link(up=False)
        machine.kill_all()

    def wait_until(self, condition: Callable[[], object], what: str, most_seconds: float = 240) -> None:
        """Wait; AssertionError: it does not come true."""
        deadline = time.monotonic() + most_seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in {most_seconds:g} s: {what}\n{self.run('squeue')}"
            time.sleep(0.5)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Two machines and a SLURM on them. It leaves nothing running; the files stay.

    Raises:
        NoMachinesError: no network namespaces here.
        AssertionError: SLURM's programs are missing, or its machines do not come up.
    """
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    assert not missing, f"not installed: {', '.join(missing)}; apt-get install -y slurm-wlm munge"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    with two_machines() as machines:
        cluster = Slurm(machines, folder)
        first, second = machines
        (folder / "slurm.conf").write_text(_CONFIG.format(first=first, second=second, folder=folder))
        for name in ("state", *(f"spool-{machine.name}" for machine in machines)):
            (folder / name).mkdir(exist_ok=True)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{name}={folder}/munge.{end}" for name, end in
                 (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"),
                  ("seed-file", "seed"))]  # fmt: skip
        # In the network of the first machine: it is killed with what runs there.
        first.start(["munged", "--foreground", "--force", *files], folder / "munged.out")
        first.start(["slurmctld", "-D"], folder / "slurmctld.log", **cluster.environment)
        for machine in machines:
            cluster.give_power(machine)
        cluster.wait_until(lambda: _idle(cluster) == 2, "both machines idle", 60)
        yield cluster


def version() -> str:
    """Such as `slurm-wlm 22.05.8`."""
    return subprocess.run(["slurmctld", "-V"], check=True, capture_output=True, text=True).stdout.strip()


def _idle(cluster: Slurm) -> int:
    try:
        return cluster.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split().count("idle")
    except AssertionError:
        # It does not answer yet.
        return 0
