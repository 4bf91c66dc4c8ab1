"""Measure the collectives of this machine, or of several: latency and bandwidth by size, as plans need them.

python recipes/bandwidth.py processes=2
torchrun --standalone --nproc-per-node 2 recipes/bandwidth.py
"""

from hfdist.tools.doctor.bandwidth.command import main

if __name__ == "__main__":
    main()
