"""Write kubernetes/*.yaml: what `moerl launch --kuberay --dry-run` prints, as an example to read.

    python tools/kuberay_manifests.py

A test holds the files equal to this.
"""

from pathlib import Path

from moerl.kuberay import load_for_pods, render_rayjob

ON_DATA = ("kubernetes.image=registry.example.com/moerl:0.1", "kubernetes.volumes=[{claim: data, path: /data}]", "output_dir=/data/runs")
MANIFESTS = {
    "grpo_deepseek": [
        "recipe=grpo-deepseek-v3-32n8g-sync", "model.path=/data/models/deepseek-v3", *ON_DATA,
        "kubernetes.secrets={WANDB_API_KEY: wandb/key}", "kubernetes.resources={rdma/ib: 8}",
    ],
}  # fmt: skip


def manifests() -> dict[str, str]:
    """File name -> content."""
    return {f"{name}.yaml": render_rayjob(load_for_pods(overrides), overrides) for name, overrides in MANIFESTS.items()}


def main() -> None:
    directory = Path(__file__).resolve().parent.parent / "kubernetes"
    directory.mkdir(exist_ok=True)
    for name, text in manifests().items():
        (directory / name).write_text(text)


if __name__ == "__main__":
    main()
