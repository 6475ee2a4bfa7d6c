"""Arguments that are made up for a model of transformers: what its config says, by hand. The configs are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopmeter.models.hub_inputs import TargetError, inputs_of

BF16 = torch.bfloat16


def config_of(**fields: Any) -> SimpleNamespace:
    config = SimpleNamespace(**{"is_encoder_decoder": False, "model_type": "any", "vocab_size": 50_000, **fields})
    config.get_text_config = lambda **_: config
    return config


class TextModel:
    main_input_name = "input_ids"

    def forward(self, input_ids: Any, attention_mask: Any = None) -> None: ...


class Decoder(TextModel):
    def forward(self, input_ids: Any, decoder_input_ids: Any = None) -> None: ...  # type: ignore[override]


class TextAndImage(TextModel):
    def forward(self, input_ids: Any, pixel_values: Any = None) -> None: ...  # type: ignore[override]


class Vision:
    main_input_name = "pixel_values"

    def forward(self, pixel_values: Any) -> None: ...


class Speech:
    main_input_name = "input_features"

    def forward(self, input_features: Any, decoder_input_ids: Any = None) -> None: ...


class Waves:
    main_input_name = "input_values"

    def forward(self, input_values: Any) -> None: ...


def made(model: type, *, batch: int = 2, seq: int | None = None, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = inputs_of(model(), config_of(**fields), batch, seq, BF16)
    return found


def shapes(model: type, **options: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in made(model, **options).items()}


@pytest.mark.parametrize(
    ("vocabulary", "row"), [(50_000, [5, 6, 7, 8]), (8, [5, 6, 7, 5]), (6, [5, 5, 5, 5]), (3, [2, 2, 2, 2])]
)
def test_ids_are_of_the_vocabulary_and_distinct_as_far_as_it_reaches(vocabulary: int, row: list[int]) -> None:
    """The first five are padding and marks in most vocabularies, where it has more."""
    found = made(TextModel, seq=4, vocab_size=vocabulary)
    assert found["input_ids"].tolist() == [row, row]
    assert found["attention_mask"].tolist() == [[1] * 4] * 2


@pytest.mark.parametrize(
    ("fields", "seq", "length"),
    [
        ({}, None, 512),
        ({}, 2000, 2000),
        ({"max_position_embeddings": 128}, None, 128),
        ({"max_position_embeddings": 4096}, None, 512),
        ({"max_position_embeddings": 4096}, 4096, 4096),
        ({"max_target_positions": 448}, None, 448),
        ({"max_position_embeddings": None, "max_target_positions": 448}, 7, 7),
        ({"max_position_embeddings": -1}, 3000, 3000),  # as of models without positions
    ],
)
def test_a_text_has_the_tokens_that_are_asked_for_or_512_where_there_are_as_many_positions(
    fields: dict[str, Any], seq: int | None, length: int
) -> None:
    assert shapes(TextModel, seq=seq, **fields)["input_ids"] == (2, length)


@pytest.mark.parametrize("name", ["max_position_embeddings", "max_target_positions"])
def test_more_tokens_than_positions_are_refused_by_the_name_of_the_field(name: str) -> None:
    with pytest.raises(TargetError, match=f"seq 129 is beyond the model's 128 positions \\({name}"):
        made(TextModel, seq=129, **{name: 128})
    with pytest.raises(TargetError, match="the config of any has no vocab_size"):
        made(TextModel, vocab_size=0)


@pytest.mark.parametrize(
    ("fields", "image"),
    [
        ({}, (3, 224, 224)),
        ({"image_size": 384, "num_channels": 1}, (1, 384, 384)),
        ({"image_size": [3, 256, 128]}, (3, 256, 128)),
        ({"image_size": (64, 32)}, (3, 64, 32)),
        ({"image_size": 384, "vision_config": SimpleNamespace(image_size=336, num_channels=4)}, (4, 336, 336)),
    ],
)
def test_an_image_is_as_large_as_the_config_of_its_model_says(fields: dict[str, Any], image: tuple[int, ...]) -> None:
    assert shapes(Vision, batch=5, **fields) == {"pixel_values": (5, *image)}
    found = made(Vision, **fields)["pixel_values"]
    assert (found.dtype, found.device.type) == (BF16, "meta")


def test_a_text_beside_an_image_gets_both_unless_images_are_tokens_of_it() -> None:
    assert shapes(TextAndImage, seq=4, image_size=32) == {"input_ids": (2, 4), "pixel_values": (2, 3, 32, 32)}
    for name in ("image_token_id", "image_token_index", "boi_token_id"):
        assert shapes(TextAndImage, seq=4, **{name: 7}) == {"input_ids": (2, 4)}


def test_a_decoder_gets_the_ids_of_its_encoder_in_a_tensor_of_its_own() -> None:
    found = made(Decoder, seq=4, is_encoder_decoder=True)
    assert found.keys() == {"input_ids", "decoder_input_ids"}
    assert torch.equal(found["decoder_input_ids"], found["input_ids"])
    assert found["decoder_input_ids"].data_ptr() != found["input_ids"].data_ptr()
    assert made(Decoder, seq=4).keys() == {"input_ids"}


@pytest.mark.parametrize(
    ("model", "fields", "sound"),
    [
        (
            Speech,
            {"num_mel_bins": 80, "max_source_positions": 1500},
            (80, 3000),
        ),  # Whisper: 30 s
        (Waves, {"num_mel_bins": 128, "time_stride": 10, "max_length": 1024}, (1024, 128)),
        (Waves, {"conv_stride": (5, 2)}, (160_000,)),  # 10 s
        (Waves, {"conv_stride": (5, 2), "sampling_rate": 8000}, (80_000,)),
    ],
)
def test_sound_is_a_spectrogram_or_samples_as_the_kind_of_model_takes_it(
    model: type, fields: dict[str, Any], sound: tuple[int, ...]
) -> None:
    found = made(model, **fields)
    (value,) = found.values()
    assert (found.keys(), tuple(value.shape), value.dtype) == ({model.main_input_name}, (2, *sound), BF16)  # type: ignore[attr-defined]


def test_a_speech_model_that_writes_text_gets_as_many_ids_as_are_asked_for() -> None:
    fields = {"num_mel_bins": 80, "max_source_positions": 1500, "is_encoder_decoder": True}
    assert shapes(Speech, seq=6, **fields) == {"input_features": (2, 80, 3000), "decoder_input_ids": (2, 6)}


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (Vision, {}, "Vision takes images, no seq"),
        (Waves, {"conv_stride": (5, 2)}, "Waves takes sound, no seq"),
        (Speech, {"num_mel_bins": 80}, "takes input_features, which flopmeter does not make up"),
        (Waves, {}, "takes input_values, which flopmeter does not make up: write a function"),
    ],
)
def test_what_no_config_describes_is_refused(model: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        made(model, seq=4, **fields)


def test_ids_are_distinct_as_far_as_a_thousand_go_and_the_same_in_each_row() -> None:
    ids = made(TextModel, seq=1002)["input_ids"]
    assert ids[0].tolist() == [*range(5, 1005), 5, 6]
    assert torch.equal(ids[0], ids[1])
    assert made(TextModel, seq=4, vocab_size=7)["input_ids"][0].tolist() == [5, 6, 5, 6]
