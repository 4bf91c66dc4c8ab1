"""Examine a machine, or several, before a job: versions, limits, folders, the Hub, and each link between two ranks.

python recipes/doctor.py processes=2
torchrun --standalone --nproc-per-node 2 recipes/doctor.py
"""

from hfdist.tools.doctor.command import main

if __name__ == "__main__":
    main()
