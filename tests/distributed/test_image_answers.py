"""Prompts with images that the model answers: TRL's own losses and weights on one process, the same in every layout."""

import json
import math
from functools import cache

import pytest
import torch
import trl
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from hfdist.config.composition.compose import compose_config
from hfdist.config.model import ModelConfig
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError
from hfdist.models.image_text import feature_token
from hfdist.models.image_trials import find_positions
from hfdist.models.new_tokens import PromptRows
from hfdist.models.processor import load_processor
from hfdist.records import RunFolder, read_lines
from hfdist.run import prepare_run
from hfdist.testing import run_ranks
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import can_use_cache
from hfdist.trainer.generation.greedy import continue_prompts
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.row_images import RowImages
from hfdist.trainer.generation.sampling import Sampler, Sampling
from hfdist.tune.prompt_seeds import answer_seeds
from recipes.tune import main
from tests.distributed import trl_runs
from tests.distributed.preference_runs import EPSILON, PLAIN, RATE
from tests.distributed.runs import eval_losses, losses, name_of, weights
from tests.image_models import draw, save_model
from tests.marks import many
from tests.packages import install_package

pytestmark = pytest.mark.distributed

ANSWERS, NEW_TOKENS, STEPS, GLOBAL_BATCH = 3, 5, 3, 2
REWARD = """
def letters(generations):
    return [sum(map(ord, one.text)) % 7 / 7 for one in generations]
"""
QUESTION = "what is in this picture? number {}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: save_model(family, folder / family))


@pytest.fixture(scope="module", autouse=True)
def reward(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("packages")
        install_package(folder, patch, "lettered", REWARD, "hfdist.rewards", letters="letters")
        yield


def write_prompts(folder, num_rows=12, counts=(1, 2, 0)):
    """Write prompts with so many images each, in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num_rows):
        names = [f"{number}-{place}.png" for place in range(counts[number % len(counts)])]
        for place, name in enumerate(names):
            draw(3 * number + place).save(folder / name)
        asked = [*({"type": "image"} for _ in names), {"type": "text", "text": QUESTION.format(number)}]
        said = [{"role": "assistant", "content": [{"type": "text", "text": f"a cat {number}"}]}]
        rows.append({"prompt": [{"role": "user", "content": asked}], "completion": said, "images": names})
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("rows"))


def make_config(folder, model, rows, *overrides):
    words = (
        "task=grpo",
        "task.rewards={letters: 1.0}",
        f"task.num_generations={ANSWERS}",
        f"task.max_new_tokens={NEW_TOKENS}",
        "model.init=pretrained",
        f"model.name={model}",
        "data=files",
        f"data.sources.files.path={rows}",
        "data.sequence_length=256",
        "data.lanes=2",
        "data.workers=0",
        "data.eval_fraction=0.2",
        "data.eval_sequences=2",
        "evaluate.num_generations=2",
        "train.epochs=null",
        f"train.max_steps={STEPS}",
        f"train.global_batch_size={GLOBAL_BATCH}",
        "train.micro_batch_size=1",
        f"train.eval_every={STEPS}",
        "evaluate.at_start=false",
        f"optimizer.lr={RATE}",
        "optimizer.schedule=constant",
        "optimizer.beta2=0.999",
        f"optimizer.eps={EPSILON}",
        "optimizer.weight_decay=0",
        "checkpoint=none",
        "report=quiet",
        "report.log_every=1",
    )
    return compose_config([*words, f"run.dir={folder}", *overrides], name="tune")


def tune(folder, model, rows, num_ranks, *overrides):
    config = make_config(folder, model, rows, *overrides)
    run_ranks(main.__wrapped__, num_ranks, config, group=num_ranks > 1, timeout_seconds=240)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory, models, rows, cache_dir):
    folder = tmp_path_factory.mktemp("single")
    return cache(lambda *how: tune(folder / name_of(how), models(how[0]), rows, 1, *how[1:]))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_5_vl", "fsdp2 task.beta=0.1"),
        *(many(family, one) for family in ("llava", "qwen2_5_vl", "gemma3") for one in ("ddp", "zero2", "tensor")),
        many("llava", "fsdp2 task=rloo"),
        many("internvl", "ddp adapter=lora"),
    ],
)
def test_a_layout_changes_nothing(single, models, rows, tmp_path, family, layout):
    strategy, *others = layout.split()
    run = tune(tmp_path / "run", models(family), rows, 2, f"strategy={strategy}", *others)
    reference = single(family, *others)
    assert losses(run) == pytest.approx(losses(reference), rel=1e-4, abs=1e-6)
    assert eval_losses(run) == pytest.approx(eval_losses(reference), rel=1e-5)
    figures = [
        [line["reward"] for line in read_lines(RunFolder(one).metrics) if "reward" in line] for one in (run, reference)
    ]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
    own, wanted = weights(run), weights(reference)
    assert own.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(own[name], value, rtol=1e-4, atol=2e-6, msg=name)


def test_a_damaged_image_of_a_prompt_teaches_nothing(models, tmp_path):
    path = write_prompts(tmp_path / "rows", 6, counts=(1,))
    whole = path.with_name("1-0.png").read_bytes()
    path.with_name("1-0.png").write_bytes(whole[: len(whole) - 40])
    words = (
        "data.on_bad_rows=skip",
        "data.eval_fraction=0",
        "train.eval_every=null",
        f"train.global_batch_size={6 // STEPS}",
    )
    run = tune(tmp_path / "run", models("llava"), path, 1, *words)
    answered = {line["prompt"] for line in read_lines(RunFolder(run).rollouts)}
    assert len(answered) == 5
    assert all(math.isfinite(loss) for loss in losses(run))


def answering(family, model):
    """What `generate` is given for prompts with no, one and two images, and the same as rows of ours."""
    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    processor = load_processor(ModelConfig(name=str(model)), config, tokenizer)
    tokens = ImageTokens(processor, find_positions(config), feature_token(config))
    asked, prompts, images = [], [], []
    for count in range(3):
        pictures = [draw(place) for place in range(count)]
        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": QUESTION.format(count)}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        asked.append(processor(text=[text], images=pictures or None, return_tensors="pt", add_special_tokens=False))
        prompts.append(asked[-1]["input_ids"][0].tolist())
        inputs = tokens.inputs(pictures) if pictures else {}
        images.append({name: torch.from_numpy(values) for name, values in inputs.items()})
    return asked, prompts, RowImages(tokens, images)


@pytest.mark.parametrize(
    ("family", "uses_cache"),
    [
        ("qwen2_5_vl", True),
        *(many(family, True) for family in ("llava", "gemma3", "qwen3_vl", "idefics3", "internvl")),
        *(many(family, False) for family in ("qwen2_5_vl", "idefics3")),
    ],
)
def test_answers_are_those_of_generate(models, family, uses_cache):
    model = AutoModelForImageTextToText.from_pretrained(models(family), dtype="float32").eval()
    asked, prompts, images = answering(family, models(family))
    assert can_use_cache(model, Topology(), images.tokens)
    # Each twice: neighbours share what has been read.
    twice = [place for place in range(len(prompts)) for _ in range(2)]
    limits = GenerationLimits(max_new_tokens=NEW_TOKENS, end_ids=frozenset({10**6}), most_tokens=None)
    with torch.no_grad():
        found = continue_prompts(
            [prompts[place] for place in twice],
            lambda batch, function, **_: [function(model, batch)],
            limits,
            topology=Topology(),
            rows_at_once=3,
            uses_cache=uses_cache,
            images=RowImages(images.tokens, [images.rows[place] for place in twice]),
        )
        wanted = [
            model.generate(
                **given,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                suppress_tokens=images.tokens.ids.tolist(),
            )[0, len(prompt) :].tolist()
            for given, prompt in zip(asked, prompts, strict=True)
        ]
    assert found == [wanted[place] for place in twice]


def test_a_prompt_is_read_once_with_its_images(models):
    model = AutoModelForImageTextToText.from_pretrained(models("llava"), dtype="float32").eval()
    _, prompts, images = answering("llava", models("llava"))
    # Other images of the same size, with as many tokens.
    others = {"pixel_values": images.rows[1]["pixel_values"].flip(-1)}
    rows = RowImages(images.tokens, [*[images.rows[1]] * 3, *[others] * 3])
    num_images, num_tokens = [], []
    model.get_encoder(modality="image").register_forward_hook(lambda _, __, states: num_images.append(len(states[0])))
    model.get_decoder().register_forward_hook(lambda _, __, states: num_tokens.append(states[0].shape[:2].numel()))
    limits = GenerationLimits(max_new_tokens=NEW_TOKENS, end_ids=frozenset({10**6}), most_tokens=None)

    def draw_all(uses_cache):
        sampler = Sampler(limits=limits, sampling=Sampling(), topology=Topology(), uses_cache=uses_cache)
        with torch.no_grad():
            return sampler.draw(
                [prompts[1]] * 6,
                range(6),
                lambda batch, function, **_: [function(model, batch)],
                rows_at_once=6,
                images=rows,
            )

    drawn = draw_all(True)
    assert sum(num_images) == 2
    # Each answer's last token is not read.
    assert sum(num_tokens) == 2 * len(prompts[1]) + 6 * (NEW_TOKENS - 1)
    assert drawn == draw_all(False)
    assert sum(num_images) == 2 + 6 * NEW_TOKENS


@pytest.mark.parametrize("broken", ["shifts", many("seen")])
def test_a_cache_that_is_not_exact_with_images_is_noticed(models, monkeypatch, caplog, broken):
    model = AutoModelForImageTextToText.from_pretrained(models("qwen2_5_vl"), dtype="float32")
    *_, images = answering("qwen2_5_vl", models("qwen2_5_vl"))
    read = PromptRows.read
    without = {"shifts": None, "seen": {}}[broken]
    monkeypatch.setattr(PromptRows, "read", lambda *given: read(*given)._replace(**{broken: without}))
    assert not can_use_cache(model, Topology(), images.tokens)
    assert caplog.text.count("all tokens and images before it, without a cache: logits differ") == 1


class _OurAnswers(trl.GRPOTrainer):
    """Its answers are ours, from its own weights."""

    num_prompts = 0

    def _generate_single_turn(self, prompt_ids, images, *_others):
        first, self.num_prompts = self.num_prompts, self.num_prompts + len(prompt_ids) // ANSWERS
        seeds = [seed for number in range(first, self.num_prompts) for seed in answer_seeds(0, number, ANSWERS)]
        tokens = self.image_tokens
        inputs = [tokens.inputs(own) if own else {} for own in images or [None] * len(prompt_ids)]
        rows = RowImages(tokens, [{name: torch.from_numpy(v) for name, v in own.items()} for own in inputs])
        self.model.eval()
        with torch.no_grad():
            drawn = Sampler(
                limits=GenerationLimits(
                    max_new_tokens=NEW_TOKENS, end_ids=frozenset({self._tokenizer.eos_token_id}), most_tokens=None
                ),
                sampling=Sampling(),
                topology=Topology(),
                uses_cache=False,
            ).draw(
                prompt_ids,
                seeds,
                lambda batch, function, **_: [function(self.model, batch)],
                rows_at_once=len(prompt_ids),
                images=rows,
            )
        self.model.train()
        return [one.tokens for one in drawn], None


def train_plainly(folder, model, rows):
    """Train TRL's class on rows in their order; give its lines, and leave the model in the folder."""
    processor = AutoProcessor.from_pretrained(model)
    args = trl.GRPOConfig(
        str(folder),
        **PLAIN | {"max_steps": STEPS},
        per_device_train_batch_size=GLOBAL_BATCH * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=NEW_TOKENS,
        beta=0.1,
        shuffle_dataset=False,
    )
    trainer = _OurAnswers(
        AutoModelForImageTextToText.from_pretrained(model, dtype="float32"),
        args=args,
        reward_funcs=lambda completions, **_: [sum(map(ord, one[0]["content"])) % 7 / 7 for one in completions],
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
    )
    config = AutoConfig.from_pretrained(model)
    own = load_processor(ModelConfig(name=str(model)), config, processor.tokenizer)
    trainer.image_tokens = ImageTokens(own, feature_id=feature_token(config))
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return [line for line in trainer.state.log_history if "loss" in line]


def test_losses_and_weights_are_those_of_trl(models, tmp_path, cache_dir):
    # TRL's class reads no batch of which some rows have no image.
    model, path = models("llava"), write_prompts(tmp_path / "rows", 6, counts=(1, 2))
    run = tune(tmp_path / "ours", model, path, 1, "task.beta=0.1", "data.eval_fraction=0", "train.eval_every=null")
    given = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [line["prompt"] for line in read_lines(RunFolder(run).rollouts)][::ANSWERS]
    numbers = [int(text.split("number ")[1].split()[0].split("\n")[0]) for text in asked]
    assert len(numbers) == STEPS * GLOBAL_BATCH
    in_order = [
        {
            "prompt": given[number]["prompt"],
            "images": [Image.open(path.parent / name).convert("RGB") for name in given[number]["images"]],
        }
        for number in numbers
    ]
    [plain] = run_ranks(train_plainly, 1, tmp_path / "trl", model, in_order, group=False)
    lines = [line for line in read_lines(RunFolder(run).metrics) if "loss" in line]
    assert losses(run) == pytest.approx([line["loss"] for line in plain], rel=1e-4, abs=1e-6)
    for name in ("reward", "kl", "grad_norm"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in plain], rel=1e-3, abs=1e-6), name
    assert trl_runs.difference(weights(run), weights(tmp_path / "trl")) < 1e-5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.trained_prompts=1", "answered by the ranks themselves"),
        ("data.sequence_length=508", "cannot be cut"),
        many("task.generators=1", "answered by the ranks themselves"),
        many("task.environment=calculator", "answered by the ranks themselves"),
        many("strategy=zero3", "answered by the ranks themselves"),
        many("strategy=pipeline", "answered by the ranks themselves"),
    ],
)
def test_what_is_not_tried_is_refused_before_weights(models, rows, tmp_path, cache_dir, monkeypatch, override, message):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    words = ("strategy=ddp", override) if not override.startswith("strategy") else (override,)
    run = prepare_run(make_config(tmp_path, models("llava"), rows, *words))
    run.find_model()
    with pytest.raises(ConfigError, match=message):
        run.open_data()
