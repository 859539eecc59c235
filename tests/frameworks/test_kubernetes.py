"""examples/launch for Kubernetes: what is written twice is the same, and torchrun takes its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from torch.distributed.run import get_args_parser

LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch"


def read(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def check_pod(pod: dict[str, Any], processes: int) -> Any:
    """Return what torchrun is given, parsed."""
    (container,) = pod["containers"]
    program, *arguments = container["command"]
    assert program == "torchrun"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": processes}
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    return get_args_parser().parse_args([each.replace("$(JOB_COMPLETION_INDEX)", "1") for each in arguments])


def test_pytorchjob() -> None:
    job = read("pytorchjob.yaml")
    assert (job["kind"], job["apiVersion"]) == ("PyTorchJob", "kubeflow.org/v1")
    spec, elastic = job["spec"], job["spec"]["elasticPolicy"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == elastic["minReplicas"] == elastic["maxReplicas"]
    given = check_pod(worker["template"]["spec"], int(spec["nprocPerNode"]))
    assert given.training_script == "train.py"
    assert worker["template"]["spec"]["containers"][0]["name"] == "pytorch"


def test_jobset() -> None:
    job = read("jobset.yaml")
    assert (job["kind"], job["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert spec["parallelism"] == spec["completions"]
    given = check_pod(spec["template"]["spec"], processes=8)
    assert (given.nnodes, given.nproc_per_node, given.node_rank) == (str(spec["completions"]), "8", 1)
    name = job["metadata"]["name"]
    assert given.master_addr == f"{name}-{replicated['name']}-0-0.{name}"
    (port,) = spec["template"]["spec"]["containers"][0]["ports"]
    assert given.master_port == port["containerPort"]
    assert given.training_script_args == ["--out=/runs"]
