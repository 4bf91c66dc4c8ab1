"""A trained reward model as a reward: the score that transformers gives, in each layout, with either tokenizer."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast, TrainingArguments

from hfdist.errors import ConfigError, DataError
from hfdist.models.partitioning import Partitioning
from hfdist.records import RunFolder, read_lines
from hfdist.rewards import Generation
from hfdist.run import prepare_run
from hfdist.tune.learned_reward import LearnedReward, check_positions, check_reward_model
from tests.distributed import trl_runs
from tests.distributed.preference_runs import LENGTH, make_config, tune, write_rows
from tests.marks import many

pytestmark = pytest.mark.distributed

TASK = ("task=grpo", "task.num_generations=3", "task.max_new_tokens=4", "task.rewards={reward_model: 2.0}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_dir):
    """A model, rows, and a reward model trained on pairs, in `run/model`."""
    folder = tmp_path_factory.mktemp("reward")
    trl_runs.write_models(folder)
    write_rows(folder / "pairs.jsonl", "pairs", (1, 9))
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    lines = [json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) for row in rows]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    tune(folder / "run", folder / "lm", folder / "pairs.jsonl", 1, "task=reward")
    return folder


def other_tokenizer():
    """With the same words, and numbers of its own."""
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*trl_runs.MARKS, *trl_runs.WORDS[::-1]])}, unk_token="<unknown>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")


@pytest.mark.parametrize("is_same", [True, False])
def test_a_score_is_that_of_transformers(folder, tmp_path, is_same):
    """Of answers of several lengths, of which one was cut off."""
    own = AutoTokenizer.from_pretrained(folder / "run/model")
    answering = own if is_same else other_tokenizer()
    texts = [("the red cat ", "sees", "<end>"), ("a ", "dog likes a big bird then", ""), ("now ", "and", "<end>")]
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, per_device_eval_batch_size=2)
    score = LearnedReward(str(folder / "run/model"), answering, layout=Partitioning(), arguments=arguments)
    generations = [
        Generation(
            prompt=prompt.strip(),
            text=text,
            reference="",
            token_ids=tuple(answering(f"{prompt}{text} {end}")["input_ids"]),
        )
        for prompt, text, end in texts
    ]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "run/model").eval()
    ids = [torch.tensor([own(f"{prompt}{text} {end}")["input_ids"]]) for prompt, text, end in texts]
    with torch.no_grad():
        expected = [float(model(one).logits) for one in ids]
    assert score(generations) == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("layout", ["zero3", many("pipeline")])
def test_a_run_learns_from_it_in_any_layout(folder, tmp_path, layout):
    """Under ZeRO-3 too it is whole; in a pipeline the first rank scores."""
    lines = {}
    for strategy, num_ranks in (("single", 1), (layout, 2)):
        own = [f"task.reward_model={folder}/run/model", "evaluate.num_generations=4", f"strategy={strategy}"]
        run = tune(tmp_path / strategy, folder / "lm", folder / "prompts.jsonl", num_ranks, *TASK, *own)
        lines[strategy] = [line for line in read_lines(RunFolder(run).metrics) if "loss" in line]
    for line in lines["single"]:
        assert line["reward"] == pytest.approx(2 * line["rewards/reward_model"])
        assert line["reward_std"] > 0
    for name in ("reward", "grad_norm"):
        expected = [line[name] for line in lines["single"]]
        assert [line[name] for line in lines[layout]] == pytest.approx(expected, rel=1e-4), name


def test_a_folder_that_is_no_reward_model_is_refused(folder, tmp_path):
    check_reward_model(str(folder / "run/model"))
    found = {}
    for name in ("lm", "config", "weights", "labels", "damaged", "untold", "tokens"):
        own = shutil.copytree(folder / ("lm" if name == "lm" else "run/model"), tmp_path / name)
        if name == "config":
            (own / "config.json").unlink()
        if name == "weights":
            (own / "model.safetensors").rename(own / "pytorch_model.bin")
        if name == "damaged":
            (own / "model.safetensors").write_bytes(b"no tensors")
        if name == "untold":
            for file in own.glob("*token*"):
                file.unlink()
        if name == "tokens":
            larger = AutoTokenizer.from_pretrained(own)
            larger.add_tokens(["more", "words"])
            larger.save_pretrained(own)
        if name == "labels":
            about = json.loads((own / "config.json").read_text()) | {"id2label": {"0": "a", "1": "b"}}
            about["label2id"] = {"a": 0, "b": 1}
            (own / "config.json").write_text(json.dumps(about))
            tensors = load_file(own / "model.safetensors")
            tensors["score.weight"] = tensors["score.weight"].repeat(2, 1)
            save_file(tensors, own / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError) as refused:
            check_reward_model(str(own))
        assert refused.value.where == "task.reward_model"
        found[name] = str(refused.value.found)
    assert "score.weight" in found["lm"]
    assert "config.json" in found["config"]
    assert "model.safetensors" in found["weights"]
    assert "2 labels" in found["labels"]
    assert "tokens and a model of" in found["tokens"]


def test_a_reward_model_that_cannot_read_the_longest_answer_is_refused(folder, tmp_path):
    short = shutil.copytree(folder / "run/model", tmp_path / "short")
    about = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": LENGTH + 3}
    (short / "config.json").write_text(json.dumps(about))
    own = (tmp_path / "run", folder / "lm", folder / "prompts.jsonl", *TASK, f"task.reward_model={short}")
    run = prepare_run(make_config(*own))
    run.find_model()
    with pytest.raises(ConfigError, match="longer than the reward model has positions") as refused:
        run.open_data()
    assert refused.value.where == "task.reward_model"
    # What it proposes is taken.
    run = prepare_run(make_config(*own, refused.value.hint))
    run.find_model()
    run.open_data()
    # How many tokens another vocabulary has for a text is known once there is one.
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    score = LearnedReward(str(short), other_tokenizer(), layout=Partitioning(), arguments=arguments)
    check_positions(str(short), other_tokenizer(), longest=LENGTH + 4, max_new_tokens=4)
    with pytest.raises(DataError, match="longer than the reward model has positions"):
        score([Generation(prompt="the cat " * LENGTH, text="sees", reference="")])
