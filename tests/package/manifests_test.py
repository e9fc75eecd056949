"""Checks the manifests in examples/cluster/ against the schemas of what they are for.

    python manifests_test.py EXAMPLES [PYTHON]

PYTHON is one that has the packages, where this one has not.
Kubernetes' objects: strictly, by the JSON schemas of the Python package kubernetes-validate. Kubeflow's PyTorchJob: by the
models of kubeflow-training, and its pods by Kubernetes' schema. Ends with code 77 (skipped) without these packages.
"""

import os
import pathlib
import sys

try:
    import kubernetes_validate
    import yaml
    from kubeflow.training import models
except ImportError as error:
    if len(sys.argv) > 2 and os.access(sys.argv[2], os.X_OK):
        os.execv(sys.argv[2], [sys.argv[2], *sys.argv[:2]])
    print("skipped:", error)
    sys.exit(77)


def check_kubernetes(document):
    # The newest version that the package has.
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def check_model(name, value, path):
    """Every key of an object belongs to its model, down to pods, which are Kubernetes' own."""
    model = getattr(models, name)
    keys = {key: attribute for attribute, key in model.attribute_map.items()}
    for key, inner in value.items():
        if key not in keys:
            sys.exit(f"failed: {path} has no {key}")
        kind = model.openapi_types[keys[key]]
        if kind == "V1PodTemplateSpec":
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **inner}
            check_kubernetes(pod)
        elif kind.startswith("dict(str, Kubeflow"):
            for replica, spec in inner.items():
                check_model(kind.removeprefix("dict(str, ").removesuffix(")"), spec, f"{path}.{key}.{replica}")
        elif kind.startswith("Kubeflow"):
            check_model(kind, inner, f"{path}.{key}")
    try:
        model(**{keys[key]: inner for key, inner in value.items()})  # refuses what lacks a required one
    except ValueError as error:
        sys.exit(f"failed: {path}: {error}")


def main():
    cluster = pathlib.Path(sys.argv[1]) / "cluster"
    documents = [document for file in sorted(cluster.glob("*.yaml")) for document in yaml.safe_load_all(file.read_text())]
    kinds = [document["kind"] for document in documents]
    assert sorted(kinds) == ["Job", "PersistentVolumeClaim", "PyTorchJob", "Service"], kinds
    for document in documents:
        if document["apiVersion"] == "kubeflow.org/v1":
            check_model("KubeflowOrgV1PyTorchJob", document, document["kind"])
        else:
            check_kubernetes(document)
    # The check finds what is wrong.
    wrong = next(document for document in documents if document["kind"] == "Job")
    wrong["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    try:
        check_kubernetes(wrong)
    except kubernetes_validate.ValidationError:
        print(f"{len(documents)} manifests fit their schemas")
        return
    sys.exit("failed: a misspelled key was not found")


if __name__ == "__main__":
    main()
