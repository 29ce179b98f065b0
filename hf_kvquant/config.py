"""KVQuantConfig: what a cache stores, frozen and self-validating.

Decision: a configuration is plain data that round-trips through JSON. Defaults follow KIVI (Liu et al. 2024, arXiv
2402.02750, section 3): keys per channel, values per token, a full-precision window; plus the first tokens kept exact
(attention sinks, Xiao et al. 2023, arXiv 2309.17453).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_kvquant.spec import TensorSpec, check_int, fields_from, invalid

DEFAULT_BLOCK_LENGTH = 64


@dataclass(frozen=True)
class LayerOverride:
    """What one layer stores differently.

    Attributes:
        key: format of its keys; None: as the whole cache.
        value: format of its values; None: as the whole cache.

    Raises:
        ValueError: something else than a ``TensorSpec`` or None.
    """

    key: TensorSpec | None = None
    value: TensorSpec | None = None

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            spec = getattr(self, name)
            if spec is not None and not isinstance(spec, TensorSpec):
                raise invalid(name, spec, "it must be a TensorSpec or None")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "LayerOverride") -> LayerOverride:
        """From the fields in ``data``; ``where`` names them in an error.

        Raises:
            ValueError: no mapping, an unknown field, or one that is not valid.
        """
        fields = fields_from(cls, data, where)
        specs = {name: None if spec is None else TensorSpec.from_dict(spec, name) for name, spec in fields.items()}
        return cls(**specs)


@dataclass(frozen=True)
class KVQuantConfig:
    """A cache format.

    Attributes:
        key: how keys are stored in closed blocks.
        value: how values are.
        residual_length: the newest tokens of each row, at least this many, stay in full precision (the residual
            window).
        sink_length: the first tokens of each row that stay in full precision and out of all ranges.
        pre_rope: store keys before RoPE; the model must be attached (``with attach(model): ...``).
        calibration_length: tokens after the sinks whose statistics serve ``center``, ``normalize`` and ``widths``. A
            row closes no block before it holds them, so shorter sequences stay exact.
        layers: overrides by layer index.

    Raises:
        ValueError: a field that is not valid; the message names field, value and what is allowed.

    Source: keys per channel, values per token, residual window from KIVI (Liu et al. 2024, arXiv 2402.02750, section
    3); ``sink_length`` from attention sinks (Xiao et al. 2023, arXiv 2309.17453); ``pre_rope`` from KVQuant (Hooper et
    al. 2024, arXiv 2401.18079, section 3.2).
    """

    key: TensorSpec = field(default_factory=TensorSpec)
    value: TensorSpec = field(default_factory=lambda: TensorSpec(axis="token"))
    residual_length: int = 128
    sink_length: int = 4
    pre_rope: bool = False
    calibration_length: int = 128
    layers: Mapping[int, LayerOverride] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            if not isinstance(getattr(self, name), TensorSpec):
                raise invalid(name, getattr(self, name), "it must be a TensorSpec")
        check_int("residual_length", self.residual_length, 0, "it must be an integer of at least 0")
        if not isinstance(self.pre_rope, bool):
            raise invalid("pre_rope", self.pre_rope, "choose True or False")
        check_int("sink_length", self.sink_length, 0, "it must be an integer of at least 0")
        check_int("calibration_length", self.calibration_length, 8, "it must be an integer of at least 8")
        if self.value.center == "rope":
            raise invalid("value", "center='rope'", "values carry no rotation; choose 'plain' or None")
        self._check_layers()

    def _check_layers(self) -> None:
        if not isinstance(self.layers, Mapping):
            raise invalid("layers", self.layers, "it must map layer indices to LayerOverride")
        object.__setattr__(self, "layers", dict(self.layers))  # not the caller's
        for index, override in self.layers.items():
            check_int("layers", index, 0, "a layer index must be an integer of at least 0")
            if not isinstance(override, LayerOverride):
                raise invalid(f"layers[{index}]", override, "it must be a LayerOverride")
            self.for_layer(index)

    def for_layer(self, index: int) -> KVQuantConfig:
        """The configuration of layer ``index``, its override applied."""
        override = self.layers.get(index)
        if override is None:
            return replace(self, layers={}) if self.layers else self
        return replace(self, key=override.key or self.key, value=override.value or self.value, layers={})

    @functools.cached_property
    def needs_attach(self) -> bool:
        """Whether some layer stores what only an attached model shows: the rotation of the keys."""
        keys = (self.key, *(override.key for override in self.layers.values()))
        return self.pre_rope or any(key is not None and key.center == "rope" for key in keys)

    @functools.cached_property
    def uses_queries(self) -> bool:
        """Whether the statistics of the keys weigh channels by the queries (without overrides)."""
        return self.key.normalize and self.key.center == "rope"

    @property
    def needed_tokens(self) -> int:
        """Tokens after the sinks that a row must hold before its first block closes (without overrides)."""
        return self.calibration_length if self.key.calibrates or self.value.calibrates else 0

    @property
    def block_length(self) -> int:
        """Tokens in a block: a whole number of groups of both keys and values (64 where neither groups along
        tokens)."""
        sizes = [spec.tokens_per_group for spec in (self.key, self.value) if spec.axis != "token"]
        return math.lcm(*sizes) if sizes else DEFAULT_BLOCK_LENGTH

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data, layer indices as text: what JSON can hold."""
        data = dataclasses.asdict(replace(self, layers={}))
        return data | {"layers": {str(index): dataclasses.asdict(each) for index, each in self.layers.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVQuantConfig:
        """From the fields in ``data``, as ``to_dict`` gives them; those left out keep their defaults.

        Raises:
            ValueError: no mapping, an unknown field, or one that is not valid.
        """
        fields = fields_from(cls, data, "KVQuantConfig")
        for name in ("key", "value"):
            if name in fields:
                fields[name] = TensorSpec.from_dict(fields[name], where=name)
        if isinstance(fields.get("layers"), Mapping):
            fields["layers"] = {
                int(index) if str(index).isascii() and str(index).isdigit() else index: LayerOverride.from_dict(
                    each, f"layers[{index}]"
                )
                for index, each in fields["layers"].items()
            }
        return cls(**fields)

    def to_json(self) -> str:
        """``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> KVQuantConfig:
        """From the JSON ``text`` that ``to_json`` gives.

        Raises:
            ValueError: not JSON, or as ``from_dict`` raises.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"KVQuantConfig: not valid JSON ({error}); pass what to_json() writes") from error
        return cls.from_dict(data)
