"""The metrics of the last step as Prometheus reads them."""

from __future__ import annotations

import math
from pathlib import Path

from strop.config import GrpoRunConfig, load_config
from strop.extensions.trackers.prometheus import PrometheusTracker
from strop.runs.lifecycle import make_services


def read_samples(path: Path) -> dict[str, float]:
    """Read the text format as its specification says. Each name has a type before it, and one sample."""
    samples, typed = {}, ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            typed = line.split()[2]
            continue
        name, _, value = line.rpartition(" ")
        assert name.split("{")[0] == typed and name not in samples
        samples[name] = float(value)
    return samples


def test_each_step_replaces_the_one_before_and_the_file_goes_with_the_run(tmp_path: Path) -> None:
    overrides = [
        "logger.prometheus.enabled=true",
        f"logger.prometheus.file={tmp_path}/out/a.prom",
        "run_name=adding",
        "policy.model_name=m",
    ]
    (tracker,) = make_services(load_config(None, overrides, root=GrpoRunConfig, check=False).config)
    tracker.log(1, {"train/reward": 0.5, "train/rewards/is-right": 1.0, "old": 1.0})
    tracker.log(2, {"train/reward": 0.25, "train/rewards/is-right": math.nan})
    samples = read_samples(tmp_path / "out" / "a.prom")
    assert samples.pop('strop_step{run="adding"}') == 2 and samples.pop('strop_train_reward{run="adding"}') == 0.25
    assert list(samples) == ['strop_train_rewards_is_right{run="adding"}'] and math.isnan(samples.popitem()[1])
    tracker.close()
    assert list((tmp_path / "out").iterdir()) == []


def test_names_are_those_of_prometheus_and_a_label_is_quoted(tmp_path: Path) -> None:
    tracker = PrometheusTracker(tmp_path / "a.prom", 'a "run"\\\n')
    tracker.log(3, {"a/b": math.inf, "a.b": 2.0})  # two names that become one: the last holds
    text = (tmp_path / "a.prom").read_text()
    assert 'strop_a_b{run="a \\"run\\"\\\\\\n"} 2.0\n' in text and text.count("strop_a_b{") == 1
