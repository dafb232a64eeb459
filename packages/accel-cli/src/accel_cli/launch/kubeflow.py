"""Run a job on Kubernetes: a Kubeflow TrainJob, or a JobSet, whose pods run `accel launch` again.

This is the only importer of the Kubernetes client in the command.
"""

from __future__ import annotations

import json
import queue
import re
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import yaml

from accel_cli.launch.launchers import Command, handle_signals, say
from accel_cli.launch.slurm import pass_on_flags
from accel_cli.main import ERROR
from accel_state.errors import SettingsError
from accel_state.settings import to_environ
from accel_state.topology import DEFAULT_PORT

if TYPE_CHECKING:
    from accel_cli.launch.command import LaunchPlan


def kubeflow_command(plan: LaunchPlan) -> Command:
    """Return this module, with the job as JSON, as the program."""
    job = manifest(plan, f"{_job_name(plan)}-{uuid.uuid4().hex[:5]}")
    namespace = plan.merged.settings.cluster.namespace or ""
    line = (sys.executable, "-m", "accel_cli.launch.kubeflow", json.dumps(job), namespace)
    return Command(command=line, environ=plan.environ)


def dry_run(plan: LaunchPlan) -> str:
    """Return the job as YAML; a submitted job gets a unique name."""
    return yaml.safe_dump(manifest(plan, _job_name(plan)), sort_keys=False, width=100).rstrip()


def _job_name(plan: LaunchPlan) -> str:
    """Return a valid service name from the script's name: at most 40 of a-z, 0-9 and dashes."""
    stem = Path(plan.script).stem if not plan.launch.module else plan.script
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return (name if name[:1].isalpha() else f"job-{name}")[:40].strip("-")


def manifest(plan: LaunchPlan, name: str) -> dict[str, Any]:
    """Return the manifest to submit.

    Raises:
        SettingsError: No image is set.
    """
    cluster = plan.merged.settings.cluster
    if cluster.image is None:
        raise SettingsError(
            "--launcher kubeflow runs a container: pass --image with an image that contains accel and "
            "the script."
        )
    labels = {} if cluster.queue is None else {"labels": {"kueue.x-k8s.io/queue-name": cluster.queue}}
    namespace = {} if cluster.namespace is None else {"namespace": cluster.namespace}
    build, version, kind = _FORMATS[cluster.format]
    metadata = {"name": name, **namespace, **labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": build(plan, name)}


def _train_job(plan: LaunchPlan, name: str) -> dict[str, Any]:
    """Return the specification of a TrainJob; its runtime sets the variables of `torch.distributed.run`."""
    del name
    resources = _resources(plan)
    return {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": plan.merged.settings.cluster.image,
            "numNodes": plan.launch.num_machines,
            "numProcPerNode": plan.local_processes,
            "command": _pod_command(plan),
            **({"env": settings} if (settings := _settings(plan)) else {}),
            **({"resourcesPerNode": resources} if resources else {}),
        },
    }


def _job_set(plan: LaunchPlan, name: str) -> dict[str, Any]:
    """Return the specification of a JobSet, with the variables that a TrainJob would set."""
    launch, resources = plan.launch, _resources(plan)
    rank = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    variables = {
        "PET_NNODES": launch.num_machines,
        "PET_NPROC_PER_NODE": plan.local_processes,
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": DEFAULT_PORT,
    }
    container = {
        "name": "node",
        "image": plan.merged.settings.cluster.image,
        "command": _pod_command(plan),
        "env": [
            *({"name": variable, "value": str(value)} for variable, value in variables.items()),
            *_settings(plan),
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": rank}},
        ],
        **({"resources": resources} if resources else {}),
    }
    job = {
        "completionMode": "Indexed",
        "completions": launch.num_machines,
        "parallelism": launch.num_machines,
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
    }
    return {
        "failurePolicy": {"maxRestarts": launch.max_restarts},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }


_FORMATS = {
    "trainjob": (_train_job, "trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "jobset": (_job_set, "jobset.x-k8s.io/v1alpha2", "JobSet"),
}
"""Builder of the specification, API version and kind, by format."""


def _resources(plan: LaunchPlan) -> dict[str, Any]:
    gpus = plan.merged.settings.cluster.gpus_per_node
    return {} if gpus is None else {"limits": {"nvidia.com/gpu": str(gpus)}}


def _settings(plan: LaunchPlan) -> list[dict[str, str]]:
    """Return all settings as variables: pods have neither this machine's config file nor its environment."""
    variables = to_environ(plan.merged.settings)
    return [{"name": name, "value": value.replace("$(", "$$(")} for name, value in variables.items()]


def _pod_command(plan: LaunchPlan) -> list[str]:
    """Return the command of each pod: the user's, without flags for the job, and without its config file."""
    is_restarted = plan.merged.settings.cluster.format == "jobset"  # Kubernetes restarts all pods together
    others = {*_OF_JOB, *(["launch.max_restarts"] if is_restarted else [])}
    words = ["accel", "launch", *pass_on_flags(replace(plan, config_file=None), others), "--launcher=auto"]
    # Kubernetes would replace $(NAME) by a variable of the container.
    return [word.replace("$(", "$$(") for word in [*words, "--", plan.script, *plan.script_arguments]]


_OF_JOB = ("launch.launcher", "launch.num_machines", "launch.num_processes")


class KubernetesJob:
    """A Kubernetes job, from its submission to its exit code.

    Args:
        job: The manifest.
        namespace: Its namespace.
        client: The configured module `kubernetes.client`.
    """

    def __init__(self, job: Mapping[str, Any], namespace: str, client: Any) -> None:
        group, _, version = str(job["apiVersion"]).partition("/")
        self._job, self._name = job, str(job["metadata"]["name"])
        self._kind = (group, version, namespace, f"{str(job['kind']).lower()}s")
        self._namespace = namespace
        self._client = client
        self._jobs, self._core = client.CustomObjectsApi(), client.CoreV1Api()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._followers: dict[str, threading.Thread] = {}
        self._running: set[str] = set()
        self._dropped = import_module("urllib3.exceptions").HTTPError

    def run(self) -> int:
        """Run the job; return 0, the exit code of a failed container, 1, or 128 plus the signal's number."""
        with handle_signals(("SIGINT", "SIGTERM"), lambda number, _: self._signals.put(number)):
            self._jobs.create_namespaced_custom_object(*self._kind, self._job)
            say(f"job {self._name} was submitted. Press Ctrl-C to delete it")
            while True:
                code = self._code()
                self._follow_pods()
                if code is not None:
                    for follower in self._followers.values():
                        follower.join(_LAST_OUTPUT)
                    return code
                try:
                    number = self._signals.get(timeout=_PAUSE)
                except queue.Empty:
                    continue
                self._jobs.delete_namespaced_custom_object(*self._kind, self._name)
                say(f"job {self._name} is deleted")
                return 128 + number

    def _code(self) -> int | None:
        """Return the exit code of the job; None while it runs."""
        try:
            job = self._jobs.get_namespaced_custom_object(*self._kind, self._name)
        except self._client.ApiException as error:
            if error.status == 404:
                say(f"job {self._name} was deleted")
                return 1
            if not _is_busy(error):
                raise
            return None  # Retried by the next request.
        conditions = job.get("status", {}).get("conditions", [])
        states = {item["type"] for item in conditions if item.get("status") == "True"}
        if states & {"Complete", "Completed"}:
            return 0
        if "Failed" in states:
            code = next(filter(None, self._container_codes()), 1)
            say(f"job {self._name} failed: a container exited with {code}")
            return code
        return None

    def _container_codes(self) -> Iterator[int]:
        """Yield the exit codes of ended containers, in the order in which they ended."""
        statuses = (status for pod in self._pods() for status in pod.status.container_statuses or ())
        ended = [status.state.terminated for status in statuses if status.state and status.state.terminated]
        for state in sorted(ended, key=lambda state: str(state.finished_at)):
            yield state.exit_code

    def _pods(self) -> list[Any]:
        label = f"jobset.sigs.k8s.io/jobset-name={self._name}"
        return self._core.list_namespaced_pod(self._namespace, label_selector=label).items

    def _follow_pods(self) -> None:
        """Follow the output of each running pod in a thread."""
        try:
            pods = self._pods()
        except self._client.ApiException as error:
            if not _is_busy(error):
                raise
            return
        self._running = {pod.metadata.name for pod in pods if pod.status.phase == "Running"}
        for pod in pods:
            name = pod.metadata.name
            if name not in self._followers and pod.status.phase != "Pending":
                follower = threading.Thread(target=self._show, args=(name,), daemon=True)
                self._followers[name] = follower
                follower.start()

    def _show(self, pod: str) -> None:
        """Show the output of a pod, again from where it ended if a connection is lost."""
        # The index of a pod precedes its unique suffix, if there is one.
        node, spec = re.search(r"-node-0-(\d+)", pod), self._job["spec"]
        if "trainer" in spec:
            nodes = spec["trainer"]["numNodes"]
        else:
            nodes = spec["replicatedJobs"][0]["template"]["spec"]["completions"]
        prefix = f"node {node[1]}: " if node and nodes > 1 else ""
        last = ""
        while True:
            try:
                log = self._core.read_namespaced_pod_log(
                    pod,
                    self._namespace,
                    follow=True,
                    container="node",
                    timestamps=True,
                    _preload_content=False,
                )
                for line in log:
                    time, _, text = line.decode(errors="replace").partition(" ")
                    if time > last:  # a new connection begins with what was shown before
                        sys.stdout.write(prefix + text)
                        sys.stdout.flush()
                        last = time
                if pod not in self._running:
                    return
            except self._dropped:
                pass
            except self._client.ApiException as error:
                if not _is_busy(error):
                    say(f"the output of pod {pod} cannot be read: {_reason(error)}")
                    return
            sleep(_PAUSE)


_PAUSE = 1.0
"""Seconds between two requests to the API server, which is shared."""

_NAMESPACE_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_LAST_OUTPUT = 10.0
"""Seconds to wait for the end of a pod's output after the end of the job."""


def main(arguments: Sequence[str]) -> int:
    """Submit a job and follow it.

    Args:
        arguments: The manifest as JSON, and the namespace; empty for the namespace of the current context.

    Returns:
        The exit code of the job, or 2 if it was not accepted.
    """
    job, namespace = json.loads(arguments[0]), arguments[1]
    config: Any = import_module("kubernetes.config")
    client: Any = import_module("kubernetes.client")
    try:
        config.load_config()
        if not namespace and _NAMESPACE_OF_POD.is_file():
            namespace = _NAMESPACE_OF_POD.read_text(encoding="utf-8").strip()
        elif not namespace:
            namespace = config.list_kube_config_contexts()[1]["context"].get("namespace", "default")
        return KubernetesJob(job, namespace, client).run()
    except config.ConfigException as error:
        say(f"error: no Kubernetes cluster is configured: {error}")
    except client.ApiException as error:
        say(f"error: Kubernetes rejected the request: {_reason(error)}")
    return ERROR


def _is_busy(error: Any) -> bool:
    return error.status == 429 or error.status >= 500


def _reason(error: Any) -> str:
    try:
        return json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
