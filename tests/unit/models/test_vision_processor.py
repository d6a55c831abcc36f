"""Images of prompts: their files, the tokens that stand for them, and the chat template around them."""

from __future__ import annotations

import base64
import io
import pickle
from copy import deepcopy
from functools import cache, partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from strop import plugins
from strop.data.packing import pack
from strop.models.chat_template import ChatTemplate
from strop.models.vision.image_files import ImageError, decode_image, encode_image, read_image
from strop.models.vision.vision_families import Pixels, UnknownFamily, VisionFamily, find_family
from strop.models.vision.vision_processor import PixelCache, VisionProcessor, find_vision_processor, load_vision_processor
from strop.types import Image, Message
from support.recorded import demonstration_group
from support.vision_models import FAMILIES, as_data_url, build_vision_tokenizer, draw_image, make_vision_config, save_vision_model

ALL = tuple(FAMILIES)


@cache
def make_processor(family: str) -> VisionProcessor:
    config, tokenizer = make_vision_config(family), build_vision_tokenizer(family)
    return VisionProcessor(find_family(config), FAMILIES[family].image_processor(), tokenizer)


def make_template(family: str) -> ChatTemplate:
    processor = make_processor(family)
    return ChatTemplate(processor.tokenizer, vision=processor)


def question(*files: bytes, text: str = "which of them is it?") -> Message:
    return Message("user", text, images=tuple(Image(as_data_url(file), position=6 * place) for place, file in enumerate(files)))


def reference_tokens(family: str, text: str, files: list[bytes]) -> list[int]:
    """What the family's own processor in Transformers makes of a rendered text."""
    import transformers

    config, tokenizer = make_vision_config(family), build_vision_tokenizer(family)
    options: dict[str, Any] = {"image_seq_len": 4}
    if family == "gemma3":
        names = {"boi": config.boi_token_index, "eoi": config.eoi_token_index, "image": config.image_token_index}
        for name, token in names.items():
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
            setattr(tokenizer, f"{name}_token_id", token)
        options = {"image_seq_length": 4}
    if family == "llava":
        options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    if family == "gemma4":
        pytest.importorskip("torchvision")  # which its processor imports
        for name in ("boi", "eoi", "image"):
            token = getattr(config, f"{name}_token_id")
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
        tokenizer.image_token_id = config.image_token_id
        options = {"feature_extractor": None, "video_processor": None}
    kind = {"gemma3": "Gemma3Processor", "gemma4": "Gemma4Processor", "llava": "LlavaProcessor", "idefics3": "Idefics3Processor"}[
        family
    ]
    processor = getattr(transformers, kind)(image_processor=FAMILIES[family].image_processor(), tokenizer=tokenizer, **options)
    images = [[decode_image(file) for file in files]]
    read = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    found: list[int] = read["input_ids"][0].tolist()
    return found


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llava", "idefics3"])
def test_a_prompt_has_the_tokens_that_the_processor_of_transformers_gives(family: str) -> None:
    files = [draw_image(1), draw_image(2, 90, 30)]
    template = make_template(family)
    messages = [question(*files)]
    encoded = template.encode_with_images(messages)
    assert encoded.tokens == reference_tokens(family, template.render_prompt(messages), files)
    assert template.encode_prompt(messages) == encoded.tokens


@pytest.mark.parametrize("family", ALL)
def test_an_image_stands_where_its_tokens_are(family: str) -> None:
    processor = make_processor(family)
    encoded = make_template(family).encode_with_images([question(draw_image(1), draw_image(2, 90, 30), draw_image(1))])
    image_token = processor.image_token_id
    covered = [place for image in encoded.images for place in range(image.start, image.end)]
    assert [place for place, token in enumerate(encoded.tokens) if token == image_token] == [
        place for place in covered if encoded.tokens[place] == image_token
    ]
    for image in encoded.images:
        own = encoded.tokens[image.start : image.end]
        assert own.count(image_token) == processor.family.count_rows(processor.pixels(image))
        assert own[0] == own[-1] == image_token
    first, _, again = encoded.images
    assert first.digest == again.digest and first.content == again.content


def test_an_observation_with_an_image_goes_on_where_the_turn_ended() -> None:
    template = make_template("qwen2_5_vl")
    tokenizer = template.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    observation = template.encode_observation_with_images([question(draw_image(3), text="look")], [65, end])
    assert tokenizer.decode(observation.tokens).startswith("\n<|im_start|>user\n<|vision_start|><|image_pad|>")
    (image,) = observation.images
    assert set(observation.tokens[image.start : image.end]) == {make_processor("qwen2_5_vl").image_token_id}


def test_the_spans_of_a_recorded_conversation_have_their_images() -> None:
    template = make_template("smolvlm")
    files = [draw_image(1), draw_image(2)]
    messages = [
        question(files[0]),
        Message("assistant", "a red one"),
        question(files[1], text="and now?"),
        Message("assistant", "blue"),
    ]
    (spans,) = template.encode_spans(messages)
    assert [len(span.images) for span in spans] == [1, 0, 1, 0, 0]
    assert [span.in_loss for span in spans][:4] == [False, True, False, True]
    assert spans[0].tokens == template.encode_with_images(messages[:1]).tokens
    assert "".join(span.text for span in spans) == template.render_conversation(messages)


def test_a_turn_that_the_template_rewrites_later_keeps_the_images_before_it() -> None:
    Conversation = pytest.importorskip("strop.extensions.recorded.examples").Conversation
    RecordedRules = pytest.importorskip("strop.extensions.recorded.recorded_tokens").RecordedRules
    processor = make_processor("smolvlm")
    tokenizer = deepcopy(processor.tokenizer)
    template = ChatTemplate(tokenizer, vision=processor)
    forgetting = "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m['content'] }}", forgetting, 1)
    messages = (
        question(draw_image(1)),
        Message("assistant", "<think>red?</think>a red one"),
        question(draw_image(2), draw_image(3), text="and now, of these?"),
        Message("assistant", "<think>no</think>blue"),
        question(draw_image(4)),
        Message("assistant", "green"),
    )
    example = Conversation(id="rows:0", messages=messages)
    group = demonstration_group(0, "data", example, template, RecordedRules(max_length=2048))
    (rollout,) = group.rollouts
    assert not group.errors and len(rollout.branches) == 2 and len(rollout.path_images) == 4
    of_branches = [[image.digest for turn in branch.turns for image in turn.images] for branch in rollout.branches]
    assert of_branches == [[], []], "they are read on the main path, which the branches leave after them"
    for share, seen in ((True, [4]), (False, [4, 1, 3])):
        batch = pack([group], share_prefixes=share)
        assert len(batch.images) == sum(seen)
        assert all(processor.image_token_id in batch.tokens[image.start : image.end] for image in batch.images)


def test_the_token_of_an_image_in_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 places for images.*and 1 images"):
        make_template("llava").encode_with_images([question(draw_image(1), text="what does <image> stand for?")])


def test_a_model_of_text_refuses_images() -> None:
    with pytest.raises(ValueError, match="the policy reads only text"):
        ChatTemplate(build_vision_tokenizer("llava")).encode_with_images([question(draw_image(1))])


def test_an_image_is_read_from_wherever_it_is(tmp_path: Path) -> None:
    file = draw_image(4)
    (tmp_path / "a.png").write_bytes(file)
    picture = decode_image(file)
    assert read_image(Image("a.png"), folder=tmp_path) == file
    assert read_image(f"file://{tmp_path}/a.png") == file
    assert read_image(as_data_url(file)) == file
    assert read_image({"bytes": file, "path": None}) == file
    assert read_image({"bytes": None, "path": str(tmp_path / "a.png")}) == file
    assert decode_image(read_image(picture)).tobytes() == picture.tobytes()
    assert decode_image(encode_image(picture)).tobytes() == picture.tobytes()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/cat.png", "is a URL.*allow_addresses=true"),
        ("nowhere/cat.png", "cannot be read: No such file"),
        ("data:image/png;base64,###", "cannot be decoded"),
        (b"no image", "has an unsupported format"),
        (7, "it must be a path"),
    ],
    ids=["address", "missing", "url", "bytes", "number"],
)
def test_an_image_that_cannot_be_read_says_why(source: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        read_image(source)


def test_an_image_that_claims_to_be_huge_is_refused() -> None:
    from PIL import Image as Pillow

    memory = io.BytesIO()
    Pillow.new("1", (10_000, 8_000)).save(memory, "PNG")
    with pytest.raises(ImageError, match="10000 x 8000 pixels"):
        read_image(memory.getvalue())


def test_transparency_is_white() -> None:
    from PIL import Image as Pillow

    memory = io.BytesIO()
    Pillow.new("RGBA", (2, 2), (255, 0, 0, 0)).save(memory, "PNG")
    assert decode_image(memory.getvalue()).getpixel((0, 0)) == (255, 255, 255)
    assert base64.b64decode(as_data_url(memory.getvalue()).partition(",")[2]) == memory.getvalue()


def test_a_processor_is_loaded_from_a_folder_with_other_settings(tmp_path: Path) -> None:
    folder = save_vision_model("qwen3_vl", tmp_path)
    from transformers import AutoConfig

    config, tokenizer = AutoConfig.from_pretrained(folder), build_vision_tokenizer("qwen3_vl")
    plain = load_vision_processor(str(folder), config, tokenizer)
    smaller = load_vision_processor(str(folder), config, tokenizer, options={"max_pixels": 32 * 32 * 2})
    file = draw_image(1, 200, 200)
    counts = [each.family.count_rows(each.pixels(file)) for each in (plain, smaller)]
    assert counts == [16, 1]


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "llava",
            {"max_pixels": 10_000},
            r"policy\.image_processor\.max_pixels: models of type llava read images of fixed sizes",
        ),
        ("qwen3_vl", {"do_resiz": False}, r"policy\.image_processor\.options\.do_resiz: .* has no such setting"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan, which cuts an image into several"),
    ],
    ids=["fixed size", "unknown setting", "pan and scan"],
)
def test_a_setting_that_cannot_work_is_refused(family: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    FAMILIES[family].image_processor().save_pretrained(tmp_path)
    make_vision_config(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        find_vision_processor(str(tmp_path), make_vision_config(family), build_vision_tokenizer(family), options=options)


def test_a_model_without_an_image_processor_or_of_another_family_reads_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, tokenizer = make_vision_config("llava"), build_vision_tokenizer("llava")
    config.save_pretrained(tmp_path)
    assert find_vision_processor(str(tmp_path), config, tokenizer) is None
    assert "has no image processor" in caplog.text
    config.model_type = "unheard_of"
    assert find_vision_processor(str(tmp_path), config, tokenizer) is None
    assert "models of type 'unheard_of' read images in a way that Strop does not know" in caplog.text
    assert find_vision_processor(str(tmp_path), config.text_config, tokenizer) is None


def test_the_pixels_of_an_image_are_made_once_and_old_ones_make_room() -> None:
    made: list[str] = []

    def make(name: str, size: int = 100) -> dict[str, Any]:
        made.append(name)
        return {"pixel_values": torch.zeros(size, dtype=torch.uint8)}

    cache = PixelCache(limit=250)
    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get(name, partial(make, name))
    assert made == ["a", "b", "c", "b"], "b had to make room for c"
    assert pickle.loads(pickle.dumps(cache)).limit == 250


class StrangerVL(VisionFamily):
    """A family of another package: an image is two tokens."""

    def placeholder(self, tokenizer: Any) -> str:
        return self.image_token(tokenizer)

    def write(self, pixels: Pixels, tokenizer: Any) -> str:
        return self.image_token(tokenizer) * self.count_rows(pixels)

    def count_rows(self, pixels: Pixels) -> int:
        return 2


def test_a_family_of_another_package_is_found_by_its_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("stranger_vl", f"{__name__}:StrangerVL", "strop.vision_families")
    config = make_vision_config("llava")
    config.model_type = "stranger_vl"
    with pytest.raises(UnknownFamily, match="'stranger_vl' read images in a way"):
        find_family(config)
    monkeypatch.setattr(plugins, "declared", lambda group: {point.name: point} if group == "vision_families" else {})
    assert type(find_family(config)) is StrangerVL
    processor = VisionProcessor(find_family(config), FAMILIES["llava"].image_processor(), build_vision_tokenizer("llava"))
    template = ChatTemplate(processor.tokenizer, vision=processor)
    (image,) = template.encode_with_images([question(draw_image(0))]).images
    assert image.length == 2
