"""Jobs for Kubernetes: their manifests, and a small API server that runs their pods as processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.arguments import read_arguments
from accel_cli.launch import kubeflow
from accel_cli.launch.command import make_plan, parse_torchrun
from accel_cli.launch.hosts import HostDevices
from accel_cli.main import main
from accel_state.errors import SettingsError
from accel_state.settings import from_environ, merge_layers, parse_file


def plan_of(*line, script="My_train.py", words=(), file=None):
    read = read_arguments(["--launcher", "kubeflow", *line, "--", script, *words])
    merged = merge_layers(read.settings, parse_file(file or {}, "run.yaml"))
    return make_plan(merged, read.script, read.script_arguments, {}, HostDevices(gpus=0, cores=4))


def job_of(*line, **more):
    """Return what a dry run prints; a model of Kubernetes has read it and given all of it back."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = yaml.safe_load(kubeflow.show(plan_of("--image", "me/train:1", *line, **more)))
    model = {"TrainJob": models.TrainerV1alpha1TrainJob, "JobSet": models.JobsetV1alpha2JobSet}[job["kind"]]
    assert model.from_dict(job).to_dict() == job
    return job


def test_a_train_job_has_the_nodes_the_command_and_the_queue():
    line = ["--nodes", "2", "--gpus_per_node", "8", "--queue", "mine", "--namespace", "ours"]
    job = job_of(*line, "--mixed_precision", "bf16", "--max_restarts", "3", words=["--lr", "$(HOME) a"])
    assert job["metadata"] == {
        "name": "my-train", "namespace": "ours", "labels": {"kueue.x-k8s.io/queue-name": "mine"},
    }  # fmt: skip
    assert job["spec"] == {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": "me/train:1",
            "numNodes": 2,
            "numProcPerNode": 8,
            "command": [
                "accel", "launch", "--launcher=auto", "--max_restarts=3",
                "--", "My_train.py", "--lr", "$$(HOME) a",
            ],
            "env": job["spec"]["trainer"]["env"],
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": "8"}},
        },
    }  # fmt: skip


def test_a_job_set_brings_the_variables_that_a_runtime_would_set():
    job = job_of("--format", "jobset", "--nodes", "2", "--num_processes", "4", "--max_restarts", "3", "--cpu")
    assert job["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (replicated,) = job["spec"]["replicatedJobs"]
    node = replicated["template"]["spec"]
    assert (node["completionMode"], node["completions"], node["parallelism"]) == ("Indexed", 2, 2)
    (container,) = node["template"]["spec"]["containers"]
    assert container["command"] == ["accel", "launch", "--launcher=auto", "--", "My_train.py"]
    environ = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    assert from_environ(environ).process.use_cpu
    read = parse_torchrun(environ)
    assert {path.removeprefix("launch."): source.value for path, source in read.items()} == {
        "num_machines": 2,
        "num_processes": 2,
        "main_process_ip": "my-train-node-0-0.my-train",
        "main_process_port": 29500,
    }


@given(st.text(min_size=1).filter(lambda text: "/" not in text and "\0" not in text))
def test_a_job_has_a_name_that_a_service_may_have(script):
    name = kubeflow._job_name(plan_of("--image", "x", script=script))
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name)


def test_a_job_needs_an_image_and_its_own_flags(tmp_path, monkeypatch, capsys):
    with pytest.raises(SettingsError, match="--launcher kubeflow runs a container: pass --image"):
        kubeflow.show(plan_of())
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert main(["launch", "--launcher", "kubeflow", "--image", "x", "--dry_run", "train.py"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "TrainJob"


class ApiServer(BaseHTTPRequestHandler):
    """What of Kubernetes and of Kubeflow's controller a job needs; a pod is a process of this machine."""

    protocol_version = "HTTP/1.1"
    jobs, pods, lines, environ = {}, {}, {}, {}

    def log_message(self, *_):
        pass

    def answer(self, code, content):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if job["metadata"].get("labels"):  # This cluster has no queues.
            return self.answer(403, {"kind": "Status", "message": "there is no queue"})
        name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
        self.jobs[name] = job
        for node in range(trainer["numNodes"]):
            variables = {
                "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1",
                "PET_MASTER_PORT": self.environ["PORT"],
            }  # fmt: skip
            self.pods[f"{name}-node-0-{node}-abcde"] = subprocess.Popen(
                trainer["command"], env={**os.environ, **self.environ, **variables},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.environ["FOLDER"],
            )  # fmt: skip
        return self.answer(201, job)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.endswith("/log"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            pod = path.split("/")[-2]
            earlier, output = self.lines.setdefault(pod, []), self.pods[pod].stdout
            for line in itertools.chain([*earlier], map(partial(self.keep, earlier), output)):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                if self.environ.pop("CUT", None):
                    self.close_connection = True  # in the middle of the output
                    return None
            self.wfile.write(b"0\r\n\r\n")
            return None
        if path.endswith("/pods"):
            return self.answer(200, {"items": [show_pod(*item) for item in self.pods.items()]})
        codes = [process.poll() for process in self.pods.values()]
        kind = "Failed" if any(codes) else "Complete"
        conditions = [] if None in codes and not any(codes) else [{"type": kind, "status": "True"}]
        return self.answer(200, {**self.jobs[path.split("/")[-1]], "status": {"conditions": conditions}})

    def keep(self, earlier, line):
        earlier.append(b"2026-01-01T00:00:00.%09dZ %s" % (len(earlier), line))
        return earlier[-1]

    def do_DELETE(self):
        del self.jobs[self.path.split("/")[-1]]
        for process in self.pods.values():
            process.terminate()
        self.answer(200, {"kind": "Status"})


def show_pod(name, process):
    code = process.poll()
    ended = {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}}
    state = {"running": {}} if code is None else ended
    status = {"name": "node", "state": state, "image": "", "imageID": "", "ready": True, "restartCount": 0}
    phase = "Running" if code is None else "Failed" if code else "Succeeded"
    return {"metadata": {"name": name}, "status": {"phase": phase, "containerStatuses": [status]}}


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Launch a script as a job of a cluster of this test."""
    from accel_state.topology import reserved_port

    pytest.importorskip("kubernetes")
    environ = {"FOLDER": str(tmp_path), "HF_HOME": str(tmp_path), "PORT": str(reserved_port())}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    handler = type("Handler", (ApiServer,), {"jobs": {}, "pods": {}, "lines": {}, "environ": environ})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = {"cluster": "here", "user": "me", "namespace": "ours"}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "me", "user": {}}], "contexts": [{"name": "c", "context": context}],
    }  # fmt: skip
    (tmp_path / "kube.yaml").write_text(yaml.safe_dump(config))

    @contextmanager
    def run(source, *line):
        (tmp_path / "script.py").write_text(source)
        command = [sys.executable, "-m", "accel_cli", "launch", "--launcher", "kubeflow", "--image", "x"]
        variables = {"HF_HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "kube.yaml")}
        with subprocess.Popen(
            [*command, *line, "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=tmp_path, env={**os.environ, **variables},
        ) as process:  # fmt: skip
            yield process

    run.environ = environ
    yield run
    server.shutdown()
    server.server_close()
    for process in handler.pods.values():
        process.kill()
        process.communicate()


def test_a_job_is_followed_and_has_the_exit_code_of_its_container(launched):
    with launched(
        "import os, sys\nprint('out', os.environ['PET_NNODES'])\nsys.exit(5)\n", "--cpu"
    ) as process:
        output, problems = process.communicate()
    assert (process.returncode, output) == (5, "out 1\n"), problems
    assert re.search(r"job script-\w{5} failed: a container exited with 5", problems)


def test_output_goes_on_after_a_connection_was_dropped(launched):
    launched.environ["CUT"] = "1"
    source = "import sys\nprint('first', flush=True)\nsys.stdin.readline()\nprint('second')\nprint('third')\n"
    with launched(source, "--cpu") as process:
        output, problems = process.communicate()
    assert (process.returncode, output) == (0, "first\nsecond\nthird\n"), problems


def test_ctrl_c_deletes_the_job(launched):
    with launched("import time\nprint('up', flush=True)\ntime.sleep(600)\n", "--cpu") as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, problems = process.communicate()
    assert process.returncode == 130
    assert "is deleted" in problems


def test_what_kubernetes_refuses_is_said(launched):
    with launched("", "--queue", "none") as process:
        _, problems = process.communicate()
    assert process.returncode == 2
    assert "accel launch: error: Kubernetes rejected the request: there is no queue" in problems


@pytest.mark.thorough
def test_ranks_of_two_pods_train_together(launched):
    source = (
        "import torch\nfrom accel import Accelerator\na = Accelerator()\n"
        "print(a.num_processes, a.reduce(torch.ones(1) * (a.process_index + 1), 'sum').item())\n"
        "a.end_training()\n"
    )
    with launched(source, "--cpu", "--nodes", "2", "--num_processes", "2") as process:
        output, problems = process.communicate()
    assert process.returncode == 0, output + problems
    assert sorted(output.splitlines()) == [f"node {node}: 2 3.0" for node in range(2)]


RESOURCES = {
    "trainer.kubeflow.org/v1alpha1": ("TrainJob", "trainjobs"),
    "jobset.x-k8s.io/v1alpha2": ("JobSet", "jobsets"),
}


class DiscoverableServer(BaseHTTPRequestHandler):
    """Says which resources it has, as kubectl asks, and keeps what is created."""

    made: ClassVar = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/").removeprefix("apis").strip("/")
        if path in RESOURCES:
            kind, plural = RESOURCES[path]
            resource = {
                "name": plural,
                "kind": kind,
                "namespaced": True,
                "verbs": ["create"],
                "singularName": "",
            }
            return self.answer(
                200, {"kind": "APIResourceList", "groupVersion": path, "resources": [resource]}
            )
        if path == "api":
            return self.answer(200, {"kind": "APIVersions", "versions": []})
        versions = [{"groupVersion": name, "version": name.partition("/")[2]} for name in RESOURCES]
        groups = [
            {
                "name": version["groupVersion"].partition("/")[0],
                "versions": [version],
                "preferredVersion": version,
            }
            for version in versions
        ]
        return self.answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})

    def do_POST(self):
        self.made.append(
            (self.path.partition("?")[0], json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        )
        self.answer(201, self.made[-1][1])

    answer = ApiServer.answer


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_kubectl_creates_what_a_dry_run_prints(form, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    line = [
        "--launcher",
        "kubeflow",
        "--image",
        "x",
        "--format",
        form,
        "--num_machines",
        "2",
        "--num_processes",
        "4",
    ]
    assert main(["launch", *line, "--dry_run", "train.py"]) == 0
    printed = capsys.readouterr().out
    handler = type("Handler", (DiscoverableServer,), {"made": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            "kubectl",
            "--server",
            f"http://127.0.0.1:{server.server_port}",
            "create",
            "--validate=false",
            "-f",
            "-",
        ]
        variables = {"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}
        done = subprocess.run(
            command,
            input=printed,
            capture_output=True,
            text=True,
            env={**os.environ, **variables},
        )
        server.shutdown()
    assert "created" in done.stdout, done.stderr
    wanted = [document for document in yaml.safe_load_all(printed) if document]
    assert len(handler.made) == len(wanted)
    for (path, content), document in zip(handler.made, wanted, strict=True):
        assert path.startswith(f"/apis/{document['apiVersion']}/namespaces/")
        assert {key: content[key] for key in document if key != "metadata"} == {
            key: value for key, value in document.items() if key != "metadata"
        }
        assert content["metadata"].items() >= document["metadata"].items()


def test_pods_train_with_the_settings_of_the_config_file():
    file = {"distributed_type": "FSDP", "mixed_precision": "bf16", "launcher": "kubeflow"}
    trainer = job_of("--nodes", "2", file=file)["spec"]["trainer"]
    settings = from_environ({item["name"]: item["value"] for item in trainer["env"]})
    assert settings.precision.mixed_precision == "bf16"
    assert settings.fsdp is not None
    assert "--launcher=auto" in trainer["command"], "the image may contain that file, too"
