"""Say what a model takes, without its weights: tasks, layouts, adapters, attention and packing. Takes one process.

python recipes/check.py tiny
"""

from hfdist.verify.check.command import main

if __name__ == "__main__":
    main()
