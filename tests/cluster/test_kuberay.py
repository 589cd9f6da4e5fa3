"""RayJobs of KubeRay: the shipped manifest, the fields that KubeRay needs, and that every value comes from the run's settings."""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import moerl
from moerl.config.load import load
from moerl.config.rules.job_rules import job_name
from moerl.kuberay import create_rayjob, load_for_pods, render_rayjob
from moerl.types.errors import ConfigError, MoerlError

ROOT = Path(moerl.__file__).resolve().parent.parent
DEEPSEEK, DEMO = "recipe=grpo-deepseek-v3-32n8g-sync", "recipe=grpo-tiny-moe-1n2g-sync"
ON_DATA = ("kubernetes.image=r/moerl:1", "kubernetes.volumes=[{claim: data, path: /data}]", "output_dir=/data/runs")
EVERYTHING = (
    "model.path=/models/v3", "kubernetes.volumes=[{claim: data, path: /data}, {claim: m, path: /models, read_only: true}]",
    "kubernetes.secrets={WANDB_API_KEY: wandb/key}", "kubernetes.resources={rdma/ib: 8}", "kubernetes.cpus=64", "kubernetes.memory_gb=900",
    "kubernetes.node_selector={gpu: h100}", "kubernetes.tolerations=[training]", "kubernetes.queue=team", "kubernetes.namespace=rl",
    "kubernetes.retries=7", "kubernetes.max_seconds=86400", "kubernetes.end_seconds=500",
)  # fmt: skip


def rayjob(*overrides: str) -> dict[str, Any]:
    return yaml.safe_load(render_rayjob(load_for_pods(overrides), overrides))


def pods_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the cluster: the head's template, and the workers'."""
    cluster = job["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", []))]


def test_the_shipped_manifests_are_what_launch_renders():
    spec = importlib.util.spec_from_file_location("kuberay_manifests", ROOT / "tools" / "kuberay_manifests.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    shipped = {file.name: file.read_text() for file in (ROOT / "kubernetes").iterdir()}
    assert shipped == tool.manifests(), "python tools/kuberay_manifests.py writes them anew"


def test_the_fields_that_kuberay_requires_are_there():
    """required and enum of the RayJob and RayCluster CRDs, and the operator's own validation (utils/validation.go)."""
    job = rayjob(DEEPSEEK, *ON_DATA, "model.path=/data/m")
    assert (job["apiVersion"], job["kind"], set(job)) == ("ray.io/v1", "RayJob", {"apiVersion", "kind", "metadata", "spec"})
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
    assert set(cluster) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == importlib.metadata.version("ray") and cluster["rayVersion"] >= "2.52"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert not {"num-cpus", "num-gpus", "resources"} & set(group["rayStartParams"]), "pods' limits say it"
        (container,) = group["template"]["spec"]["containers"]
        mounted, there = ({each["name"] for each in part} for part in (container["volumeMounts"], group["template"]["spec"]["volumes"]))
        assert mounted == there
        assert all(isinstance(variable.get("value", ""), str) for variable in container["env"])
    (group,) = cluster["workerGroupSpecs"]
    assert group["groupName"] and group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 31
    assert spec["submitterPodTemplate"]["spec"]["restartPolicy"] in ("Never", "OnFailure"), "of a Kubernetes Job"
    assert spec["shutdownAfterJobFinishes"] is True


def test_every_value_comes_from_the_run():
    job = rayjob(DEEPSEEK, *ON_DATA, *EVERYTHING)
    assert job["metadata"] == {
        "name": "grpo-deepseek-v3-32n8g-sync", "namespace": "rl", "labels": {"kueue.x-k8s.io/queue-name": "team"},
    }  # fmt: skip
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (7, 86400)
    for pod in pods_of(job):
        (container,) = pod["containers"]
        wanted = {"cpu": 64, "memory": "900Gi", "nvidia.com/gpu": 8, "rdma/ib": 8}
        assert container["image"] == "r/moerl:1"
        assert container["resources"] == {"requests": wanted, "limits": wanted}
        assert container["volumeMounts"] == [
            {"name": "volume-0", "mountPath": "/data", "readOnly": False},
            {"name": "volume-1", "mountPath": "/models", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        assert {"name": "volume-1", "persistentVolumeClaim": {"claimName": "m", "readOnly": True}} in pod["volumes"]
        assert {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}} in container["env"]
        assert pod["nodeSelector"] == {"gpu": "h100"}
        assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu", "training"]


def test_a_text_stays_one_where_yaml_1_2_has_a_number():
    """Kubernetes reads a manifest so: the name of a rack, 12e4, would be 120000."""
    manifest = render_rayjob(load_for_pods((DEMO, *ON_DATA)), ()).splitlines()
    assert "    backoffLimit: 3".strip() in map(str.strip, manifest)
    texts = ("kubernetes.node_selector={rack: '12e4', row: '0o17', side: '1E+3', slot: 'e4'}",)
    lines = set(map(str.strip, render_rayjob(load_for_pods((DEMO, *ON_DATA, *texts)), ()).splitlines()))
    assert {"rack: '12e4'", "row: '0o17'", "side: '1E+3'", "slot: e4"} <= lines


def test_a_pod_that_must_go_waits_for_the_run_to_save():
    head, worker = pods_of(rayjob(DEEPSEEK, *ON_DATA, *EVERYTHING))
    for pod in (head, worker):
        assert pod["terminationGracePeriodSeconds"] > 500
        (wait,) = [each["value"] for each in pod["containers"][0]["env"] if each["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
        assert wait == "500", "of `ray job stop`, which a deletion of the RayJob does first"
    hooks = [pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] for pod in (head, worker)]
    assert hooks[0] == ["/bin/sh", "-c", "exec python3 -m moerl end /data/runs/grpo-deepseek-v3-32n8g-sync --seconds=500"]
    assert hooks[1][-1] == hooks[0][-1] + ' --address="$RAY_ADDRESS"'


def test_a_run_of_one_node_is_a_head_alone_and_without_gpus_asks_for_none():
    job = rayjob(DEMO, *ON_DATA, "kubernetes.with_gpus=false")
    assert "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]
    (pod,) = pods_of(job)
    assert "resources" not in pod["containers"][0] and "tolerations" not in pod
    assert shlex.split(job["spec"]["entrypoint"])[:4] == ["python3", "-m", "moerl", "train"]
    (pod,) = pods_of(rayjob(DEMO, *ON_DATA))
    gpus = load((DEMO,)).train.layout.ranks  # its servers compute on CPU
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": gpus}


def test_values_reach_the_driver_as_they_are_and_the_doctor_goes_first(tmp_path: Path):
    """Through what they pass: Kubernetes, which expands $(NAME) and $$ in a container's arguments, the shell of the submitter's script,
    `ray job submit`, which quotes its words again, and the job's shell."""
    hostile = 'network.variables.GREETING="it\'s $HOME $$ $(HOME) $$(HOME) `id` \\\\ and more; exit 7"'
    overrides = (DEMO, *ON_DATA, hostile)
    python, ray = tmp_path / "python3", tmp_path / "ray"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >> called\n')
    ray.write_text(f"#!{shlex.quote(str(Path('/usr/bin/env')))} bash\nshift 3\nprintf '%q ' \"$@\" > entrypoint\n")
    for program in (python, ray):
        program.chmod(0o755)
    options = {"cwd": tmp_path, "env": {"PATH": f"{tmp_path}:/usr/bin:/bin"}, "check": True}
    entrypoint = re.sub(r"\$(\$|\(HOME\))", lambda found: "$" if found[1] == "$" else "/root", rayjob(*overrides)["spec"]["entrypoint"])
    submitter = f"ray job submit -- {entrypoint} ; touch submitted"
    subprocess.run(["bash", "-c", submitter], **options)
    assert (tmp_path / "submitted").exists() and not (tmp_path / "called").exists(), "nothing of the job runs in the submitter"
    subprocess.run(["bash", "-c", (tmp_path / "entrypoint").read_text()], **options)
    called = (tmp_path / "called").read_text().splitlines()
    doctor, train = called.index("doctor"), called.index("train")
    assert doctor < train and called[train + 1 :] == list(overrides)
    assert called[doctor + 1 : doctor + 3] == ["--nodes=1", "--gpus-per-node=2"]


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        (("kubernetes.image=null",), "kubernetes.image", "must be given"),
        (("output_dir=runs",), "output_dir", "must be on a volume that pods can write"),
        (("kubernetes.volumes=[{claim: d, path: /data, read_only: true}]",), "output_dir", "must be on a volume that pods can write"),
        (("name=9-lives",), "name", "must begin with a letter"),
        ((f"name={'long-' * 10}er",), "name", "at most 47 characters"),
        (("kubernetes.volumes=[{claim: d, path: data}]", "output_dir=data/x"), "kubernetes.volumes.0.path", "must be absolute"),
        (("kubernetes.secrets={WANDB_API_KEY: s3cret}",), "kubernetes.secrets.WANDB_API_KEY", "must be SECRET/KEY"),
        (("kubernetes.secrets={a-b: s3cret}",), "kubernetes.secrets.a-b", "is not the name of a variable"),
    ],
)
def test_settings_that_no_rayjob_can_have_are_refused(overrides: tuple[str, ...], path: str, said: str):
    with pytest.raises(ConfigError) as caught:
        rayjob(DEMO, *ON_DATA, *overrides)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert said in str(problem)
    assert "s3cret" not in str(problem)


def test_a_model_outside_of_the_volumes_is_refused():
    with pytest.raises(ConfigError, match="model.path = '/elsewhere/v3': must be on a volume of the pods"):
        rayjob(DEEPSEEK, *ON_DATA, "model.path=/elsewhere/v3")


def test_a_data_set_of_evaluations_outside_of_the_volumes_is_refused():
    files = "eval.datasets.held.data={kind: files, files: [/home/me/held.jsonl], max_prompt_tokens: 8}"
    with pytest.raises(ConfigError, match="eval.datasets.held.data.files.0 = '/home/me/held.jsonl': must be on a volume of the pods"):
        rayjob(DEMO, *ON_DATA, "eval=tiny-repeat", files)


def test_functions_of_the_users_are_files_that_pods_can_find(tmp_path: Path):
    (tmp_path / "own.py").write_text("def score(data_source, solution_str, ground_truth, extra_info):\n    return 1\n")
    own_loss = "import dataclasses\n\n@dataclasses.dataclass\nclass Own:\n    metric_names = ()\n\n    def token_loss(self, columns): ...\n"
    (tmp_path / "own_loss.py").write_text(own_loss)
    relative = Path(os.path.relpath(tmp_path))
    terms = "{{own: {{kind: function, path: '{}/own.py:score'}}, other: {{kind: function, path: 'json:loads'}}}}"
    words = [DEMO, *ON_DATA, "eval=tiny-repeat", f"reward.terms={terms.format(relative)}"]
    words += [
        f"eval.datasets.repeat.reward={{terms: {terms.format(relative)}}}",
        f"algorithm.objective={{kind: custom, path: '{relative}/own_loss.py:Own'}}",
    ]
    with pytest.raises(ConfigError) as caught:
        rayjob(*words)
    paths = ["reward.terms.own.path", "eval.datasets.repeat.reward.terms.own.path", "algorithm.objective.path"]
    assert [(problem.path, problem.rule) for problem in caught.value.problems] == [(path, "must be absolute") for path in paths]
    rayjob(DEMO, *ON_DATA, f"reward.terms={terms.format(tmp_path)}")


def test_rules_about_the_model_hold_when_only_pods_have_its_files():
    with pytest.raises(ConfigError, match="train.layout"):
        load_for_pods((DEEPSEEK, *ON_DATA, "model.path=/data/m", "train.layout.ep=7"))


def test_a_recipes_directory_must_be_where_pods_find_it(tmp_path: Path):
    config = load_for_pods((DEMO, *ON_DATA))
    with pytest.raises(ConfigError, match="--config-dir"):
        render_rayjob(config, (DEMO,), tmp_path)
    assert "--config-dir=/data/own" in render_rayjob(config, (DEMO,), Path("/data/own"))


def test_names_become_names_of_kubernetes():
    assert job_name("GRPO_glm-4.5 x") == "grpo-glm-4-5-x"


def test_kubectl_gets_the_manifest_and_its_own_words_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MoerlError, match="kubectl is not on PATH here"):
        create_rayjob("kind: RayJob")
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\nread line\n[ "$line" = "kind: RayJob" ] && echo "$@" && exit 0\necho "AlreadyExists" >&2; exit 1\n')
    program.chmod(0o755)
    assert create_rayjob("kind: RayJob") == "create -f -"
    with pytest.raises(MoerlError, match="AlreadyExists"):
        create_rayjob("kind: Other")
