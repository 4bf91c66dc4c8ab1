"""Train many runs that differ in some keys, and find the best: a grid, at random, by TPE, or by successive halving.

python recipes/sweep.py run.name=lr model=tiny 'optimizer.lr=tag(log, interval(1e-4, 1e-1))'
"""

from hfdist.tools.sweep.command import main

if __name__ == "__main__":
    main()
