"""`verify_config` over every configuration of data/models/configurations.csv and every kind of target."""

import copy
import importlib
from collections.abc import Mapping

import pytest
import torch

from ropelab import reference, rope_from_config
from ropelab.angles.model_config import stated
from ropelab.conformance.configuration import verify_config
from tests.models import rotary_classes, tables

pytest.importorskip("transformers")
TABLE = [row for row in tables.read("configurations.csv") if row["outcome"] == "equal"]
ROWS = 256
"""The length of every model here: a table of a million rows has no other frequencies."""

LENGTH = {"original_max_position_embeddings": 64}
RAMP = LENGTH | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SECTIONS = {"mrope_section": [8, 12, 12]}
FACTORS = {"short_factor": [1.5] * 32, "long_factor": [float(pair + 1) for pair in range(32)]}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0} | LENGTH,
    "yarn with axes": {"rope_type": "yarn", "factor": 4.0} | LENGTH | SECTIONS,
    "llama3": {"rope_type": "llama3", "factor": 4.0} | RAMP,
    "longrope": {"rope_type": "longrope"} | LENGTH | FACTORS,
}
"""What no default configuration has."""


def misread(config):
    """The configuration with bases that are three times as large."""
    if isinstance(config, Mapping):
        return _other_bases(config)
    other = copy.deepcopy(config)
    if getattr(config, "rope_parameters", None) is not None:
        other.rope_parameters = _other_bases(config.rope_parameters)
    if getattr(config, "rope_theta", None) is not None:
        other.rope_theta = 3 * config.rope_theta
    return other


def _other_bases(parameters):
    return {
        key: _other_bases(value) if isinstance(value, Mapping) else 3 * value if key == "rope_theta" else value
        for key, value in parameters.items()
    }


def configurations():
    """Model type, configuration, type of layers, rotation and rotary class of each row of the table."""
    for row in TABLE:
        layer_type = row["layer_type"] or None
        code = importlib.import_module(f"transformers.models.{row['architecture']}.modeling_{row['architecture']}")
        for config in rotary_classes.configurations(row["architecture"]):
            if config.model_type == row["model_type"] and not hasattr(config, "text_config"):
                if getattr(config, "max_position_embeddings", None) is not None:
                    config.max_position_embeddings = ROWS
                rope = rope_from_config(config, layer_type=layer_type)
                yield row["model_type"], config, layer_type, rope, getattr(code, row["rotary_class"])
                break


@pytest.mark.parametrize("wrong", [False, True])
def test_the_rotary_class_of_every_model(wrong):
    unexpected, seen = [], 0
    for name, config, layer_type, _, rotary_class in configurations():
        made = misread(config) if wrong else config

        class Rotary(rotary_class):
            def __init__(self, given, made=made):
                super().__init__(made)

        for target in (rotary_class(made), Rotary):
            report = verify_config(config, target, layer_type=layer_type, name=name)
            seen += 1
            if report.verdict != ("wrong" if wrong else "right"):
                unexpected.append(str(report))
    assert not unexpected and seen > 400, "\n".join(unexpected)


def targets(rope, config, layer_type):
    """Kind -> the rotation of a configuration."""
    theta, factor = rope.inverse_frequencies, rope.attention_factor
    angles = torch.arange(rope.max_seq_len or ROWS)[:, None] * theta
    cos, sin = ((factor * wave).float() for wave in (angles.cos(), angles.sin()))
    axes = [0] * len(theta) if rope.axes is None else list(rope.axes)

    def function(positions):
        theta = rope.at_length(int(positions.max()) + 1).inverse_frequencies
        angles = positions.reshape(-1, positions.shape[-1])[axes].T * theta
        return factor * angles.cos(), factor * angles.sin()

    def rotation(x, positions):
        layouts = {"layout": rope.layout, "out_layout": rope.out_layout, "rotary_slice": rope.rotary_slice}
        return reference.rotate(x.double(), *function(positions), **layouts).float()

    found = {
        "frequencies": theta.float(),
        "pair": (cos, sin),
        "a column for each feature": (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)),
        "cache": torch.cat((cos, sin), -1),
        "complex": torch.complex(cos, sin),
        "dict": {"cos": cos, "sin": sin},
        "Rope": rope,
        "function": function,
        "rotation": rotation,
    }
    _, parameters = stated(config, layer_type)
    images = parameters.get("rope_type") == "axial" or rope.axes and "mrope_section" not in parameters
    if not images and not rope.first_feature and (theta >= 0).all():  # else no arguments of vLLM's say so
        parameters = dict(parameters)
        if parameters.get("rope_type") != "proportional":
            parameters.pop("partial_rotary_factor", None)
        if rope.axes:
            parameters["mrope_interleaved"] = list(rope.axes) != sorted(rope.axes)
        found["description"] = {
            "head_size": rope.head_dim, "rotary_dim": rope.rotary_dim, "max_position": rope.max_seq_len or ROWS,
            "is_neox_style": rope.layout == "split_half", "rope_parameters": parameters,
        }  # fmt: skip
    return found


def rotations():
    """The configurations, each rotation once, and scaled ones."""
    for name, parameters in SCALED.items():
        config = {"head_dim": 64, "max_position_embeddings": ROWS, "rope_parameters": {"rope_theta": 1e4} | parameters}
        yield name, config, None, rope_from_config(config)
    known = set()
    for name, config, layer_type, rope, _ in configurations():
        about = rope.layout, rope.out_layout, rope.head_dim, rope.first_feature, rope.axes, rope.attention_factor
        key = *about, str(stated(config, layer_type)[1]), rope.inverse_frequencies.numpy().tobytes()
        if key not in known:
            known.add(key)
            yield name, config, layer_type, rope


@pytest.mark.parametrize("wrong", [False, True])
def test_every_configuration_against_every_kind_of_target(wrong):
    unexpected, structures, seen = [], set(), 0
    for name, config, layer_type, rope in rotations():
        if wrong:
            rope = rope_from_config(misread(config), layer_type=layer_type)
        for kind, target in targets(rope, misread(config) if wrong else config, layer_type).items():
            if kind == "rotation":  # which takes hundreds of calls
                structure = rope.layout, rope.out_layout, rope.first_feature, rope.axes and max(rope.axes)
                if structure in structures:
                    continue
                structures.add(structure)
            report = verify_config(config, target, layer_type=layer_type, name=f"{name}, {kind}")
            seen += 1
            if report.verdict != ("wrong" if wrong else "right"):
                unexpected.append(str(report))
    assert not unexpected and seen > 800 and len(structures) > 5, "\n".join(unexpected)
