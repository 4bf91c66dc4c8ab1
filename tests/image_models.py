"""Small models of image and text with random weights, each with its own type's processor, as folders of the Hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hfdist.models.processor import without_video
from hfdist.models.tokenizer import train_bpe

_WORDS = ["what is in this picture? a red square, a blue one and a cat. user assistant system describe it now"] * 4
_SQUARE = {"height": 32, "width": 32}
_TEXT: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_TILES = {"image_size": 32, "patch_size": 8}


class _Family(NamedTuple):
    """What a type needs besides its text: special tokens by their names, its processor, its config."""

    tokens: Mapping[str, str]
    image: str
    """What its chat template writes for an image."""
    processor: Callable[[PreTrainedTokenizerBase], Any]
    config: Callable[[Any, Mapping[str, Any]], PreTrainedConfig]


def _llava(tokenizer: PreTrainedTokenizerBase) -> Any:
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=_SQUARE)
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(images, tokenizer, **how)


def _qwen(tokenizer: PreTrainedTokenizerBase) -> Any:
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=32 * 48)
    return without_video(transformers.Qwen2_5_VLProcessor)(images, tokenizer, video_processor=None)


def _qwen3(tokenizer: PreTrainedTokenizerBase) -> Any:
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=32 * 48)
    return without_video(transformers.Qwen3VLProcessor)(images, tokenizer, video_processor=None)


def _gemma(tokenizer: PreTrainedTokenizerBase) -> Any:
    return transformers.Gemma3Processor(Gemma3ImageProcessorPil(size=_SQUARE), tokenizer, image_seq_length=4)


def _idefics(tokenizer: PreTrainedTokenizerBase) -> Any:
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)


def _internvl(tokenizer: PreTrainedTokenizerBase) -> Any:
    images = GotOcr2ImageProcessorPil(size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=2)
    return without_video(transformers.InternVLProcessor)(images, tokenizer, None, image_seq_length=4)


def _llava_config(processor: Any, text: Mapping[str, Any]) -> PreTrainedConfig:
    tower = transformers.CLIPVisionConfig(**_TOWER, **_TILES, projection_dim=32)
    own = {"image_token_id": processor.image_token_id, "image_seq_length": 16}
    return transformers.LlavaConfig(vision_config=tower, text_config=transformers.LlamaConfig(**text), **own)


def _qwen_config(processor: Any, text: Mapping[str, Any]) -> PreTrainedConfig:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    tower |= {"patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    ids = {"image_token_id": processor.image_token_id, "video_token_id": processor.video_token_id}
    ids |= {f"vision_{end}_token_id": processor.tokenizer.convert_tokens_to_ids(f"<|vision_{end}|>") for end in _ENDS}
    return transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope, "head_dim": None}, vision_config=tower, **ids
    )


def _qwen3_config(processor: Any, text: Mapping[str, Any]) -> PreTrainedConfig:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    # What its first block sees is added after the first block of the language model, too.
    tower |= {"patch_size": 8, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0}
    ids = {"image_token_id": processor.image_token_id, "video_token_id": processor.video_token_id}
    ids |= {f"vision_{end}_token_id": processor.tokenizer.convert_tokens_to_ids(f"<|vision_{end}|>") for end in _ENDS}
    return transformers.Qwen3VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=tower, **ids)


def _gemma_config(processor: Any, text: Mapping[str, Any]) -> PreTrainedConfig:
    tower = transformers.SiglipVisionConfig(**_TOWER, **_TILES, vision_use_head=False)
    tokenizer = processor.tokenizer
    ids = {f"{end}_token_index": getattr(tokenizer, f"{end}_token_id") for end in ("boi", "eoi", "image")}
    own = {"query_pre_attn_scalar": 8, "sliding_window": 16}
    writer = transformers.Gemma3TextConfig(**text, **own)
    return transformers.Gemma3Config(text_config=writer, vision_config=tower, mm_tokens_per_image=4, **ids)


def _idefics_config(processor: Any, text: Mapping[str, Any]) -> PreTrainedConfig:
    own = {"vision_config": {**_TOWER, **_TILES}, "text_config": transformers.LlamaConfig(**text), "scale_factor": 2}
    return transformers.Idefics3Config(**own, image_token_id=processor.image_token_id)


def _internvl_config(processor: Any, text: Mapping[str, Any]) -> PreTrainedConfig:
    tower = {**_TOWER, "image_size": [32, 32], "patch_size": [8, 8]}
    own = {"vision_config": tower, "text_config": transformers.Qwen2Config(**text), "image_seq_length": 4}
    return transformers.InternVLConfig(**own, image_token_id=processor.image_token_id)


_ENDS = ("start", "end")
_NAMED = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_OF_INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_OF_QWEN = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
_OF_QWEN |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
FAMILIES: Mapping[str, _Family] = {
    "llava": _Family({"image_token": "<image>"}, "<image>\n", _llava, _llava_config),
    "qwen2_5_vl": _Family(_OF_QWEN, "<|vision_start|><|image_pad|><|vision_end|>", _qwen, _qwen_config),
    "qwen3_vl": _Family(_OF_QWEN, "<|vision_start|><|image_pad|><|vision_end|>", _qwen3, _qwen3_config),
    "gemma3": _Family(_NAMED, "<start_of_image>", _gemma, _gemma_config),
    "idefics3": _Family({}, "<image>", _idefics, _idefics_config),
    "internvl": _Family(_OF_INTERNVL, "<IMG_CONTEXT>\n", _internvl, _internvl_config),
}
"""Families by their model_type. llava's template takes contents in parts alone, as that of the Hub does."""


def make_processor(family: str) -> Any:
    """Make the processor of a type, with a chat template in its tokenizer."""
    known = FAMILIES[family]
    trained = train_bpe(_WORDS, 300)
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *known.tokens.values()]}
    trained.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer,
        bos_token=trained.bos_token,
        eos_token=trained.eos_token,
        extra_special_tokens=dict(known.tokens),
        clean_up_tokenization_spaces=False,
    )
    processor = known.processor(tokenizer)
    tokenizer.chat_template = processor.chat_template = _template(known.image, takes_text=family != "llava")
    return processor


def _template(image: str, *, takes_text: bool) -> str:
    image = image.replace("\n", "\\n")
    parts = (
        f"{{% for c in m.content | selectattr('type', 'equalto', 'image') %}}{{{{ '{image}' }}}}{{% endfor %}}"
        "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}"
    )
    if takes_text:
        parts = (
            "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
            f"{{% if c.type == 'image' %}}{{{{ '{image}' }}}}{{% else %}}{{{{ c.text }}}}{{% endif %}}"
            "{% endfor %}{% endif %}"
        )
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}" + parts + "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def make_model(family: str, processor: Any, *, num_blocks: int = 2) -> Any:
    """Make the model of a type with random weights, none of which are zeros; `num_blocks`: of its language model."""
    text = {**_TEXT, "vocab_size": len(processor.tokenizer) + 3, "num_hidden_layers": num_blocks}
    ids = {name: getattr(processor.tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = FAMILIES[family].config(processor, text | ids)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Gemma's projection is zeros at first, so that nothing would reach its tower.
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model


def save_model(family: str, folder: Path, *, num_blocks: int = 2) -> Path:
    """Write a folder with the model and its processor's files; gives the folder."""
    processor = make_processor(family)
    make_model(family, processor, num_blocks=num_blocks).save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    values = {name: value for name, value in vars(processor).items() if name in _SAVED}
    values = {"processor_class": type(processor).__name__, **values}
    (folder / "processor_config.json").write_text(json.dumps(values))
    return folder


_SAVED = (
    "patch_size",
    "vision_feature_select_strategy",
    "num_additional_image_tokens",
    "image_seq_length",
    "image_seq_len",
)


def draw(number: int) -> Image.Image:
    """Draw an image that has a size and a colour of its own."""
    size, colour = (24 + 7 * (number % 5), 20 + 9 * (number % 3)), (40 * number % 256, 90, 200 - number % 100)
    image = Image.new("RGB", size, colour)
    image.paste((255, 255, 17 * number % 256), (2, 3, 12, 9 + number % 7))
    return image
