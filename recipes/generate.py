"""Answer the prompts of a run on another machine (task=grpo, task=rloo, task=ppo).

python recipes/generate.py join=HOST:29700
"""

from hfdist.tune.generators.command import main

if __name__ == "__main__":
    main()
