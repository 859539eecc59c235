"""Assembling one manifest from every rank's report on its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.errors import CheckpointError
from zero.files.manifest import CHECKSUM_BLOCK, LARGEST_MANIFEST, Manifest, seal, unescape, unseal


def assemble(described: Mapping[str, Any], reports: list[dict[str, Any]]) -> bytes:
    """The sealed manifest, which is also read back: one that could not be loaded must not be published.

    described: members that are known once. reports: of the ranks, each with what only it can describe.
    """
    own = [report.get("described", {}) for report in reports]
    described = {
        **described,
        "parameters": _joined(_listed("parameters", described, own)),
        "left_out": list(dict.fromkeys(_listed("left_out", described, own))),
        "buffers": _listed("buffers", described, own),
        "extra_state": dict(
            pair for each in (described, *own) for pair in each.get("extra_state", {}).items()
        ),
    }
    tensors: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, report in enumerate(reports):
        for key, (dtype, shape, stride, piece) in report["tensors"].items():
            entry = tensors.setdefault(key, {"dtype": dtype, "shape": shape, "stride": stride, "slices": []})
            if piece is not None:
                entry["slices"].append([number, *piece])
        for name, entries in report["values"].items():
            values.setdefault(name, {}).update(entries)
    for entry in tensors.values():
        entry["slices"].sort(key=lambda piece: piece[1])
    parameters = _with_state(described["parameters"], tensors, values)
    members = {
        **described,
        "block_bytes": CHECKSUM_BLOCK,
        "parameters": parameters,
        "ranks": [{"rng": r["rng"], "state": r["state"]} for r in reports],
        "files": [r["file"] for r in reports],
        "tensors": tensors,
    }
    data = seal("zero-checkpoint", members)
    if len(data) > LARGEST_MANIFEST:
        raise CheckpointError(
            f"this job's manifest would have {len(data):,} bytes, and at most {LARGEST_MANIFEST:,} are read; "
            "save less in `state`, or from fewer ranks"
        )
    try:
        Manifest.model_validate_json(unseal("zero-checkpoint", data))
    except ValueError as error:
        told = " ".join(str(error).split())
        raise CheckpointError(f"this job's state does not form a valid checkpoint: {told}") from error
    return data


def _listed(kind: str, described: Mapping[str, Any], own: list[dict[str, Any]]) -> list[Any]:
    return [entry for each in (described, *own) for entry in each.get(kind, ())]


def _joined(parameters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One description of each parameter, with its blocks, of which several ranks describe one each."""
    found: dict[str, dict[str, Any]] = {}
    twice = []
    for each in parameters:
        first = found.setdefault(each["name"], each)
        if first is each:
            continue
        if not each.get("blocks") or {**first, "blocks": []} != {**each, "blocks": []}:
            twice.append(each)  # which makes no valid checkpoint
        else:
            found[each["name"]] = {**first, "blocks": [*first["blocks"], *each["blocks"]]}
    return [*found.values(), *twice]


def _with_state(
    parameters: list[dict[str, Any]], tensors: Mapping[str, Any], values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    keys: dict[str, list[str]] = {}
    for key in tensors:
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            state, _, name = rest.partition("/")
            keys.setdefault(name, []).append(unescape(state))

    def state_of(parameter: Mapping[str, Any]) -> list[str]:
        name = parameter["name"]
        names = [name, *(name + block["at"] for block in parameter.get("blocks", ()))]
        return sorted({key for each in names for key in keys.get(each, ())})

    return [{**p, "state": state_of(p), "values": values.get(p["name"], {})} for p in parameters]
