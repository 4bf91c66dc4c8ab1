"""Say what a run will need before it starts: memory, time, traffic and cost, on any hardware. Takes one process.

python recipes/plan.py strategy=fsdp2 model=llama3_8b plan.hardware=h100_80gb plan.processes=64
python recipes/plan.py model=llama3_8b plan.hardware=h100_80gb plan.processes=64 plan.search=true
"""

from hfdist.planning.command import main

if __name__ == "__main__":
    main()
