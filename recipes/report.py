"""Write one HTML page about a run, or about several laid over each other; --live serves it while they train.

python recipes/report.py runs/demo
python recipes/report.py runs/demo runs/other out=compared.html
python recipes/report.py runs/demo --live
"""

from hfdist.tools.report.command import main

if __name__ == "__main__":
    main()
