"""Configurations validate themselves and round-trip."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvquant import PRESETS, KVQuantConfig, TensorSpec
from hf_kvquant.formats import FORMATS
from hf_kvquant.presets import resolve
from hf_kvquant.scales import SCALE_FORMATS, ZERO_FORMATS
from hf_kvquant.spec import AXES

INTEGERS = [name for name, fmt in FORMATS.items() if fmt.kind == "affine"]


CM2, CM3 = ((4, 20), (2, 24), (0, 20)), ((8, 4), (4, 32), (2, 16), (0, 12))


@st.composite
def specs(draw, name: str | None = None, plain: bool = False) -> TensorSpec:
    """Any valid spec without rotation tables, of one format if named; ``plain``: no statistics of the first tokens."""
    fmt = name or draw(st.sampled_from(sorted(FORMATS)))
    axis = draw(st.sampled_from(AXES))
    size = draw(st.one_of(st.none(), st.integers(1, 300))) if axis == "token" else 8 * draw(st.integers(1, 16))
    number_format = FORMATS[fmt]
    fields: dict = {"format": fmt, "axis": axis, "group_size": size}
    if number_format.lossless:
        return TensorSpec(**fields)
    fields["symmetric"] = draw(st.sampled_from([None, True] if number_format.only_symmetric else [None, True, False]))
    if not plain:
        fields["center"] = draw(st.sampled_from([None, None, "plain"]))
        fields |= draw(st.sampled_from([{}, {}, {"rotation": "hadamard"}, {"normalize": True}]))
        mixed = {"midrise4": CM2, "midrise8": CM3}.get(fmt)
        if mixed and not fields.get("rotation") and draw(st.booleans()):
            return TensorSpec(fmt, "token", None, scale_format="log2_8", center=fields["center"], widths=mixed)
    fields["clip"] = draw(st.sampled_from([None, "minmax", "mse", 0.95]))
    fields["scale_format"] = draw(st.sampled_from(sorted(set(SCALE_FORMATS) - {"static"})))
    if not (fields["symmetric"] or number_format.only_symmetric):
        fields["zero_format"] = draw(st.sampled_from([None, *ZERO_FORMATS]))
    return TensorSpec(**fields)


@given(specs(), specs(), st.integers(0, 500), st.integers(0, 16))
def test_round_trip(key, value, window, sinks) -> None:
    config = KVQuantConfig(key, value, window, sinks)
    assert KVQuantConfig.from_json(config.to_json()) == config
    assert KVQuantConfig.from_dict(config.to_dict()) == config
    for spec in (key, value):
        if spec.axis != "token" and not spec.number_format.lossless:
            assert config.block_length % spec.tokens_per_group == 0
    assert config.block_length % 8 == 0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_round_trip_and_say_when_to_use_them(name) -> None:
    assert KVQuantConfig.from_json(PRESETS[name].config.to_json()) == PRESETS[name].config
    assert resolve(name) is PRESETS[name].config
    assert len(PRESETS[name].description) > 20


def test_defaults() -> None:
    config = KVQuantConfig()
    assert config == PRESETS["k4v4"].config == resolve(None)
    assert (config.key.format, config.key.axis, config.key.group_size) == ("int4", "channel", 64)
    assert (config.value.format, config.value.axis, config.value.group_size) == ("int4", "token", 64)
    assert (config.residual_length, config.sink_length, config.block_length) == (128, 4, 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "int5"}, r"format='int5' is not valid: choose one of none, int2, int3, int4, int8, fp8_e4m3"),
        ({"format": 4}, "format=4 is not valid"),
        ({"axis": "row"}, "axis='row' is not valid: choose one of channel, token, head, tensor"),
        ({"group_size": 0}, "group_size=0 is not valid"),
        ({"group_size": 12}, "group_size=12 is not valid: .*multiple of 8"),
        ({"group_size": 64.0}, "group_size=64.0 is not valid"),
        ({"group_size": True}, "group_size=True is not valid"),
        ({"symmetric": "yes"}, "symmetric='yes' is not valid"),
        (
            {"format": "fp8_e4m3", "symmetric": False},
            "symmetric=False is not valid: format 'fp8_e4m3' has no zero point",
        ),
        ({"scale_format": "bf16"}, "scale_format='bf16' is not valid: choose one of fp16, fp32"),
    ],
)
def test_bad_specs(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        TensorSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key": "int4"}, "key='int4' is not valid: it must be a TensorSpec"),
        ({"residual_length": -1}, "residual_length=-1 is not valid"),
        ({"sink_length": 1.5}, "sink_length=1.5 is not valid"),
    ],
)
def test_bad_configs(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        KVQuantConfig(**fields)


def test_bad_sources() -> None:
    with pytest.raises(ValueError, match="preset='k5v5' is not valid: choose one of none, fp8"):
        resolve("k5v5")
    with pytest.raises(
        ValueError,
        match="KVQuantConfig='window' is not valid: unknown field; known fields are calibration_length, key, layers",
    ):
        KVQuantConfig.from_dict({"window": 3})
    with pytest.raises(ValueError, match="key='bits' is not valid: unknown field"):
        KVQuantConfig.from_dict({"key": {"bits": 3}})
    with pytest.raises(ValueError, match="not valid JSON"):
        KVQuantConfig.from_json("{")
    with pytest.raises(ValueError, match="must be a mapping"):
        KVQuantConfig.from_json("[]")


def test_configs_are_frozen_and_comparable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVQuantConfig().residual_length = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert TensorSpec("int4", symmetric=None) == TensorSpec("int4", symmetric=False)
    assert hash(KVQuantConfig()) == hash(KVQuantConfig())


@pytest.mark.parametrize(
    ("head_dim", "asked", "used"),
    [(64, 64, 64), (80, 64, 40), (96, 64, 48), (112, 64, 56), (128, 64, 64), (7, 64, 7), (40, 32, 20)],
)
def test_channel_groups_are_the_largest_divisor(head_dim, asked, used) -> None:
    assert TensorSpec(axis="token", group_size=asked).channels_per_group(head_dim) == used
