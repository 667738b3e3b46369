"""Renders a kustomization as `kubectl kustomize` does, for the features that `deploy/kubernetes` uses.

Other features raise, so that nothing is silently ignored. `test_kubernetes.py` compares it with kubectl, if installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "namespace", "labels", "resources", "components", "patches"}
_WITHOUT_NAMESPACE = {"Namespace"}
# Lists that patches merge by this key; all other lists are replaced.
_MERGE_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def build(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization, in no particular order."""
    return _applied(folder, [])


def _applied(folder: Path, manifests: list[Manifest]) -> list[Manifest]:
    (told,) = _read(folder / "kustomization.yaml")
    unknown = told.keys() - _KNOWN
    assert not unknown, f"{folder}: this renderer does not know {unknown}"
    for name in told.get("resources", ()):
        path = folder / name
        manifests += build(path) if path.is_dir() else _read(path)
    for name in told.get("components", ()):
        manifests = _applied(folder / name, manifests)
    for patch in told.get("patches", ()):
        assert patch.keys() == {"path"}, f"{folder}: patches are files here, got {patch}"
        manifests = _patched(manifests, *_read(folder / patch["path"]))
    for label in told.get("labels", ()):
        assert label.keys() == {"pairs", "includeTemplates"}
        for each in manifests:
            _label(each, label["pairs"])
    for each in manifests:
        if "namespace" in told and each["kind"] not in _WITHOUT_NAMESPACE:
            each["metadata"]["namespace"] = told["namespace"]
    return manifests


def _read(path: Path) -> list[Any]:
    return list(yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader))  # ten times as fast as in Python


def _label(manifest: Manifest, pairs: dict[str, str]) -> None:
    manifest["metadata"].setdefault("labels", {}).update(pairs)
    if "template" in manifest.get("spec", {}):
        manifest["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {}).update(pairs)


def _patched(manifests: list[Manifest], patch: Manifest) -> list[Manifest]:
    (target,) = [each for each in manifests if _named(each) == _named(patch)]
    return [_merged(each, patch) if each is target else each for each in manifests]


def _named(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _merged(value: Any, patch: Any, key: str = "") -> Any:
    """A strategic merge patch. key: the field that holds both values."""
    if isinstance(value, dict) and isinstance(patch, dict):
        return {**value, **{name: _merged(value.get(name), each, name) for name, each in patch.items()}}
    if isinstance(value, list) and isinstance(patch, list) and key in _MERGE_KEYS:
        merge_key = _MERGE_KEYS[key]
        patches = {each[merge_key]: each for each in patch}
        kept = [_merged(each, patches.pop(each[merge_key], {})) for each in value]
        return [*patches.values(), *kept]
    return patch
