"""Small models of image and text of any type, each with its type's own processor, which is made of parts.

No type has code of its own. What a processor needs follows from its class:

processor's source    special tokens that it names, and those that it takes from its tokenizer
image processor       sizes of its class, made small: an image of 32 x 32 has 16 patches of 8 x 8
model                 how many features an image has, where the processor is told a number
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from hfdist.errors import first_line
from hfdist.models.heads import IMAGE_TEXT
from hfdist.models.processor import without_video
from hfdist.models.shrink import shrink
from hfdist.models.small_fields import SPECIAL_TOKENS
from hfdist.models.tokenizer import train_bpe
from tests.zoo.models import FIELDS, switch_off

SIDE, PATCH = 32, 8
"""Pixels of an image's side, and of a patch's."""
NUM_PATCHES = (SIDE // PATCH) ** 2
_WORDS = ["what is in this picture? a red square, a blue one and a cat. user assistant system describe it now"] * 4
_PIXELS = {"shortest_edge": 2 * SIDE * PATCH, "longest_edge": SIDE * SIDE}
"""The least and the most pixels of an image, of types that keep its proportions."""
_TILINGS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
_ENDS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
_COUNTS = ("image_seq_length", "image_seq_len", "num_image_tokens", "num_query_tokens")
"""Parameters of processors: how many tokens stand for an image."""
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}{{ 'IMAGE' }}{{ '\\n' }}{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class NoProcessor(Exception):
    """transformers has no class for images of this type that starts here."""


def make_model_and_processor(model_type: str) -> tuple[PreTrainedModel, Any]:
    """Make a small model of a type with random weights, none of them zeros, and its processor with a chat template.

    Raises:
        NoProcessor: the type has none that reads images without torchvision.
        Exception: whatever transformers raises on a part that the type needs besides.
    """
    made, images = _processor_class(model_type), _image_processor(model_type)
    tokenizer = make_tokenizer(made)
    config = make_config(model_type, tokenizer)
    processor = _processor(made, images, tokenizer, config, NUM_PATCHES)
    _set_tokens(config, processor)
    model = make_weights(config)
    if any(name in inspect.signature(made.__init__).parameters for name in _COUNTS):
        processor = _processor(made, images, tokenizer, config, _count_features(model, images))
    tokenizer.chat_template = processor.chat_template = _TEMPLATE.replace("IMAGE", _place_of(processor))
    return model, processor


def save(model: PreTrainedModel, processor: Any, folder: Path) -> Path:
    """Write a folder as the Hub has it; gives the folder."""
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    takes = inspect.signature(type(processor).__init__).parameters
    values = {name: value for name, value in vars(processor).items() if name in takes and _is_plain(value)}
    values.pop("chat_template", None)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": type(processor).__name__, **values}))
    return folder


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, dict))


def _processor_class(model_type: str) -> type[Any]:
    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    if name is None:
        raise NoProcessor("transformers names no processor of this type")
    try:
        return without_video(getattr(transformers, name))
    except (ImportError, RuntimeError) as error:
        raise NoProcessor(f"its processor cannot be imported: {first_line(error)}") from error


def _image_processor(model_type: str) -> Any:
    """Give the type's image processor with small sizes."""
    own = PROCESSOR_MAPPING_NAMES.get(model_type)
    # Some types have the processor of another one, and no name of their own for its part.
    kinds = [model_type, *(kind for kind, name in PROCESSOR_MAPPING_NAMES.items() if name == own)]
    names = ((IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}).get("pil") for kind in kinds)
    name = next(filter(None, names), None)
    if name is None:
        raise NoProcessor("transformers has no image processor of this type without torchvision")
    made = getattr(transformers, name)
    small = {key: _small_of_images(key, value) for key, value in made().to_dict().items()}
    return made(**{key: value for key, value in small.items() if value is not None}, image_seq_length=NUM_PATCHES)


def _small_of_images(name: str, value: object) -> object:
    """Give the small value of a setting of an image processor; None: it stays."""
    if name in ("size", "crop_size", "max_image_size", "high_res_size") and isinstance(value, Mapping):
        if {*value} == {*_PIXELS}:
            return _PIXELS if value["shortest_edge"] > 2000 else dict.fromkeys(value, SIDE)
        tiles = 2 if name == "size" and {*value} == {"longest_edge"} else 1
        return dict.fromkeys(value, tiles * SIDE) if max(value.values()) > 1 else None
    if name == "patch_size":
        return dict.fromkeys(value, PATCH) if isinstance(value, Mapping) else PATCH
    small = {"image_grid_pinpoints": _TILINGS, "min_patches": 1, "max_patches": 2, "tile_size": SIDE}
    small |= {"max_image_size": SIDE, "min_image_size": SIDE, "max_soft_tokens": 70}
    return small.get(name)


def make_tokenizer(made: type[Any]) -> PreTrainedTokenizerFast:
    """Make a small tokenizer with all special tokens that a class of processors names or asks it for."""
    source = inspect.getsource(importlib.import_module(made.__mro__[1].__module__))
    written = re.findall(r"[^\w](<[^<>\s\"'{}]+>|\[[A-Z_]+\]|\|[A-Z]+\|)[^\w]", source)
    # Those that it can do without have defaults in the source.
    asked = {*re.findall(r"tokenizer\.(\w+_token)\b", source)} - {*re.findall(r"tokenizer, \"(\w+_token)\"", source)}
    asked |= {*re.findall(r"getattr\(tokenizer, \"(\w+_token)\", None\)", source)}
    named = {name: f"<|{name}|>" for name in sorted(asked) if name.partition("_")[0] not in (*_ENDS, "add")}
    trained = train_bpe(_WORDS, 300)
    # More than the processor knows: a config may have ids of others.
    more = [f"<|unused_{number}|>" for number in range(16)]
    special = ["<|im_start|>", "<|im_end|>", *dict.fromkeys(written), *named.values(), *more]
    trained.add_special_tokens({"additional_special_tokens": special})
    return PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer,
        bos_token=trained.bos_token,
        eos_token=trained.eos_token,
        pad_token=trained.eos_token,
        unk_token=trained.eos_token,
        extra_special_tokens=named,
        clean_up_tokenization_spaces=False,
    )


def make_config(model_type: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Give a small config whose tower reads images of `SIDE`."""
    config = AutoConfig.for_model(model_type, **FIELDS.get(model_type, {}))
    for part in _parts_of(config):
        if getattr(part, "image_size", None) is not None or getattr(part, "patch_size", None) is not None:
            for name, size in (("image_size", SIDE), ("patch_size", PATCH)):
                value = getattr(part, name, None)
                if value is not None:
                    setattr(part, name, [size] * len(value) if isinstance(value, (list, tuple)) else size)
    for name, value in _OF_MODELS.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    text = config.get_text_config()
    if _has_rotary_section(text) and "mrope_section" not in text.rope_parameters:
        # The code's own default is for heads of another size.
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        pairs = int(size * text.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
        text.rope_parameters["mrope_section"] = [pairs // 4, pairs // 4, pairs - pairs // 4 * 2]
    small = shrink(config, num_blocks=2, vocab_size=len(tokenizer))
    switch_off(small)
    small._attn_implementation = "eager"
    return small


def _has_rotary_section(text: PreTrainedConfig) -> bool:
    """Whether the code of a type divides rotary pairs into time, height and width."""
    module = type(text).__module__.replace(".configuration_", ".modeling_")
    return '"mrope_section"' in inspect.getsource(importlib.import_module(module))


_OF_MODELS: Mapping[str, object] = {
    "image_grid_pinpoints": _TILINGS,
    "mm_tokens_per_image": 4,
    "projector_patch_to_query_dict": {NUM_PATCHES: 4},
    "image_seq_length": NUM_PATCHES,
}
"""Fields of configs that follow from the number of patches."""


def _parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts_of(value)


def _processor(
    made: type[Any], images: Any, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, num_features: int
) -> Any:
    """Make a processor; what its class takes besides parts is a size, or a field of the model's config."""
    given: dict[str, object] = dict.fromkeys(made.get_attributes()) | {"image_processor": images}
    given |= {name: tokenizer for name in given if name.endswith("tokenizer")}
    strategy = getattr(config, "vision_feature_select_strategy", "default")
    known = {"patch_size": PATCH, "img_size": SIDE, "vision_feature_select_strategy": strategy}
    known |= dict.fromkeys(_COUNTS, num_features) | {"size_conversion": {SIDE: num_features}}
    # Of towers with a class token, which the strategy above leaves out.
    known["num_additional_image_tokens"] = 1
    for name in inspect.signature(made.__init__).parameters:
        if name in known:
            given[name] = known[name]
        elif name not in given and name != "chat_template":
            found = next((getattr(part, name) for part in _parts_of(config) if hasattr(part, name)), None)
            given |= {} if found is None else {name: found}
    return made(**given)


def _set_tokens(config: PreTrainedConfig, processor: Any) -> None:
    """Let ids of special tokens be those of the processor, and others be of tokens that nobody writes. In place."""
    tokenizer = processor.tokenizer
    known: dict[str, int] = {}
    with suppress(Exception):  # whatever a processor raises for which this is not enough
        made = processor(text=[_place_of(processor)], images=[Image.new("RGB", (SIDE, SIDE))], return_tensors="pt")
        known["image_token"] = Counter(made["input_ids"][0].tolist()).most_common(1)[0][0]
    unused = iter(tokenizer.convert_tokens_to_ids([f"<|unused_{number}|>" for number in range(16)]))
    for part in _parts_of(config):
        for name, value in [*vars(part).items()]:
            if not re.fullmatch(SPECIAL_TOKENS, name) or isinstance(value, list):
                continue
            stem = re.sub(r"_(id|index)$", "", name)
            if stem not in known and isinstance(value, int):
                own = getattr(processor, f"{stem}_id", None)
                own = getattr(tokenizer, f"{stem}_id", None) if own is None else own
                known[stem] = next(unused) if own is None else own
            if stem in known:
                setattr(part, name, known[stem])


def _place_of(processor: Any) -> str:
    """Give what a text has in the place of an image."""
    own: str = getattr(processor, "image_placeholder_token", None) or getattr(processor, "image_token", "<image>")
    return str(own)


def make_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """Make a model with random weights in float32, none of which are zeros, the same in every process."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = IMAGE_TEXT.auto.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def _count_features(model: PreTrainedModel, images: Any) -> int:
    """Give how many features a model makes of a small image, or of each of its tiles."""
    if any("image_newline" in name for name, _ in model.named_parameters()):
        # Tokens at the ends of lines are no features; the processor counts them.
        return NUM_PATCHES
    given = images([Image.new("RGB", (SIDE, SIDE))], return_tensors="pt")
    find = next(
        module.get_image_features for module in (model, model.base_model) if hasattr(module, "get_image_features")
    )
    takes = inspect.signature(find).parameters
    with torch.no_grad():
        found = find(**{name: value for name, value in given.items() if name in takes}).pooler_output
    num_features = sum(one.numel() // one.shape[-1] for one in ([found] if isinstance(found, torch.Tensor) else found))
    return num_features // given["pixel_values"].shape[:-3].numel()
