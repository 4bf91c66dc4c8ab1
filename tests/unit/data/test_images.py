"""Rows with images: what they become beside each type's own processor, and what is refused of them."""

import base64
import dataclasses
import io
import json
import multiprocessing
import re
import time
import zlib
from itertools import pairwise, takewhile

import datasets
import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, inject_adapter_in_model
from PIL import Image

from hfdist.config.data import (
    BadRows,
    ChatConfig,
    DataConfig,
    ImagesConfig,
    Packing,
    RowFormat,
    SourceConfig,
    TooLong,
)
from hfdist.data import TokenStream, build_held_out, have_images, open_corpus
from hfdist.data.documents.examples import take_examples
from hfdist.data.marks import are_images, are_targets, ids_of
from hfdist.data.packing.sequence import IGNORED, stack_rows
from hfdist.data.sources.base import BadRow
from hfdist.data.sources.images import PLACE, ImageRules, WithImages, decode
from hfdist.data.sources.rows import RowReader
from hfdist.data.stream.ledger import Ledger, bad_rows_file
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError, DataError
from hfdist.models.image_text import (
    LANGUAGE,
    PROJECTOR,
    TOWER,
    find_unreached,
    from_the_end,
    names_of_parts,
    read_images,
)
from hfdist.models.image_trials import find_positions
from hfdist.models.partitioning import WHOLE
from hfdist.models.trainable import TrainableParameters
from hfdist.pipeline.microbatches import split_batch
from hfdist.tune.document_table import places
from tests.image_models import FAMILIES, draw, make_model, make_processor
from tests.marks import many

ASKED, SAID = "what is in this picture?", "a red square"


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request):
    return make_processor(request.param)


@pytest.fixture(scope="module")
def llava():
    return make_processor("llava")


def turns(*parts):
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": SAID}]


def png(number=1, **how):
    written = io.BytesIO()
    draw(number).save(written, how.pop("format", "PNG"), **how)
    return written.getvalue()


def write(folder, rows):
    """Rows of JSON, with two images beside them."""
    for number in (1, 2):
        draw(number).save(folder / f"{number}.png")
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "rows.jsonl"


def config_of(path, cache_dir, **settings):
    defaults = {"sequence_length": 256, "lanes": 1, "workers": 0, "eval_fraction": 0.0, "packing": Packing.none}
    defaults |= {"format": RowFormat.auto, "too_long": TooLong.truncate_end, "cache_dir": str(cache_dir)}
    return DataConfig(sources={"x": SourceConfig(path=str(path), epochs=1)}, **defaults | settings)


def stream_of(config, processor, given=None, positions=None):
    images = ImageTokens(processor, positions)
    return TokenStream(open_corpus(config, given), processor.tokenizer, config).read_images(images)


# ---- beside the processor ----


@pytest.mark.parametrize("parts", [(None, ASKED), (ASKED, None, "and here", None), (ASKED,)], ids=len)
def test_tokens_are_those_of_the_processor_and_answers_are_learned(processor, parts):
    images = [draw(number) for number in range(parts.count(None))]
    said = "".join(PLACE if part is None else part for part in parts)
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": SAID}]
    example = {"messages": messages} | ({"images": [{"size": image.size} for image in images]} if images else {})
    [tokens] = Encoders(processor.tokenizer, ChatConfig(), images=ImageTokens(processor)).encode_examples(
        [json.dumps(example)]
    )
    parted = [{**turn, "content": _in_parts(turn["content"])} for turn in turns(*parts)]
    text = processor.apply_chat_template(parted, tokenize=False)
    wanted = processor(text=[text], images=images or None, add_special_tokens=False)
    assert ids_of(tokens).tolist() == wanted["input_ids"][0]
    assert processor.tokenizer.decode(ids_of(tokens)[are_targets(tokens)]) == f"{SAID}<|im_end|>"
    assert are_images(tokens).any() == bool(images)
    for kinds in {"mm_token_type_ids", "token_type_ids"} & wanted.keys() if images else ():
        assert are_images(tokens).astype(int).tolist() == list(wanted[kinds][0])


def _in_parts(content):
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def test_what_a_message_only_quotes_is_no_image(llava):
    message = {"role": "user", "content": f"{PLACE}the word <image> is written"}
    example = {"messages": [message, {"role": "assistant", "content": SAID}], "images": [{"size": [40, 40]}]}
    encoders = Encoders(llava.tokenizer, ChatConfig(), images=ImageTokens(llava))
    [tokens] = encoders.encode_examples([json.dumps(example)])
    assert are_images(tokens).sum() == (ids_of(tokens) == llava.image_token_id).sum() == 16
    assert "the word <image> is" in llava.tokenizer.decode(ids_of(tokens), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("family", "packing"),
    [
        *((family, Packing.none) for family in FAMILIES),
        # Text positions; positions of time, height and width. Packed rows of gemma3 see each other.
        ("llava", Packing.best_fit),
        ("qwen2_5_vl", Packing.best_fit),
        many("idefics3", Packing.best_fit),
        many("internvl", Packing.best_fit),
    ],
)
def test_the_loss_is_that_of_the_model_with_the_batch_of_its_processor(family, packing, tmp_path, cache_dir):
    processor = make_processor(family)
    model = make_model(family, processor)
    rows = [
        {"messages": turns(None, ASKED), "images": ["1.png"]},
        {"messages": turns(ASKED)},
        {"messages": turns(None, "and", None), "images": ["2.png", "1.png"]},
    ]
    config = config_of(write(tmp_path, rows), cache_dir, packing=packing, sequence_length=512)
    stream = stream_of(config, processor, positions=find_positions(model.config))
    sequences = list(takewhile(lambda one: one[1] is not None, stream.packed(0, 1)))
    assert len(sequences) == (3 if packing is Packing.none else 1)
    batch = stream.next_batch(sequences)
    found = model(**batch, use_cache=False).loss
    found.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    losses = []
    for row in rows:
        parted = [{**turn, "content": _in_parts(turn["content"])} for turn in row["messages"]]
        text = processor.apply_chat_template(parted, tokenize=False)
        pictures = [Image.open(tmp_path / name).convert("RGB") for name in row.get("images", ())] or None
        alone = processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")
        labels = torch.full_like(alone["input_ids"], IGNORED)
        answer = processor.tokenizer.encode(f"{SAID}<|im_end|>", add_special_tokens=False)
        at = next(n for n in range(labels.shape[1]) if alone["input_ids"][0, n : n + len(answer)].tolist() == answer)
        labels[0, at : at + len(answer)] = torch.tensor(answer)
        losses.append(model(**alone, labels=labels).loss)
    wanted = torch.stack(losses).mean()
    wanted.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_that_stands_where_there_is_none_has_gradients_of_exact_zeros(family):
    processor = make_processor(family)
    images, model = ImageTokens(processor), make_model(family, processor)
    ids = np.array([5, 6, 7, 8, 9, 10], dtype=np.int64)
    rows = [images.row(ids[:n], np.zeros(n, dtype=bool), ids[:n].copy()) for n in (6, 4)]
    found = {}
    for needs_image in (False, True):
        model.zero_grad()
        loss = model(**stack_rows(rows, 0, images, needs_image=needs_image)).loss
        loss.backward()
        found[needs_image] = loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    (alone, without), (loss, gradients) = found[False], found[True]
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)
    parts = names_of_parts(model)
    seeing = {*parts[TOWER], *parts[PROJECTOR]}
    assert len(gradients.keys() & seeing) > 5
    assert not any(gradients[name].any() for name in gradients.keys() & seeing)
    assert not without.keys() & seeing
    for name in without:
        torch.testing.assert_close(gradients[name], without[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_packed_batch_without_an_image_gets_one_that_changes_nothing(family, tmp_path, cache_dir):
    processor = make_processor(family)
    model = make_model(family, processor)
    path = write(tmp_path, [{"messages": turns(f"{ASKED} {n}")} for n in range(8)])
    config = config_of(path, cache_dir, packing=Packing.best_fit, sequence_length=128)
    stream = stream_of(config, processor, positions=find_positions(model.config))
    sequences = [one for _, one in zip(range(2), stream.packed(0, 1), strict=False)]
    found = []
    for stream.needs_image in (False, True):
        batch = stream.next_batch(sequences)
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (alone, without), (with_image, gradients) = found
    torch.testing.assert_close(with_image, alone, rtol=1e-6, atol=0)
    parts = names_of_parts(model)
    seeing = {*parts[TOWER], *parts[PROJECTOR]}
    assert len(gradients.keys() & seeing) > 5
    assert not any(gradients[name].any() for name in gradients.keys() & seeing)
    for name in without:
        torch.testing.assert_close(gradients[name], without[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("has_images", [True, False])
@pytest.mark.parametrize("packing", [Packing.none, Packing.best_fit])
def test_a_batch_comes_apart_into_its_sequences_with_their_images(packing, has_images, tmp_path, cache_dir):
    processor = make_processor("qwen2_5_vl")
    positions = find_positions(make_model("qwen2_5_vl", processor).config)
    # Rows of equal lengths, so that none is filled up to another one's.
    rows = [{"messages": turns(*[None] * has_images, ASKED), "images": ["1.png"] * has_images} for _ in range(9)]
    config = config_of(write(tmp_path, rows), cache_dir, packing=packing, sequence_length=96)
    stream = stream_of(config, processor, positions=positions)
    sequences = [one for _, one in zip(range(3), stream.packed(0, 1), strict=False)]
    alone = [stream.next_batch([one]) for one in sequences]
    stream.tells_images_by_row = True
    parts = split_batch(stream.next_batch(sequences), 3)
    assert sum("pixel_values" in part for part in parts) == 3 * has_images
    for part, wanted in zip(parts, alone, strict=True):
        assert part.keys() == wanted.keys()
        assert all(torch.equal(part[name], wanted[name]) for name in wanted)
    # Where each batch must have an image, the small one is the first sequence's.
    stream.needs_image = True
    seeing = ["pixel_values" in part for part in split_batch(stream.next_batch(sequences), 3)]
    assert seeing == [True, has_images, has_images]


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_and_what_is_never_reached_are_found_by_structure(family):
    processor = make_processor(family)
    model = make_model(family, processor)
    parts = names_of_parts(model)
    assert all("vision" in name or "visual" in name for name in parts[TOWER])
    assert all("projector" in name or "connector" in name for name in parts[PROJECTOR])
    assert {name for name, _ in model.named_parameters()} <= {name for part in parts.values() for name in part}
    assert any("layers.1" in name for name in parts[LANGUAGE])
    unreached = find_unreached(model.config, ImageTokens(processor).example())
    names = {from_the_end(model, name) for name, _ in model.named_parameters()}
    assert unreached <= names
    assert all("encoder.layers.-1." in name or "post_layernorm" in name for name in unreached)
    assert bool(unreached) == (family == "llava")


def test_a_run_of_what_images_never_reach_is_refused_in_words_that_fit(llava):
    for reads_images, said in ((True, "no gradient of images"), (False, "have no images")):
        model = make_model("llava", llava)
        last = [name for name in names_of_parts(model)[TOWER] if ".encoder.layers.1." in name]
        trained = TrainableParameters(
            train_only=tuple(last),
            reads_images=reads_images,
            unreached=frozenset(from_the_end(model, name) for name in last),
        )
        with pytest.raises(ConfigError, match=said):
            trained.choose(model, seed=0, layout=WHOLE)


@pytest.mark.parametrize(
    "adapter",
    [
        LoraConfig(target_modules=["k_proj", "fc2"]),
        IA3Config(target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"]),
        LoraConfig(target_modules=["k_proj"], modules_to_save=["fc2", "encoder"]),
    ],
    ids=["lora", "ia3", "saved modules"],
)
def test_an_adapter_in_what_images_never_reach_is_frozen(llava, adapter):
    example, model = ImageTokens(llava).example(), make_model("llava", llava)
    unreached = find_unreached(model.config, example)
    inject_adapter_in_model(adapter, model)
    read_images(model, unreached=unreached)
    model(**example).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("vision" in name for name in trained)


# ---- rows ----

ROWS = {
    "parts and a column": {"messages": turns(None, ASKED), "images": ["1.png"]},
    "one image": {"messages": turns(None, ASKED), "image": "1.png"},
    "parts with paths": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "path": "1.png"}, {"type": "text", "text": ASKED}]},
            {"role": "assistant", "content": SAID},
        ]
    },
    "as OpenAI has it": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image_url",
                        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
                    },
                    {"type": "text", "text": ASKED},
                ],
            },
            {"role": "assistant", "content": SAID},
        ]
    },
    "LLaVA": {
        "conversations": [{"from": "human", "value": f"<image>{ASKED}"}, {"from": "gpt", "value": SAID}],
        "image": "1.png",
    },
    "as TRL has it": {"prompt": [{"role": "user", "content": ASKED}], "completion": turns()[1:], "images": ["1.png"]},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_form_of_a_row_has_its_image_before_the_question(row, tmp_path):
    write(tmp_path, [])
    reader = RowReader(format=RowFormat.auto, images=ImageRules(str(tmp_path)))
    text = reader.read(row, where="row 0")
    assert isinstance(text, WithImages), getattr(text, "error", None)
    example = json.loads(text)
    assert example["messages"][0]["content"] == PLACE + ASKED
    assert example["images"][0]["size"] == list(draw(1).size)
    assert decode(text.files[0]).tobytes() == draw(1).tobytes()


def test_images_of_datasets_are_read_from_their_column(llava, cache_dir):
    features = datasets.Features({"messages": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = [{"messages": json.dumps(turns(None, ASKED)), "images": [{"bytes": png(n), "path": None}]} for n in range(3)]
    given = {"x": datasets.Dataset.from_list(rows, features=features)}
    config = config_of("memory", cache_dir)
    assert have_images(open_corpus(config, given))
    stream = stream_of(config, llava, given)
    batch = stream.next_batch([next(stream.packed(0, 1))])
    assert batch["pixel_values"].shape == (1, 3, 32, 32)
    # Who reads text alone does not look at the column.
    plain = open_corpus(dataclasses.replace(config, images=ImagesConfig(used=False)), given)
    assert not have_images(plain)


def animated():
    written = io.BytesIO()
    draw(1).save(written, "GIF", save_all=True, append_images=[draw(6)])
    return written.getvalue()


def deep():
    written = io.BytesIO()
    Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40)).save(written, "PNG")
    return written.getvalue()


BAD = {
    "missing": ({"images": ["3.png"]}, "cannot be read: No such file"),
    "outside": ({"images": ["../outside.png"]}, "leaves the folder"),
    "by a link": ({"images": ["link.png"]}, "leaves the folder"),
    "absolute": ({"images": ["/etc/hostname"]}, "leaves the folder|cannot be read"),
    "an address": ({"images": ["https://example.org/1.png"]}, "nothing is fetched"),
    "a file address": ({"images": ["file:///etc/hostname"]}, "nothing is fetched"),
    "a folder": ({"images": ["."]}, "is no file"),
    "too many": ({"images": ["1.png", "2.png"]}, "more or fewer images than places"),
    "too few": ({"messages": turns(None, ASKED, None), "images": ["1.png"]}, "more or fewer images than places"),
    "none": ({"images": []}, "more or fewer images than places"),
    "a number": ({"images": [7]}, "this is no image"),
    "no image": ({"images": [{"bytes": b"plain words", "path": None}]}, "these bytes are no image"),
    "animated": ({"images": [{"bytes": animated(), "path": None}]}, "several frames"),
    "16 bits": ({"images": [{"bytes": deep(), "path": None}]}, "more than 8 bits"),
    "said": (
        {"messages": [turns(ASKED)[0], {"role": "assistant", "content": [{"type": "image"}]}], "images": ["1.png"]},
        "what the assistant says",
    ),
    "a video": (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}, turns()[1]], "images": ["1.png"]},
        "neither text nor an image",
    ),
}


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
def test_a_bad_image_is_refused_with_its_row(row, message, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder, [])
    draw(1).save(tmp_path / "outside.png")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    reader = RowReader(format=RowFormat.auto, images=ImageRules(str(folder)))
    found = reader.read({"messages": turns(None, ASKED)} | row, where="rows.jsonl, row 7")
    assert isinstance(found, BadRow)
    assert re.search(message, found.error.what)
    assert found.error.where == "rows.jsonl, row 7"


@pytest.mark.parametrize(("name", "rules"), [("bytes", {"max_bytes": 100}), ("pixels", {"max_pixels": 99})])
def test_a_large_image_is_refused_before_it_is_decoded(tmp_path, name, rules, monkeypatch):
    write(tmp_path, [])
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    reader = RowReader(format=RowFormat.auto, images=ImageRules(str(tmp_path), **rules))
    found = reader.read({"messages": turns(None, ASKED), "images": ["1.png"]}, where="row 1")
    assert re.search(f"too many {name}", found.error.what)
    assert f"data.images.max_{name}" in found.error.allowed


def test_images_come_upright_and_in_rgb(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    draw(1).save(tmp_path / "turned.jpg", exif=exif)
    draw(1).save(tmp_path / "by_xmp.jpg", xmp=b'<x:xmpmeta tiff:Orientation="6"/>')
    draw(1).convert("CMYK").save(tmp_path / "cmyk.jpg")
    # What stands after the pixels is not in the header.
    body = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    (tmp_path / "late.png").write_bytes(png()[:-12] + chunk + png()[-12:])
    reader = RowReader(format=RowFormat.auto, images=ImageRules(str(tmp_path)))
    width, height = draw(1).size
    upright, turned = (width, height), (height, width)
    for name, size in {"turned.jpg": turned, "by_xmp.jpg": turned, "cmyk.jpg": upright, "late.png": upright}.items():
        text = reader.read({"messages": turns(None, ASKED), "images": [name]}, where="row 1")
        assert json.loads(text)["images"][0]["size"] == list(size)
        assert (decode(text.files[0]).mode, decode(text.files[0]).size) == ("RGB", size)


def test_a_damaged_image_hides_its_own_row_of_a_packed_sequence(llava, tmp_path, cache_dir):
    path = write(
        tmp_path, [{"messages": turns(None, f"{ASKED} {n}"), "images": [f"{1 + n % 2}.png"]} for n in range(4)]
    )
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:-40])
    config = config_of(path, cache_dir, packing=Packing.best_fit, on_bad_rows=BadRows.skip, sequence_length=512)
    (_, _, sequence) = next(stream_of(config, llava).packed(0, 1))
    ids, positions, labels = sequence.rows[:, : sequence.num_tokens]
    starts = [*np.flatnonzero(positions == 0), len(ids)]
    taught = [bool((labels[start:stop] != IGNORED).any()) for start, stop in pairwise(starts)]
    assert sorted(taught) == [False, False, True, True]
    assert len(sequence.problems) == 2
    assert sorted(problem.document for problem in sequence.problems) == [1, 3]
    black = [bool(sequence.images[piece].inputs["pixel_values"].std((2, 3)).max() < 1e-6) for piece in range(4)]
    assert black == [not one for one in taught]


def test_a_row_with_a_damaged_image_is_in_the_ledger_as_a_bad_one(llava, tmp_path, cache_dir):
    rows = [{"messages": turns(None, f"{ASKED} {n}"), "images": [f"{1 + n % 2}.png"]} for n in range(4)]
    path = write(tmp_path, rows)
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:-40])
    settings = {"packing": Packing.best_fit, "on_bad_rows": BadRows.quarantine, "sequence_length": 512}
    stream = stream_of(config_of(path, cache_dir, **settings), llava)
    stream.ledger = Ledger(tmp_path / "ledger", stream.corpus, BadRows.quarantine)
    stream.next_batch([next(stream.packed(0, 1))])
    stream.ledger.flush()
    lines = [json.loads(line) for line in bad_rows_file(tmp_path / "ledger", 0).read_text().splitlines()]
    assert sorted(line["row"].rpartition(":")[2] for line in lines) == ["1", "3"]
    assert all("the image is damaged" in line["problem"] and line["sequence"] == 0 for line in lines)


def test_a_damaged_image_keeps_its_place_and_teaches_nothing_or_stops(llava, tmp_path, cache_dir):
    rows = [{"messages": turns(None, f"{ASKED} {n}"), "images": [f"{1 + n % 2}.png"]} for n in range(4)]
    path = write(tmp_path, rows)
    whole = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(whole[:-40])
    skipped = stream_of(config_of(path, cache_dir, on_bad_rows=BadRows.skip), llava)
    packed = [sequence for _, (_, _, sequence) in zip(range(4), skipped.packed(0, 1), strict=False)]
    is_taught = [bool((sequence.rows[2] != IGNORED).any()) for sequence in packed]
    assert sorted(is_taught) == [False, False, True, True]
    assert ["the image is damaged" in str(one.problems) for one in packed] == [not taught for taught in is_taught]
    assert all(one.images[0].inputs["pixel_values"].shape == (1, 3, 32, 32) for one in packed)
    with pytest.raises(DataError, match="damaged") as caught:
        list(zip(range(4), stream_of(config_of(path, cache_dir), llava).packed(0, 1), strict=False))
    assert re.fullmatch(r"rows.jsonl, row [13]", caught.value.where)
    assert "data.on_bad_rows=skip" in caught.value.hint


def test_an_image_that_the_processor_does_not_take_is_a_bad_row(tmp_path, cache_dir):
    path = write(tmp_path, [{"messages": turns(None, ASKED), "images": ["long.png"]}])
    Image.new("RGB", (2010, 10)).save(tmp_path / "long.png")
    stream = stream_of(config_of(path, cache_dir), make_processor("qwen2_5_vl"))
    with pytest.raises(DataError, match="does not take an image of this size") as caught:
        next(stream.packed(0, 1))
    assert caught.value.found == "2010 x 10"


def test_a_row_that_is_too_long_is_left_out_whole(llava, tmp_path, cache_dir):
    path = write(tmp_path, [{"messages": turns(None, ASKED * 3), "images": ["1.png"]}, {"messages": turns(ASKED)}])
    stream = stream_of(config_of(path, cache_dir, sequence_length=40), llava)
    (_, _, sequence) = next(stream.packed(0, 1))
    assert sequence.images is None
    assert {int(fate) for fate in sequence.records["fate"]} == {0, 5}


@pytest.mark.parametrize("packing", [Packing.none, Packing.best_fit])
def test_workers_and_resumed_streams_give_the_same_batches(packing, tmp_path, cache_dir):
    processor = make_processor("qwen2_5_vl")
    model = make_model("qwen2_5_vl", processor)
    rows = [{"messages": turns(None, f"{n} {ASKED}"), "images": [f"{1 + n % 2}.png"]} for n in range(12)]
    config, found = config_of(write(tmp_path, rows), cache_dir, packing=packing, sequence_length=128), []
    for workers in (0, 1):
        config.workers = workers
        stream = stream_of(config, processor, positions=find_positions(model.config))
        batches, made = iter(stream.loader(batch_size=1)), []
        for number in range(3):
            if number == 1 and not workers:
                # Another stream goes on where this one stands.
                state = stream.state_dict()
                stream = stream_of(config, processor, positions=find_positions(model.config))
                stream.load_state_dict(state)
                batches = iter(stream.loader(batch_size=1))
            made.append(next(batches))
        batches.close()
        found.append(made)
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys() >= {"pixel_values", "labels"}
        assert ("position_ids" in one) == (packing is Packing.best_fit)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_loader_waits_once_it_holds_as_many_bytes_of_images_as_it_may(llava, tmp_path, cache_dir):
    rows = [{"messages": turns(None, f"{n} {ASKED}"), "images": ["1.png"]} for n in range(12)]
    path, of_image = write(tmp_path, rows), 3 * 32 * 32 * 4
    images = ImagesConfig(prefetch_bytes=2 * of_image)
    stream = stream_of(config_of(path, cache_dir, workers=1, images=images), llava)
    decoded, decode_all = multiprocessing.get_context("fork").Value("i", 0), stream.images.inputs

    def counted(given):
        decoded.value += 1
        return decode_all(given)

    stream.images.inputs = counted
    batches = iter(stream.loader(batch_size=1))
    for num_taken in range(1, 12):
        next(batches)
        # Two that are ready, and no more, as long as nobody takes one.
        until = time.monotonic() + 30
        while decoded.value < min(num_taken + 2, 12) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        assert decoded.value == min(num_taken + 2, 12)
    begun = time.monotonic()
    batches.close()
    assert time.monotonic() - begun < 4


def test_held_out_rows_come_with_their_images(llava, tmp_path, cache_dir):
    rows = [{"messages": turns(None, f"{n} {ASKED}"), "images": ["1.png"]} for n in range(30)]
    config = config_of(write(tmp_path, rows), cache_dir, eval_fraction=0.2)
    held_out = build_held_out(open_corpus(config), llava.tokenizer, config, ImageTokens(llava))
    assert len(held_out) > 1
    assert held_out.has_image(0)
    assert held_out[0]["pixel_values"].shape == (1, 3, 32, 32)
    # A prompt with its reference keeps no pixels.
    [example] = take_examples(held_out, 1, with_images=True)
    assert example.images()["pixel_values"].equal(held_out[0]["pixel_values"])
    (tmp_path / "1.png").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        example.images()
    assert take_examples(held_out, 1) == []


def test_a_processor_that_says_nothing_of_images_is_refused(llava):
    class Silent(type(llava)):
        def replace_image_token(self, image_inputs, image_idx, **kwargs):
            raise NotImplementedError

    silent = Silent(llava.image_processor, llava.tokenizer, patch_size=8)
    with pytest.raises(ConfigError, match="does not say what it writes"):
        ImageTokens(silent)


@pytest.mark.parametrize("family", ["llava", many("qwen2_5_vl")])
def test_both_answers_of_a_pair_have_its_images_and_other_images_are_another_document(family, tmp_path, cache_dir):
    processor = make_processor(family)
    for number in (1, 16):
        # Of one size.
        draw(number).save(tmp_path / f"{number}.png")
    answers = [[{"role": "assistant", "content": text}] for text in ("a cat", "a red square")]
    pair = {"prompt": turns(None, ASKED)[:1], "chosen": answers[0], "rejected": answers[1]}
    rows = [pair | {"images": [name]} for name in ("1.png", "16.png", "1.png")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"format": RowFormat.preference, "packing": Packing.best_fit, "sequence_length": 512}
    config = config_of(path, cache_dir, **settings)
    find = None if family == "llava" else find_positions(make_model(family, processor).config)
    stream = stream_of(config, processor, positions=find)
    stream.tells_images = True
    batch = stream.next_batch([next(stream.packed(0, 1))])
    text = processor.apply_chat_template(pair["prompt"], tokenize=False)
    alone = processor(text=[text], images=[draw(1)], return_tensors="pt")["pixel_values"]
    pixels = batch["pixel_values"].split(len(alone))
    assert len(pixels) == 6
    keys = [place.key for place in places(batch)]
    # The order of rows is that of the epoch.
    first = [number for number in range(3) if torch.equal(pixels[2 * number], alone)]
    assert len(first) == 2
    for number in range(3):
        assert torch.equal(pixels[2 * number], pixels[2 * number + 1])
        same = [keys[2 * other : 2 * other + 2] == keys[2 * number : 2 * number + 2] for other in range(3)]
        assert same == [(other in first) == (number in first) for other in range(3)]
    assert len(set(keys)) == 4


def test_an_image_in_a_rejected_answer_is_refused(llava, tmp_path, cache_dir):
    draw(1).save(tmp_path / "1.png")
    said = [{"role": "assistant", "content": "a cat"}]
    seen = [{"role": "assistant", "content": [{"type": "image", "path": "1.png"}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": ASKED, "chosen": said, "rejected": seen}))
    stream = stream_of(config_of(path, cache_dir, format=RowFormat.preference), llava)
    with pytest.raises(DataError, match="in a rejected answer"):
        next(stream.packed(0, 1))


def test_a_run_of_text_alone_names_the_row_with_an_image(llava, tmp_path, cache_dir):
    path = write(tmp_path, [{"messages": turns(None, ASKED), "images": ["1.png"]}])
    config = config_of(path, cache_dir)
    stream = TokenStream(open_corpus(config), llava.tokenizer, config)
    with pytest.raises(DataError, match="the run reads text alone"):
        next(stream.packed(0, 1))
