"""The example of a target that reads images, with a processor of transformers' own."""

import sys
from pathlib import Path

import pytest
import torch
import typer
from models import with_clear_preferences
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import images

POCKET = Path(images.__file__).parent / "pocket"
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    """A tiny random model with the pocket pair's tokens, one more for images, and a processor."""
    folder = tmp_path_factory.mktemp("llava")
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 8, "width": 8}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    place = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={"model_type": "llama", "vocab_size": len(tokenizer), **TEXT},
            vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **TEXT},
            image_token_index=place,
            image_token_id=place,
        )
    )
    with_clear_preferences(model).save_pretrained(folder)
    return str(folder)


def test_two_images(target, tmp_path):
    words = ["--target", target, "--drafter", str(POCKET / "drafter"), "--max-new-tokens", "20"]
    for number in range(2):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (12, 10), (200 * number, 90, 30)).save(path)
        words += ["--image", str(path)]
    app = typer.Typer()
    app.command()(images.main)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "tokens after" in result.output and "the same text." in result.output
