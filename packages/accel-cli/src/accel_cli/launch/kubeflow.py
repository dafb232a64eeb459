"""Run a job on Kubernetes: a Kubeflow TrainJob, or a JobSet, whose pods run `accel launch` again.

This is the only importer of the Kubernetes client in the command.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import Any

import yaml

from accel_cli.launch.clusters import follow, node_flags
from accel_cli.launch.launchers import require_library, say
from accel_cli.launch.plan import LaunchPlan
from accel_cli.main import ERROR
from accel_state.errors import SettingsError
from accel_state.settings import to_environ
from accel_state.topology import DEFAULT_PORT


def run(plan: LaunchPlan) -> int:
    """Submit a job and follow it.

    Returns:
        The exit code of the job, 128 plus the number of the signal that deleted it, or 2
        if it was not accepted.
    """
    require_library("kubeflow", "kubernetes", "the client of Kubernetes")
    job = manifest(plan, f"{_job_name(plan)}-{uuid.uuid4().hex[:5]}")
    config: Any = import_module("kubernetes.config")
    client: Any = import_module("kubernetes.client")
    try:
        config.load_config()
        namespace = plan.settings.cluster.namespace
        if not namespace and _NAMESPACE_OF_POD.is_file():
            namespace = _NAMESPACE_OF_POD.read_text(encoding="utf-8").strip()
        elif not namespace:
            namespace = config.list_kube_config_contexts()[1]["context"].get("namespace", "default")
        return follow(KubernetesJob(job, str(namespace), plan.num_machines, client), _PAUSE)
    except config.ConfigException as error:
        say(f"error: no Kubernetes cluster is configured: {error}")
    except client.ApiException as error:
        say(f"error: Kubernetes rejected the request: {_reason(error)}")
    return ERROR


_NAMESPACE_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def show(plan: LaunchPlan) -> str:
    """Return the job as YAML; a submitted job gets a unique name."""
    return yaml.safe_dump(manifest(plan, _job_name(plan)), sort_keys=False, width=100).rstrip()


def _job_name(plan: LaunchPlan) -> str:
    """Return a valid service name from the script's name: at most 40 of a-z, 0-9 and dashes."""
    stem = Path(plan.script).stem if not plan.launch.module else plan.script
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return (name if name[:1].isalpha() else f"job-{name}")[:40].strip("-")


def manifest(plan: LaunchPlan, name: str) -> dict[str, Any]:
    """Return the manifest to submit."""
    cluster = plan.settings.cluster
    if cluster.image is None:
        raise SettingsError(
            "--launcher kubeflow runs a container: pass --image with an image that contains accel and "
            "the script."
        )
    labels = {} if cluster.queue is None else {"labels": {"kueue.x-k8s.io/queue-name": cluster.queue}}
    namespace = {} if cluster.namespace is None else {"namespace": cluster.namespace}
    gpus = cluster.gpus_per_node
    resources = {} if gpus is None else {"limits": {"nvidia.com/gpu": str(gpus)}}
    # A JobSet restarts all pods together.
    flags = node_flags(plan, *(["launch.max_restarts"] if cluster.format == "jobset" else []))
    words = ["accel", "launch", *flags, "--", plan.script, *plan.script_arguments]
    environ = to_environ(plan.settings)
    container = {
        "image": cluster.image,
        # Kubernetes would replace $(NAME) by a variable of the container.
        "command": [word.replace("$(", "$$(") for word in words],
        "env": [{"name": key, "value": text.replace("$(", "$$(")} for key, text in environ.items()],
    }
    build, version, kind = _FORMATS[cluster.format]
    metadata = {"name": name, **namespace, **labels}
    spec = build(plan, name, container, resources)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _train_job(
    plan: LaunchPlan, name: str, container: dict[str, Any], resources: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the specification of a TrainJob; its runtime sets the variables of `torch.distributed.run`."""
    del name
    trainer = {
        "image": container.pop("image"),
        "numNodes": plan.num_machines,
        "numProcPerNode": plan.local_processes,
        **{key: value for key, value in container.items() if value},
        **({"resourcesPerNode": resources} if resources else {}),
    }
    return {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}


def _job_set(
    plan: LaunchPlan, name: str, container: dict[str, Any], resources: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the specification of a JobSet, with the variables that a TrainJob would set."""
    nodes = plan.num_machines
    variables = {
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": plan.local_processes,
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": DEFAULT_PORT,
    }
    rank = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    environ = [
        *({"name": key, "value": str(value)} for key, value in variables.items()),
        *container["env"],
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": rank}},
    ]
    node = {"name": "node", **container, "env": environ, **({"resources": resources} if resources else {})}
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", "containers": [node]}},
    }
    return {
        "failurePolicy": {"maxRestarts": plan.launch.max_restarts},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }


_FORMATS: Mapping[str, tuple[Callable[..., dict[str, Any]], str, str]] = {
    "trainjob": (_train_job, "trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "jobset": (_job_set, "jobset.x-k8s.io/v1alpha2", "JobSet"),
}
"""Builder of the specification, API version and kind, by format."""


class KubernetesJob:
    """A submitted job.

    Args:
        job: The manifest.
        namespace: Its namespace.
        nodes: The number of its pods.
        client: The configured module `kubernetes.client`.
    """

    def __init__(self, job: Mapping[str, Any], namespace: str, nodes: int, client: Any) -> None:
        group, _, version = str(job["apiVersion"]).partition("/")
        self._name, self._namespace, self._nodes = str(job["metadata"]["name"]), namespace, nodes
        self._kind = (group, version, namespace, f"{str(job['kind']).lower()}s")
        self._client, self._jobs, self._core = client, client.CustomObjectsApi(), client.CoreV1Api()
        self._followers: dict[str, threading.Thread] = {}
        self._running: set[str] = set()
        self._code: int | None = None
        self._jobs.create_namespaced_custom_object(*self._kind, job)
        say(f"job {self._name} was submitted. Press Ctrl-C to delete it")

    def poll(self) -> int | None:
        """Follow the output of each pod in a thread; return the exit code once the job has ended."""
        if self._code is not None:
            return self._code
        try:
            job = self._jobs.get_namespaced_custom_object(*self._kind, self._name)
            label = f"jobset.sigs.k8s.io/jobset-name={self._name}"
            pods = self._core.list_namespaced_pod(self._namespace, label_selector=label).items
        except self._client.ApiException as error:
            if error.status == 404:
                say(f"job {self._name} was deleted")
                return 1
            if not _is_busy(error):
                raise
            return None  # Retried by the next request.
        self._running = {pod.metadata.name for pod in pods if pod.status.phase == "Running"}
        for pod in pods:
            name = pod.metadata.name
            if name not in self._followers and pod.status.phase != "Pending":
                self._followers[name] = threading.Thread(target=self._show, args=(name,), daemon=True)
                self._followers[name].start()
        conditions = job.get("status", {}).get("conditions", [])
        states = {item["type"] for item in conditions if item.get("status") == "True"}
        if not states & {"Complete", "Completed", "Failed"}:
            return None
        for follower in self._followers.values():
            follower.join(_LAST_OUTPUT)
        return self._failure(pods) if "Failed" in states else 0

    def cancel(self, number: int) -> None:
        """Delete the job."""
        self._jobs.delete_namespaced_custom_object(*self._kind, self._name)
        say(f"job {self._name} is deleted")
        self._code = 128 + number

    def forward(self, number: int) -> None:
        """Ignore a user signal: Kubernetes has no way to send one."""

    def _failure(self, pods: list[Any]) -> int:
        """Return the exit code of the container that failed first."""
        statuses = (status for pod in pods for status in pod.status.container_statuses or ())
        ended = [status.state.terminated for status in statuses if status.state and status.state.terminated]
        codes = [state.exit_code for state in sorted(ended, key=lambda state: str(state.finished_at))]
        code = next(filter(None, codes), 1)
        say(f"job {self._name} failed: a container exited with {code}")
        return code

    def _show(self, pod: str) -> None:
        """Show the output of a pod, again from where it ended if a connection is lost."""
        node = re.search(r"-node-0-(\d+)", pod)  # before a unique suffix, if there is one
        prefix = f"node {node[1]}: " if node and self._nodes > 1 else ""
        last = ""
        while True:
            try:
                log = self._core.read_namespaced_pod_log(
                    pod, self._namespace, follow=True, container="node", timestamps=True,
                    _preload_content=False,
                )  # fmt: skip
                for line in log:
                    time, _, text = line.decode(errors="replace").partition(" ")
                    if time > last:  # a new connection begins with what was shown before
                        sys.stdout.write(prefix + text)
                        sys.stdout.flush()
                        last = time
                if pod not in self._running:
                    return
            except import_module("urllib3.exceptions").HTTPError:
                pass
            except self._client.ApiException as error:
                if not _is_busy(error):
                    say(f"the output of pod {pod} cannot be read: {_reason(error)}")
                    return
            sleep(_PAUSE)


_PAUSE = 1.0
"""Seconds between two requests to the API server, which is shared."""

_LAST_OUTPUT = 10.0
"""Seconds to wait for the end of a pod's output after the end of the job."""


def _is_busy(error: Any) -> bool:
    return error.status == 429 or error.status >= 500


def _reason(error: Any) -> str:
    try:
        return json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
