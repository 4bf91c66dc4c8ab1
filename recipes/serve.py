"""Serve islands: launches of their own that train one model together (islands=diloco, islands=local_sgd).

python recipes/serve.py port=29600
"""

from hfdist.islands.command import main

if __name__ == "__main__":
    main()
